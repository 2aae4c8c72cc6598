"""batch="auto": the largest batch that fits in memory, recorded for resume; and what to do when memory runs out."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

import vitrail as vt
from tests.support.tiny_runs import RecordingCallback, fingerprints, train, write_arrays, write_folder
from vitrail.base.errors import ConfigError
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device
from vitrail.model.model_memory import step_bytes
from vitrail.model.presets import preset
from vitrail.training import parallel
from vitrail.training.objective import Teacher
from vitrail.training.plan import batch_size
from vitrail.training.plan.batch_size import (
    build_trial,
    choose_batch,
    fitting_batch,
    largest_power,
    step_peak,
)
from vitrail.training.resolve import resolve_distillation, resolve_recipe
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

CPU = choose_device("fp32")
TINY = dict(width=16, depth=2, heads=2, patch=4, size=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_arrays(tmp_path_factory.mktemp("data") / "data.npz", count=400)


@pytest.mark.parametrize(
    ("limit", "most", "want"), [(100, 1000, 64), (64, 1000, 64), (1, 1000, 2), (100, 40, 32)]
)
def test_the_largest_power_of_two_that_fits(limit, most, want):
    tried = []
    assert largest_power(lambda n: tried.append(n) or n <= limit, most) == want
    assert tried == sorted(tried)
    assert max(tried, default=0) <= 2 * want


def test_the_estimate_is_that_of_the_plan():
    """B/16 at batch 256 in bf16 took 15.5 to 17.5 GiB on an H200 (docs/benchmarks.md), without EMA."""
    assert 15.5 < (step_bytes(preset("B/16"), 256, 2) - 4 * 86e6) / 2**30 < 22


def test_memory_limits_the_batch_on_a_cpu(data, monkeypatch):
    recipe, _ = resolve_recipe("small", open_dataset(data), None, {})
    half = 2 * step_bytes(recipe.model, 16)  # of the memory may be used
    for limit, want in ((half, 16), (half - 1, 8), (10**15, 32), (None, 32)):
        monkeypatch.setattr(parallel, "memory_limit", lambda limit=limit: limit)
        batch, note = choose_batch(plan_of(recipe, open_dataset(data)))
        assert batch == want
        assert ("fits in memory" in note) == (want < 32)  # 400 images: ten steps of 32 at least
    parts = replace(recipe, train=replace(recipe.train, accumulate=2))
    assert choose_batch(plan_of(parts, open_dataset(data)))[0] == 32


# ---- steps that are tried, as on a GPU -------------------------------------------------------


def saved_bytes(step):
    """What a step keeps for its backward pass, which is most of the memory of a GPU."""
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage  # which stays, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(storage.nbytes() for storage in found.values())


def resolved(data, teacher, **settings):
    changes = {"model": TINY, "epochs": 2, "ema": 0.9, **settings}
    recipe, _ = resolve_recipe("small", data, None, changes)
    return replace(recipe, train=resolve_distillation(recipe.train, changes, teacher is not None))


def plan_of(recipe, data, teacher=None):
    return RunPlan(data, recipe, CPU, teacher=teacher)


def build_teacher(data):
    spec = Preprocess(size=12, mean=(0.5,), std=(0.5,))
    config = ViTConfig(**{**TINY, "size": 12, "channels": 1, "classes": 3})
    return Teacher(vt.Bundle(model=vt.ViT(config), preprocess=spec, labels=["0", "1", "2"]), data, 1, CPU)


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("tune", ["full", "llrd", "lora", "head", "bias"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_a_tried_step_needs_what_a_step_of_the_run_needs(optimizer, tune, taught, data):
    data = open_dataset(data)
    teacher = build_teacher(data) if taught else None
    mixing = {"mixup": 0.3, "cutmix": 1.0}
    recipe = resolved(data, teacher, optimizer=optimizer, tune=tune, batch=16, mixing=mixing)
    tried = step_peak(build_trial(plan_of(recipe, data, teacher)), 16, saved_bytes)
    run = Trainer(plan_of(recipe, data, teacher))
    reader = Reader(data.train, run.reading, augment=recipe.train.augment)
    batches = reader.batches(run.micro_batch_indices())
    assert tried == pytest.approx(saved_bytes(lambda: run.take_step(batches)), rel=0.01)


def test_lora_needs_the_activations_of_all_blocks(data):
    data = open_dataset(data)
    needed = {
        tune: step_peak(build_trial(plan_of(resolved(data, None, tune=tune), data)), 64, saved_bytes)
        for tune in ("full", "lora", "head")
    }
    assert needed["full"] > needed["lora"] > 10 * needed["head"]


@pytest.mark.parametrize("settings", [{"tune": "lora"}, {"optimizer": "muon"}, {"checkpoint_blocks": 1}])
def test_the_measured_memory_limits_the_batch(settings, data, monkeypatch):
    data = open_dataset(data)
    recipe = resolved(data, None, **settings)
    needed = {n: step_peak(build_trial(plan_of(recipe, data)), n, saved_bytes) for n in (8, 16)}
    assert 1.5 * needed[8] < needed[16]
    for limit, want in ((needed[8], 8), (needed[16] - 1, 8), (needed[16], 16)):
        monkeypatch.setattr(batch_size, "usable_memory", lambda *_, m=limit: m + data.train.images.nbytes)
        batch, note = choose_batch(plan_of(recipe, data), saved_bytes)
        assert batch == want
        assert "the largest that fits in memory" in note


def test_all_micro_batches_of_a_step_are_tried(data, monkeypatch):
    data, sizes, loss = open_dataset(data), [], Trainer._loss
    monkeypatch.setattr(Trainer, "_loss", lambda t, part: sizes.append(len(part.indices)) or loss(t, part))
    recipe = resolved(data, None, accumulate=2)
    batch, _ = choose_batch(plan_of(recipe, data), lambda step: step() or 0)
    assert batch == 32  # ten steps of an epoch of 400
    assert sizes == [4, 4, 8, 8, 16, 16]


def test_a_step_that_runs_out_of_memory_does_not_fit_and_other_errors_are_raised(data):
    data = open_dataset(data)
    recipe = resolved(data, None)

    def fails(message, step):
        step()
        raise RuntimeError(message)

    out_of_memory = partial(fails, "CUDA out of memory. Tried to allocate 2.00 GiB")
    assert choose_batch(plan_of(recipe, data), out_of_memory)[0] == 2
    with pytest.raises(RuntimeError, match="a bug"):
        choose_batch(plan_of(recipe, data), partial(fails, "a bug"))


def test_images_of_different_shapes_are_tried_at_their_largest(tmp_path):
    data = open_dataset(write_folder(tmp_path / "images"))
    model = {**TINY, "size": 16, "embedding": "linear", "position": "learned"}
    recipe = resolved(data, None, native=True, model=model)
    trial = build_trial(plan_of(recipe, data))
    assert step_peak(trial, 8, saved_bytes) > 1.5 * step_peak(trial, 4, saved_bytes)


def test_the_chosen_batch_is_recorded_and_resumed(data, tmp_path, monkeypatch):
    settings = dict(recipe="small", epochs=1, model=TINY, batch="auto")
    callback = RecordingCallback()
    train(data, out=tmp_path / "run", callback=callback, **settings)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["batch"] == 32
    assert config["request"]["changes"]["batch"] == "auto"
    assert any(note.startswith("Batch 32: an epoch then has 12 steps") for note in callback.notes)
    before = fingerprints(tmp_path / "run")
    monkeypatch.setattr(parallel, "memory_limit", lambda: 1)  # another machine: the run keeps its batch
    train(data, out=tmp_path / "run", resume=True, **{**settings, "epochs": 2})
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["train"]["batch"], config["train"]["epochs"]) == (32, 2)
    assert fingerprints(tmp_path / "run") != before


def test_the_learning_rate_follows_the_batch_where_the_recipe_has_a_rule(data):
    """The rule of the recipe, as for a batch that is given."""
    data = open_dataset(data)
    given, _ = resolve_recipe("deit3", data, None, {"batch": 32})
    other, _ = resolve_recipe("deit3", data, None, {"batch": 64})
    auto, _ = resolve_recipe("deit3", data, None, {"batch": "auto"})
    assert other.train.lr == pytest.approx(2 * given.train.lr)
    assert auto.train.batch not in ("auto", None)


def test_out_of_memory_names_a_batch_that_should_fit(data, tmp_path, monkeypatch):
    config = ViTConfig(**TINY, channels=1, classes=3)
    monkeypatch.setattr(parallel, "memory_limit", lambda: 2 * step_bytes(config, 5))
    assert fitting_batch(config, CPU, 16) == 4
    assert fitting_batch(config, CPU, 4) == 2  # what has failed cannot fit, whatever the estimate says

    def fails(self, parts):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("vitrail.training.trainer.Trainer._compute_step", fails)
    with pytest.raises(ConfigError, match=r"A batch of 4 should fit: use batch=4, or accumulate=4, "):
        train(data, out=tmp_path / "run", recipe="small", epochs=1, batch=16, model=TINY)
