"""A step captured as a CUDA graph gives the numbers of the plain step. Needs a GPU; skipped without one."""

import threading

import pytest
import torch

from tests.support.tiny_runs import write_arrays
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device
from vitrail.training.plan.step_mode import StepMode
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")

EVERYTHING = dict(
    epochs=6,
    batch=16,
    ema=0.9,
    smoothing=0.1,
    augment=dict(crop=0.5, flip=0.5, rotate=10, brightness=0.2, erase=0.3, policy="randaugment"),
    mixing=dict(mixup=0.3, cutmix=1.0, probability=0.7),
    mixing_off=0.5,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return open_dataset(write_arrays(tmp_path_factory.mktemp("data") / "data.npz"))


def trained(data, steps=None, dropout=0.1, checkpoint=None, kernels=False, **settings):
    torch.manual_seed(0)
    config = ViTConfig(
        width=64, depth=2, heads=2, patch=4, size=8, channels=1, classes=3, dropout=dropout, drop_path=dropout
    )
    how = TrainConfig(**{**EVERYTHING, "compile": False, "precision": "fp32", **settings})
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    trainer = Trainer(RunPlan(data, Recipe(config, spec, how), choose_device(how.precision)))
    trainer.notes = []
    trainer.on_message = trainer.notes.append
    if kernels:
        trainer.use_mode(StepMode(compile=False, cuda_graph=how.cuda_graph, kernels=True))
    if checkpoint is not None:
        trainer.restore(checkpoint)
    reader = Reader(data.train, spec, augment=how.augment, device=trainer.compute.device)
    batches = reader.batches(trainer.micro_batch_indices())
    while trainer.step < (steps or trainer.steps):
        trainer.take_step(batches)
    return trainer


def check_equal(one, other, rtol, atol):
    assert one.metrics.totals() == pytest.approx(other.metrics.totals(), rel=rtol)
    for kind in ("model", "ema"):
        for a, b in zip(getattr(one, kind).parameters(), getattr(other, kind).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(accumulate=2),
        dict(optimizer="sgd", momentum=0.9),
        dict(optimizer="muon"),
        dict(precision="bf16"),
        dict(precision="bf16", kernels=True),
        dict(tune="head"),
    ],
    ids=str,
)
def test_a_captured_step_gives_the_numbers_of_the_plain_step(data, settings):
    """With dropout, and mixing that ends half way, which takes a second graph."""
    plain = trained(data, cuda_graph=False, **settings)
    captured = trained(data, cuda_graph=True, **settings)
    assert captured.mode.cuda_graph
    assert [step.graph is not None for step in captured.captured.values()] == [True]
    check_equal(plain, captured, 1e-4, 1e-5)


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_a_compiled_and_captured_step_too(data):
    how = dict(
        dropout=0.0, optimizer="sgd", momentum=0.9
    )  # AdamW would enlarge the rounding of tiny gradients
    plain, captured = (
        trained(data, cuda_graph=False, **how),
        trained(data, cuda_graph=True, compile=True, **how),
    )
    check_equal(plain, captured, 1e-3, 1e-4)


def test_a_captured_run_resumes(data):
    whole = trained(data, cuda_graph=True)
    part = trained(data, steps=8, cuda_graph=True)
    resumed = trained(data, cuda_graph=True, checkpoint=part.state())
    check_equal(whole, resumed, 1e-4, 1e-5)


def test_a_capture_while_the_loader_pins_memory(data):
    """DataLoader pins batches in a thread of its own, at any time."""
    done, failures = threading.Event(), []

    def pin():
        try:
            for size in range(1 << 12, 1 << 30, 1 << 12):  # each size is allocated anew
                torch.empty(size).pin_memory()
                if done.is_set():
                    return
        except RuntimeError as error:
            failures.append(error)

    pinning = threading.Thread(target=pin)
    pinning.start()
    captured = trained(data, cuda_graph=True)
    done.set()
    pinning.join()
    assert not failures
    assert captured.mode.cuda_graph


def test_a_step_that_cannot_be_captured_is_computed_plainly(data, monkeypatch):
    def reads_back(self, skipped):
        assert skipped.item() >= 0

    plain = trained(data, cuda_graph=False)
    monkeypatch.setattr("vitrail.training.epoch.EpochMetrics.add_step", reads_back)
    other = trained(data, cuda_graph=True)
    assert not other.mode.cuda_graph
    assert "not captured as a CUDA graph, because" in other.notes[0]
    check_equal(plain, other, 1e-4, 1e-5)
