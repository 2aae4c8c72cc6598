"""batch="auto": the largest batch that fits in memory, recorded for resume; and what to do when memory runs out."""

import json
from dataclasses import replace

import pytest

from tests.support.tiny_runs import RecordingCallback, fingerprints, train, write_arrays
from vitrail.config import ViTConfig
from vitrail.data.sources import open_dataset
from vitrail.errors import ConfigError
from vitrail.fast.device import choose_device
from vitrail.memory import step_bytes
from vitrail.presets import preset
from vitrail.training import batch_size
from vitrail.training.batch_size import choose_batch, fitting_batch, largest_power
from vitrail.training.parallel import ProcessGroup
from vitrail.training.resolve import resolve_recipe

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
        monkeypatch.setattr(batch_size, "memory_limit", lambda limit=limit: limit)
        batch, note = choose_batch(recipe, open_dataset(data), CPU, ProcessGroup())
        assert batch == want
        assert ("fits in memory" in note) == (want < 32)  # 400 images: ten steps of 32 at least
    parts = replace(recipe, train=replace(recipe.train, accumulate=2))
    assert choose_batch(parts, open_dataset(data), CPU, ProcessGroup())[0] == 32


def test_the_chosen_batch_is_recorded_and_resumed(data, tmp_path, monkeypatch):
    settings = dict(recipe="small", epochs=1, model=TINY, batch="auto")
    callback = RecordingCallback()
    train(data, out=tmp_path / "run", callback=callback, **settings)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["batch"] == 32
    assert config["request"]["changes"]["batch"] == "auto"
    assert any(note.startswith("Batch 32: an epoch then has 12 steps") for note in callback.notes)
    before = fingerprints(tmp_path / "run")
    monkeypatch.setattr(batch_size, "memory_limit", lambda: 1)  # another machine: the run keeps its batch
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
    monkeypatch.setattr(batch_size, "memory_limit", lambda: 2 * step_bytes(config, 5))
    assert fitting_batch(config, CPU, 16) == 4
    assert fitting_batch(config, CPU, 4) == 2  # what has failed cannot fit, whatever the estimate says

    def fails(self, parts):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("vitrail.training.trainer.Trainer._compute_step", fails)
    with pytest.raises(ConfigError, match=r"A batch of 4 should fit: use batch=4, or accumulate=4, "):
        train(data, out=tmp_path / "run", recipe="small", epochs=1, batch=16, model=TINY)
