"""fp16 with loss scaling, and devices other than a GPU. The CPU computes fp16 here; training refuses that."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from tests.support.tiny_runs import (
    SETTINGS,
    fingerprints,
    rows,
    stopped_and_resumed,
    train,
)
from vitrail.base.errors import ConfigError
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.device import ComputeDevice, choose_device
from vitrail.training.epoch import Diverged, EpochMetrics
from vitrail.training.parallel import ProcessGroup
from vitrail.training.plan.step_mode import capture_obstacle
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

CONFIG = ViTConfig(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=3, drop_path=0.3)
SCALED = ComputeDevice(torch.device("cpu"), torch.float16, "scaled")  # no autocast: fp32 with loss scaling
PROBE = (
    "import torch\n"
    "with torch.autocast('cpu', torch.float16):\n"
    "    y = torch.nn.functional.linear(torch.rand(4, 8), torch.rand(8, 8, requires_grad=True))\n"
    "    torch.nn.functional.scaled_dot_product_attention(y, y, y).float().sum().backward()\n"
)


class HalfOnCpu(ComputeDevice):
    """Computes in fp16 on the CPU."""

    @contextmanager
    def autocast(self):
        with torch.autocast("cpu", torch.float16):
            yield


@pytest.fixture
def half_on_cpu(monkeypatch):
    """Runs compute in fp16 on the CPU, where that does not kill a process."""
    if subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode:
        pytest.skip("this processor does not compute in fp16")
    device = HalfOnCpu(torch.device("cpu"), torch.float16, "fp16 on the CPU")
    monkeypatch.setattr("vitrail.training.run_plan.choose_device", lambda *args: device)


def build_trainer(data, compute, **settings):
    torch.manual_seed(0)
    how = TrainConfig(**{"batch": 16, "epochs": 2, "ema": 0.9, "lr": 1e-2, "accumulate": 2, **settings})
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    return Trainer(RunPlan(open_dataset(data), Recipe(CONFIG, spec, how), compute))


def take_steps(trainer, count):
    reader = Reader(trainer.data.train, trainer.preprocess, augment=trainer.settings.augment)
    batches = reader.batches(trainer.micro_batch_indices())
    for _ in range(count):
        trainer.take_step(batches)
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_scaling_by_a_power_of_two_changes_no_bit(data):
    plain, scaled = build_trainer(data, choose_device("fp32", device="cpu")), build_trainer(data, SCALED)
    assert (plain.scaler.is_enabled(), scaled.scaler.is_enabled()) == (False, True)
    for a, b in zip(take_steps(plain, 8), take_steps(scaled, 8), strict=True):
        assert torch.equal(a, b)
    assert capture_obstacle(scaled)


def test_a_step_that_overflows_is_skipped_and_halves_the_scale(data):
    trainer = build_trainer(data, SCALED)
    before = take_steps(trainer, 1)
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**127, "_growth_tracker": 0})
    after = take_steps(trainer, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert trainer.scaler.get_scale() == 2.0**126
    assert trainer.metrics.totals()[3] == 1


def test_only_twenty_overflows_in_a_row_are_a_divergence():
    """At first the scale is too large, and each overflow halves it."""
    metrics = EpochMetrics(SCALED, ProcessGroup())
    for _ in range(19):
        metrics.add_step(torch.tensor(1.0))
    metrics.check_divergence([])
    metrics.add_step(torch.tensor(1.0))
    with pytest.raises(Diverged, match="infinite 20 times in a row"):
        metrics.check_divergence([])


def test_the_scale_is_restored(data):
    trainer, resumed = build_trainer(data, SCALED), build_trainer(data, SCALED)
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**127, "_growth_tracker": 0})
    take_steps(trainer, 3)
    state = trainer.state()
    resumed.restore(state)
    assert (
        resumed.scaler.state_dict()
        == trainer.scaler.state_dict()
        != build_trainer(data, SCALED).scaler.state_dict()
    )
    plain = build_trainer(data, choose_device("fp32", device="cpu"))
    plain.restore(state)  # another precision: there is nothing to scale
    assert plain.scaler.state_dict() == {}


def test_a_run_in_fp16_learns_and_resumes_exactly(data, tmp_path, half_on_cpu):
    settings = {**SETTINGS, "precision": "fp16"}
    train(data, out=tmp_path / "whole", **settings)
    assert rows(tmp_path / "whole")[-1]["skipped_steps"] == 0
    stopped_and_resumed(data, tmp_path / "run", 7, **settings)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "whole")
    fp32 = tmp_path / "fp32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.training.run_plan.choose_device", choose_device)
        train(data, out=fp32, **{**SETTINGS, "device": "cpu"})
    (a, b) = (rows(out)[-1]["loss"] for out in (tmp_path / "whole", fp32))
    assert a != b
    assert a == pytest.approx(b, rel=0.02)


# ---- devices --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "device", "words"),
    [
        ("fp16", "cpu", "precision='fp16' needs a GPU"),
        ("bf16", "cpu", "kills the process"),
        ("fp16", "mps", "on MPS only fp32"),
    ],
)
def test_half_precision_needs_a_gpu(precision, device, words):
    with pytest.raises(ConfigError, match=words):
        choose_device(precision, device=device)


def test_mps_is_used_where_it_is_and_refused_where_not(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='mps' needs a Mac"):
        choose_device("auto", device="mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = choose_device("auto", device="mps")
    assert (found.device.type, found.dtype, found.sum_dtype) == ("mps", torch.float32, torch.float32)
    assert TrainConfig(device="mps").device == "mps"


def test_sums_without_float64(data, monkeypatch):
    monkeypatch.setattr(ComputeDevice, "sum_dtype", torch.float32)
    metrics = EpochMetrics(choose_device("fp32", device="cpu"), ProcessGroup())
    metrics.add_images(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), torch.ones(2))
    assert metrics.sums.dtype == torch.float32
    assert metrics.totals() == (1.5, 0.5, 2, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16 autocast on CUDA needs a GPU")
def test_fp16_on_a_gpu(data, tmp_path):
    settings = {**SETTINGS, "precision": "fp16"}
    train(data, out=tmp_path / "whole", **settings)
    stopped_and_resumed(data, tmp_path / "run", 7, **settings)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "whole")
