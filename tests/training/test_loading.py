"""The plan's time with image files: loading is measured, and named where it is slower than the model."""

import time
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_runs import one_thread, write_arrays, write_folder
from vitrail.images import loader
from vitrail.images.formats.sources import open_dataset
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import WorkerPlan, Workers
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device
from vitrail.training.plan import rehearsal
from vitrail.training.plan.rehearsal import training_plan
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "photos")


def build(data, **settings):
    data = open_dataset(data)
    config = ViTConfig(width=16, depth=1, heads=2, patch=4, size=8, classes=len(data.classes))
    config = replace(config, channels=data.channels or 3)
    spec = Preprocess(size=8, mean=(0.5,) * config.channels, std=(0.5,) * config.channels)
    how = TrainConfig(**{"batch": 16, "epochs": 200, "workers": 0, **settings})
    return Trainer(RunPlan(data, Recipe(config, spec, how), choose_device("fp32")))


def throttle(monkeypatch, seconds):
    read = loader.read_or_reason

    def slowly(*args):
        time.sleep(seconds)
        return read(*args)

    monkeypatch.setattr(loader, "read_or_reason", slowly)


@pytest.mark.parametrize(("workers", "at_once"), [(0, 1), (2, 2)])
def test_a_slow_loader_is_measured_and_named(folder, monkeypatch, workers, at_once):
    throttle(monkeypatch, 0.02)
    monkeypatch.setattr(rehearsal, "_READ_SECONDS", 0.6)
    trainer = build(folder, workers=workers)
    try:
        plan = training_plan(trainer)
        rate = rehearsal.measure_loading(trainer)
    finally:
        trainer.workers.close()
    assert 5 * at_once < rate < 50 * at_once  # 50 at most; fewer on a busy machine
    assert "slower than the model" in plan["loading"]
    assert "vitrail pack" in plan["loading"]
    assert "by the rehearsal" in plan["time"]
    seconds = trainer.steps * trainer.batch / (50 * at_once)
    minutes = float(plan["time"].split()[1])
    assert minutes >= seconds / 60 - 1


def test_fast_loading_is_not_named(folder, monkeypatch):
    monkeypatch.setattr(rehearsal, "_READ_SECONDS", 0.1)
    monkeypatch.setattr("vitrail.training.plan.rehearsal.measure_loading", lambda trainer: 1e9)
    plan = training_plan(build(folder))
    assert "loading" not in plan


def test_arrays_and_short_runs_are_not_measured(folder, tmp_path):
    assert rehearsal.measure_loading(build(write_arrays(tmp_path / "data.npz"))) is None
    assert rehearsal.measure_loading(build(folder, epochs=3)) is None


def test_a_file_that_cannot_be_read_does_not_end_the_measurement(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "photos")
    next(path for path in folder.rglob("*") if path.suffix in (".png", ".jpg")).write_bytes(b"no image")
    monkeypatch.setattr(rehearsal, "_READ_SECONDS", 0.1)
    trainer = build(folder)
    assert rehearsal.measure_loading(trainer) > 0
    assert not trainer.corrupt.reasons


@pytest.mark.parametrize(
    ("plan", "device", "expected"),
    [
        (WorkerPlan("none", 0, ""), "cuda", 5.0),  # one after the other
        (WorkerPlan("processes", 4, ""), "cuda", 3.0),  # at the same time
        (WorkerPlan("processes", 4, ""), "cpu", 5.0),  # they share the cores
    ],
)
def test_the_time_of_a_step(folder, plan, device, expected):
    trainer = build(folder)
    trainer.workers = Workers(plan)
    trainer.compute = replace(trainer.compute, device=torch.device(device))
    assert rehearsal.step_seconds(2.0, 3.0, trainer) == expected
    trainer.workers.close()
