"""A run trains the paper's model without changing it: what users hold is whole, and nothing they ask is ignored."""

import pytest
import torch

import vitrail as vt
from tests.support.tiny_runs import SETTINGS, RecordingCallback, train
from vitrail.base.errors import InputError
from vitrail.fast.lora import plain_state
from vitrail.fast.prepare import prepare
from vitrail.fast.training import TrainingExecution
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model.device import choose_device
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

CONFIG = dict(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=3)


def build_trainer(data, **settings):
    torch.manual_seed(0)
    how = TrainConfig(**{"batch": 16, "epochs": 1, "ema": None, "lr": 1e-2, **settings})
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    model = vt.ViT(vt.ViTConfig(**CONFIG, drop_path=0.2))
    return Trainer(
        RunPlan(open_dataset(data), Recipe(model.config, spec, how), choose_device("fp32", device="cpu")),
        model,
    )


def batches_of(trainer):
    return Reader(trainer.data.train, trainer.preprocess).batches(trainer.micro_batch_indices())


def kinds(model):
    return [(name, type(module)) for name, module in model.named_modules()]


@pytest.mark.parametrize("settings", [{}, dict(tune="lora", lora_rank=2), dict(checkpoint_blocks=1)], ids=str)
def test_the_model_keeps_its_modules_and_names(data, settings):
    trainer = build_trainer(data, **settings)
    before = kinds(trainer.model)
    trainer.run()
    assert kinds(trainer.model) == before == kinds(vt.ViT(trainer.model.config))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())
    assert list(trainer.model.state_dict()) == list(vt.ViT(trainer.model.config).state_dict())


def test_a_callback_meets_a_whole_model(data, tmp_path):
    """In training mode, too: every token of the last block is there, and patches form their grid."""
    seen = []

    class Watcher(RecordingCallback):
        def on_epoch(self, metrics):
            model = trainers[0].model.train()
            with vt.record(model, "blocks.*.out", "blocks.*.attention.q") as tape:
                model(torch.rand(2, 1, 8, 8))
            seen.append({name: tuple(tensor.shape) for name, tensor in tape.items()})
            seen.append(tuple(model.encode(torch.rand(2, 1, 8, 8)).patches.shape))

    trainers, init = [], Trainer.__init__

    def remember(self, plan):
        init(self, plan)
        trainers[:] = [self]

    Trainer.__init__ = remember
    try:
        model = dict(width=16, depth=2, heads=2, patch=4, size=8, pool="class", class_token=True)
        settings = {**SETTINGS, "epochs": 1, "model": model, "device": "cpu"}
        train(data, out=tmp_path / "run", callback=Watcher(), **settings)
    finally:
        Trainer.__init__ = init
    tape, patches = seen
    assert tape["blocks.0.out"] == tape["blocks.1.out"] == (2, 5, 16)
    assert tape["blocks.1.attention.q"] == (2, 2, 5, 8)
    assert patches == (2, 2, 2, 16)


def test_what_is_recorded_during_a_step_is_whole_and_the_step_is_the_same(data):
    how = dict(optimizer="sgd", momentum=0.9)  # AdamW would enlarge rounding
    plain, watched = build_trainer(data, **how), build_trainer(data, **how)
    said = []
    watched.on_message = said.append
    for trainer in (plain, watched):
        batches = batches_of(trainer)
        trainer.take_step(batches)
        if trainer is watched:
            with vt.record(trainer.model, "blocks.1.out", "blocks.1.attention.k") as tape:
                trainer.take_step(batches)
                trainer.take_step(batches)
        else:
            trainer.take_step(batches)
            trainer.take_step(batches)
        trainer.take_step(batches)
    assert tape["blocks.1.out"].shape == (16, 5, 16)
    assert tape["blocks.1.attention.k"].shape == (16, 2, 5, 8)
    (message,) = said
    assert "plain model" in message
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_edit_takes_part_in_training(data):
    """A head that is silenced gets no gradient."""
    trainer = build_trainer(data, weight_decay=0.0, optimizer="sgd", momentum=0.0)
    torch.nn.init.normal_(trainer.model.head.weight)
    before = trainer.model.blocks[1].attention.out.weight.detach().clone()
    keep = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    with vt.edit(trainer.model, {"blocks.1.attention.heads": lambda heads: heads * keep}):
        trainer.take_step(batches_of(trainer))
    change = (trainer.model.blocks[1].attention.out.weight - before).abs().sum(0).view(2, 8).sum(1)
    assert change[0] > 0
    assert change[1] == 0


def test_where_another_module_is_trained_recording_is_refused(data):
    trainer = build_trainer(data, tune="lora", lora_rank=2)
    with (
        vt.record(trainer.model, "blocks.0.out"),
        pytest.raises(InputError, match="LoRA cannot be recorded or edited"),
    ):
        trainer.take_step(batches_of(trainer))


def test_after_an_epoch_the_model_has_the_weights_of_lora(data):
    trainer = build_trainer(data, tune="lora", lora_rank=2)
    first = trainer.model.blocks[0].attention.qkv.weight.detach().clone()
    trainer.run()
    merged = plain_state(trainer.trained)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in trainer.model.state_dict().items())
    assert not torch.equal(trainer.model.blocks[0].attention.qkv.weight, first)
    original = trainer.trained.blocks[0].attention.qkv.parametrizations.weight.original
    assert torch.equal(original, first)  # W_0 is what it was


def test_the_executable_trains_the_parameters_of_the_model():
    model = vt.ViT(vt.ViTConfig(**CONFIG)).double().train()
    torch.nn.init.normal_(model.head.weight)
    executable = prepare(model, TrainingExecution())
    images = torch.rand(3, 1, 8, 8).double()
    model(images).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    executable.set_mode()
    executable(images).square().sum().backward()
    assert executable.chosen == ["short last block"]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-10)
