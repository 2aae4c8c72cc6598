"""How a step is computed: with numbers or tensors, checkpointed or lean, and what is chosen automatically."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_runs import SETTINGS, RecordingCallback, fingerprints, one_thread, train, write_arrays
from vitrail.config import ViTConfig
from vitrail.data.loader import Reader
from vitrail.data.sources import open_dataset
from vitrail.errors import ConfigError
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.recipes.settings import TrainConfig
from vitrail.training import step_mode
from vitrail.training.cuda_graph import StepValues
from vitrail.training.lean import FastGELU, use_bf16_residual, use_fast_gelu
from vitrail.training.parallel import ProcessGroup
from vitrail.training.precision import choose_device
from vitrail.training.step_mode import capture_obstacle
from vitrail.training.trainer import Trainer

__all__ = ["one_thread"]

CONFIG = ViTConfig(width=16, depth=3, heads=2, patch=4, size=8, channels=1, classes=3, drop_path=0.3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_arrays(tmp_path_factory.mktemp("data") / "data.npz")


def build_trainer(data, **settings):
    torch.manual_seed(0)
    how = TrainConfig(**{"batch": 16, "epochs": 2, "ema": 0.9, "lr": 1e-2, **settings})
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    return Trainer(ViT(CONFIG), spec, open_dataset(data), how, choose_device("fp32"))


def batches_of(trainer):
    reader = Reader(trainer.data.train, trainer.preprocess, augment=trainer.settings.augment)
    return reader.batches(trainer.micro_batch_indices())


def test_a_step_is_the_same_with_tensors_for_its_numbers(data):
    """A captured step reads the learning rate, the epoch and the weight of the EMA from tensors."""
    settings = dict(optimizer="sgd", momentum=0.9, augment=dict(rotate=20, flip=0.5), mixing=dict(mixup=0.5))
    plain, other = build_trainer(data, **settings), build_trainer(data, **settings)
    compute, seen = other._compute_step, []

    def with_tensors(parts):
        values = other.values
        seen.append(values)
        other.values = StepValues(
            torch.tensor(values.lr), torch.tensor(values.epoch), torch.tensor(values.ema_weight)
        )
        return compute(parts)

    other._compute_step = with_tensors
    for trainer in (plain, other):
        batches = batches_of(trainer)
        while trainer.step < trainer.steps:
            trainer.take_step(batches)
    assert [value.epoch for value in seen] == [0] * 5 + [1] * 5
    assert plain.metrics.totals() == pytest.approx(other.metrics.totals(), rel=1e-6)
    for kind in ("model", "ema"):
        for a, b in zip(getattr(plain, kind).parameters(), getattr(other, kind).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---- leaner steps ------------------------------------------------------------------------------


def test_fast_gelu_and_its_gradient_are_exact_to_5e_7():
    x = torch.linspace(-12, 12, 200_001, requires_grad=True)
    fast = FastGELU().train()(x)
    (slope,) = torch.autograd.grad(fast.sum(), x)
    wide = x.detach().double().requires_grad_()
    exact = F.gelu(wide)
    (exact_slope,) = torch.autograd.grad(exact.sum(), wide)
    assert (fast - exact).abs().max() < 5e-7
    assert (slope - exact_slope).abs().max() < 5e-7


def test_fast_gelu_is_for_training_only():
    model = ViT(CONFIG)
    use_fast_gelu(model)
    activation, x = model.blocks[0].mlp.activation, torch.randn(1000)
    assert torch.equal(activation.eval()(x), F.gelu(x))
    assert not torch.equal(activation.train()(x), F.gelu(x))


def test_the_residual_stream_is_bf16_in_training_only():
    model = ViT(CONFIG)
    use_bf16_residual(model)
    block, z = model.blocks[0], torch.randn(2, 5, 16)
    for training, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model.train(training)
        assert block.norm1(z).dtype == block.norm2(z).dtype == dtype
        (hook,) = block._forward_pre_hooks.values()  # not the block: bf16 products can kill a CPU process
        assert (hook(block, (z,)) or (z,))[0].dtype == dtype


def test_only_the_first_blocks_are_checkpointed():
    model, saved = ViT(CONFIG).train(), []
    for count in range(4):
        model.checkpointed_blocks = count
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            model(torch.rand(4, 1, 8, 8))
        saved.append(sum(x.numel() for x in kept))
    assert saved == sorted(saved, reverse=True)
    assert saved[3] < 0.4 * saved[0]


def test_a_run_with_checkpointed_blocks_ends_with_the_same_bits(data, tmp_path):
    for count in (0, 2):
        train(data, out=tmp_path / str(count), **{**SETTINGS, "epochs": 2, "checkpoint_blocks": count})
    assert fingerprints(tmp_path / "0") == fingerprints(tmp_path / "2")


# ---- automatic choices -------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_compiled_and_the_plan_says_so(data, tmp_path):
    class Plan(RecordingCallback):
        def on_plan(self, plan):
            self.plan = plan

    callback = Plan()
    train(data, out=tmp_path / "run", callback=callback, **{**SETTINGS, "epochs": 1})
    assert callback.plan["step"] == "not compiled, on a CPU"


@pytest.mark.parametrize(
    ("seconds", "launch_bound", "memory", "settings", "compiles", "captures", "words"),
    [
        (0.03, True, 0.1, {}, False, True, "not compiled (would take"),
        (30.0, False, 0.1, {}, True, True, "saves about 60 s), captured as one CUDA graph"),
        (30.0, False, 0.6, {}, True, False, "not captured as a CUDA graph: a step needs 60% of the device"),
        (30.0, False, 0.1, dict(compile=False, cuda_graph=False), False, False, "not compiled"),
        (0.03, True, 0.6, dict(compile=True, cuda_graph=True), True, True, "compiled, captured as one CUDA"),
        (30.0, False, 0.1, dict(checkpoint_blocks=1), True, False, "random generator"),
    ],
)
def test_choices_on_a_gpu(
    data, monkeypatch, seconds, launch_bound, memory, settings, compiles, captures, words
):
    """Ten steps, with what a pass costs given."""
    cost = step_mode._PassCost(seconds, launch_bound, memory)
    monkeypatch.setattr(step_mode, "_measure_pass", lambda trainer: cost)
    monkeypatch.setattr(step_mode, "find_spec", lambda name: name)  # Triton
    trainer = build_trainer(data, **settings)
    trainer.compute = replace(trainer.compute, device=torch.device("cuda"))
    mode = step_mode.choose_step_mode(trainer)
    assert (mode.compile, mode.cuda_graph) == (compiles, captures)
    assert words in mode.reason
    if not settings:
        assert mode.seconds == pytest.approx(seconds * (0.2 if launch_bound else 0.8))


def test_what_a_cuda_graph_cannot_hold_is_named(data):
    assert capture_obstacle(build_trainer(data)) == ""
    assert "random generator" in capture_obstacle(build_trainer(data, checkpoint_blocks=1))
    trainer = build_trainer(data)
    trainer.ranks = ProcessGroup(0, 2)
    assert "processes" in capture_obstacle(trainer)


@pytest.mark.parametrize("name", ["compile", "cuda_graph"])
def test_auto_true_and_false_are_the_values(name):
    for value in ("auto", True, False):
        assert getattr(TrainConfig(**{name: value}), name) == value
    for value in ("yes", 1, None):
        with pytest.raises(ConfigError, match=f'{name} must be "auto", True or False'):
            TrainConfig(**{name: value})
