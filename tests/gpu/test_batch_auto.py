"""batch="auto" on a GPU: the steps that are tried need what those of the run need. Skipped without one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.tiny_runs import RecordingCallback, train
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device
from vitrail.training import parallel
from vitrail.training.objective import Teacher
from vitrail.training.plan import batch_size
from vitrail.training.plan.batch_size import build_trial, step_peak
from vitrail.training.plan.step_mode import StepMode
from vitrail.training.resolve import resolve_distillation, resolve_recipe
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the memory of a GPU is measured")

SMALL = dict(width=192, depth=6, heads=3, patch=4)
LABELS = [str(number) for number in range(10)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """20,000 color images of 32 x 32: on a GPU, `auto` takes cifar10-small, which trains by Muon."""
    rng, file = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "data.npz"
    x = rng.integers(0, 256, (20_500, 32, 32, 3), dtype=np.uint8)
    y = np.arange(20_500) % 10
    np.savez(file, x_train=x[:20_000], y_train=y[:20_000], x_val=x[20_000:], y_val=y[20_000:])
    return file


@pytest.fixture(scope="module")
def teacher():
    spec = Preprocess(size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    model = vt.ViT(ViTConfig(**SMALL, size=32, classes=10))
    return vt.Bundle(model=model, preprocess=spec, labels=LABELS)


CASES = {
    "muon": {},  # the default recipe
    "lora": {"recipe": "small", "tune": "lora", "model": SMALL},
    "head": {"recipe": "small", "tune": "head", "model": SMALL},
    "checkpointed": {"recipe": "small", "checkpoint_blocks": 6, "model": SMALL},
    "taught": {"recipe": "small", "model": SMALL},
}


@pytest.mark.parametrize("name", CASES)
def test_the_chosen_batch_trains_within_the_memory(name, data, teacher, tmp_path, monkeypatch):
    """The memory of a GPU is pretended to be small, so that it is the limit."""
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(parallel, "MARGIN", 1.5e9 / total)
    callback, settings = RecordingCallback(), {"epochs": 1, "compile": False, **CASES[name]}
    given = {"teacher": teacher} if name == "taught" else {}
    train(data, out=tmp_path / "run", batch="auto", callback=callback, **settings, **given)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    batch = config["train"]["batch"]
    assert config["train"]["optimizer"] == ("muon" if name == "muon" else "adamw")
    assert any(note.startswith(f"Batch {batch}: ") for note in callback.notes)
    assert batch >= 64


@pytest.mark.parametrize("name", CASES)
def test_a_tried_step_needs_the_memory_of_a_step_of_the_run(name, data, teacher):
    """The trial takes random images; beside them, a run has the array of all images on the GPU."""
    opened, compute = open_dataset(data), choose_device("auto")
    changes = {"epochs": 1, "batch": 256, **CASES[name]}
    recipe, _ = resolve_recipe(changes.pop("recipe", "auto"), opened, None, changes)
    taught = Teacher(teacher, opened, 3, compute) if name == "taught" else None
    settings = resolve_distillation(recipe.train, changes, taught is not None)
    recipe = replace(recipe, train=settings)

    def measure(step):
        return batch_size._gpu_peak(compute.device, step)

    batch_size._free_memory()  # of the runs before
    plan = RunPlan(opened, recipe, compute, teacher=taught)
    trial = build_trial(plan)
    tried = step_peak(trial, 256, measure)
    del trial
    batch_size._free_memory()
    run = Trainer(plan)
    run.use_mode(StepMode(compile=False, cuda_graph=False))
    reader = Reader(opened.train, run.reading, augment=recipe.train.augment, device=compute.device)
    batches = reader.batches(run.micro_batch_indices())
    stored = opened.train.images.nbytes
    assert measure(lambda: run.take_step(batches)) == pytest.approx(tried + stored, rel=0.1)
