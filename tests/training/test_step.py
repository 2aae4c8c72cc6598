"""How a step is computed: with numbers or tensors, checkpointed or lean, and what is chosen automatically."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_runs import SETTINGS, RecordingCallback, fingerprints, train
from vitrail.base.errors import ConfigError
from vitrail.fast import variants
from vitrail.fast.variants import FusedNorm, ShortAttention, use_bf16_residual, use_fused_kernels
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device, seed_generators
from vitrail.training.captured_step import StepValues
from vitrail.training.parallel import ProcessGroup
from vitrail.training.plan import step_mode
from vitrail.training.plan.step_mode import capture_obstacle
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

CONFIG = ViTConfig(width=16, depth=3, heads=2, patch=4, size=8, channels=1, classes=3, drop_path=0.3)


def build_trainer(data, **settings):
    torch.manual_seed(0)
    how = TrainConfig(**{"batch": 16, "epochs": 2, "ema": 0.9, "lr": 1e-2, **settings})
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    return Trainer(RunPlan(open_dataset(data), Recipe(CONFIG, spec, how), choose_device("fp32")))


def batches_of(trainer):
    reader = Reader(trainer.data.train, trainer.preprocess, augment=trainer.settings.augment)
    return reader.batches(trainer.micro_batch_indices())


@pytest.mark.parametrize("sampling", ["shuffle", "balanced"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_processes_of_any_count_take_the_same_images(data, accumulate, sampling):
    """From the middle of an epoch: together they take the global batch of each step, every image once."""
    trainer = build_trainer(data, accumulate=accumulate, sampling=sampling)
    trainer.step = 3

    def taken(rank, count):
        """(steps, images of a process)"""
        trainer.ranks = ProcessGroup(rank, count)
        found = list(trainer.micro_batch_indices())
        assert [epoch for epoch, _ in found] == [0] * 2 * accumulate + [1] * 5 * accumulate
        return torch.stack([part for _, part in found]).reshape(7, -1)

    whole = taken(0, 1)
    for count in (2, 4):
        assert torch.equal(torch.cat([taken(rank, count) for rank in range(count)], 1), whole)
    assert sampling == "balanced" or whole[2:].flatten().sort()[0].tolist() == list(range(80))


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


@pytest.mark.parametrize("compiled", [False, True])
def test_fused_kernels_change_nothing_on_a_cpu(compiled):
    """Neither in training nor in evaluation, whatever parts of the model they would replace."""
    config = replace(CONFIG, width=64, heads=2, position="rotary", qk_norm=True)
    torch.manual_seed(0)
    model, images = ViT(config), torch.rand(2, 1, 8, 8)
    fused = copy.deepcopy(model)
    use_fused_kernels(fused, compiled=compiled)
    kinds = {type(module).__name__ for module in fused.modules()}
    assert {"ShortAttention", "FusedMLP"} <= kinds
    assert ("FusedNorm" in kinds) is not compiled
    for training in (True, False):
        outputs = []
        for one in (model, fused):
            torch.manual_seed(1)  # drop path
            outputs.append(one.train(training)(images))
        assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "special",
    [
        dict(position="relative"),
        dict(attention_dropout=0.1),
        dict(heads=1),
        dict(qk_norm=True, norm="rms"),
        dict(patch=1, size=17),
        dict(patch=1, size=12, qk_norm=True),
    ],
    ids=str,
)
def test_attention_that_the_kernels_cannot_compute_stays_as_it_is(special):
    model = ViT(replace(CONFIG, **{"width": 128, "heads": 2, **special}))
    use_fused_kernels(model, compiled=True)
    assert not any(isinstance(module, ShortAttention) for module in model.modules())


@pytest.mark.parametrize(("kilobytes", "patch", "fits"), [(99, 6, True), (99, 1, False), (163, 1, True)])
def test_a_gpu_with_less_memory_for_kernels_gets_those_that_fit(monkeypatch, kilobytes, patch, fits):
    """4 and 145 tokens; an RTX 4090 has 99 kB, an A100 163."""
    monkeypatch.setattr(variants, "_shared_memory", lambda device: kilobytes * 1024)
    model = ViT(replace(CONFIG, width=128, size=12, patch=patch))
    use_fused_kernels(model, compiled=True)
    assert any(isinstance(module, ShortAttention) for module in model.modules()) is fits


@pytest.mark.parametrize("block", ["post-norm", "res-post-norm"])
def test_a_norm_of_the_residual_stream_stays_in_fp32(block):
    model = ViT(replace(CONFIG, block=block))
    use_fused_kernels(model, compiled=False)
    assert not any(isinstance(module, FusedNorm) for module in model.modules())


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
    assert callback.plan["step"].startswith("not compiled, on a CPU")


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
        assert mode.seconds == pytest.approx(seconds * (0.23 if launch_bound else 0.8))


@pytest.mark.parametrize(
    ("seconds", "launch_bound", "compile", "expected", "words"),
    [
        (0.03, True, "auto", (False, False), "not compiled (would take about 16 s and save about 0 s)"),
        (10.0, True, "auto", (False, True), "not compiled with fused kernels (would take"),
        (10.0, True, False, (False, True), "not compiled with fused kernels, captured"),
        (100.0, True, "auto", (True, True), "compiled (takes about 16 s, saves about"),
        (0.03, True, True, (True, True), "compiled, captured"),
    ],
)
def test_fused_kernels_are_chosen_where_they_save_time(
    data, monkeypatch, seconds, launch_bound, compile, expected, words
):
    """Ten steps in bf16."""
    cost = step_mode._PassCost(seconds, launch_bound, 0.1)
    monkeypatch.setattr(step_mode, "_measure_pass", lambda trainer: cost)
    monkeypatch.setattr(step_mode, "find_spec", lambda name: name)  # Triton
    trainer = build_trainer(data, compile=compile)
    trainer.compute = replace(trainer.compute, device=torch.device("cuda"), dtype=torch.bfloat16)
    mode = step_mode.choose_step_mode(trainer)
    assert (mode.compile, mode.kernels) == expected
    assert words in mode.reason


def test_the_generator_is_seeded_as_by_torch():
    torch.manual_seed(2**40 + 7)
    before, queued = torch.get_rng_state(), len(torch.cuda._queued_calls)
    seed_generators(5, torch.device("cpu"))
    seed_generators(2**40 + 7, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(torch.cuda._queued_calls) == queued  # torch.manual_seed adds one each time


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
