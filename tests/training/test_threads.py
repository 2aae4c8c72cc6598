"""The number of CPU threads: given, measured, recorded and used again; and a machine that is busy."""

import json
import multiprocessing
import os
import time
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    fingerprints,
    train,
)
from vitrail.base.errors import ConfigError
from vitrail.images.formats.sources import open_dataset
from vitrail.model.device import choose_device
from vitrail.training.plan import threads
from vitrail.training.plan.threads import CpuWait, choose_threads
from vitrail.training.recipes.settings import TrainConfig
from vitrail.training.resolve import resolve_recipe
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Interrupted, Trainer


@pytest.fixture(autouse=True)
def two_threads():
    """torch's own number on a machine with two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trainer(data):
    opened = open_dataset(data)
    changes = {name: SETTINGS[name] for name in ("batch", "model")}
    recipe, _ = resolve_recipe("small", opened, None, changes)
    return Trainer(RunPlan(opened, recipe, choose_device("fp32")))


@pytest.fixture
def timed(monkeypatch):
    """A long run whose passes take these seconds, by the number of threads."""

    def set_times(seconds, run=1000.0):
        monkeypatch.setattr(threads, "estimate_seconds", lambda trainer: run)
        monkeypatch.setattr(threads, "_time_pass", lambda trainer: seconds[torch.get_num_threads()])

    return set_times


def test_fewer_threads_where_they_are_clearly_faster(trainer, timed):
    timed({1: 1.0, 2: 2.0})
    assert choose_threads(trainer) == threads.Threads(1, "a pass takes 1 s with 1, 2 s with 2")
    timed({1: 0.9, 2: 1.0})  # not clearly: the next start might measure it the other way round
    assert choose_threads(trainer).count == 2
    assert torch.get_num_threads() == 2


def test_many_cores_and_a_limited_container(trainer, timed, monkeypatch):
    torch.set_num_threads(8)
    timed({1: 8.0, 3: 1.0, 4: 5.0, 8: 6.0})
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    assert choose_threads(trainer).count == 3


def test_without_a_rehearsal(trainer, timed):
    timed({}, run=10.0)
    assert choose_threads(trainer) == threads.Threads(
        2, "torch's own number; the run is too short to measure others"
    )
    timed({})
    trainer.plan = replace(trainer.plan, resolved={"threads": 5})
    assert choose_threads(trainer) == threads.Threads(5, "as chosen before")
    trainer.plan = replace(trainer.plan, resolved={})
    torch.set_num_threads(1)
    assert choose_threads(trainer).count == 1


def test_one_thread_beside_a_gpu(trainer, timed):
    """The threads of torch's copies would spin on the cores that decode."""
    timed({})
    trainer.compute = replace(trainer.compute, device=torch.device("cuda"))
    assert choose_threads(trainer).count == 1
    trainer.settings = replace(trainer.settings, threads=3)
    assert choose_threads(trainer).count == 3


def test_a_real_rehearsal(trainer, monkeypatch):
    monkeypatch.setattr(threads, "estimate_seconds", lambda trainer: 100.0)
    start = time.perf_counter()
    found = choose_threads(trainer)
    assert found.count in (1, 2)
    assert "s with 1, " in found.reason
    assert time.perf_counter() - start < 20
    assert all(p.grad is None for p in trainer.model.parameters())


def test_the_number_is_recorded_and_used_again(data, tmp_path, timed):
    """Measured once; a resumed run does not measure again, whatever the load is then."""
    timed({1: 1.0, 2: 2.0})
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=tmp_path / "run", **SETTINGS)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["train"]["threads"], config["resolved"]["threads"]) == ("auto", 1)
    timed({})  # measuring would fail
    train(out=tmp_path / "run", resume=True)
    assert torch.get_num_threads() == 2
    train(data, out=tmp_path / "one", threads=1, **SETTINGS)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "one")


def test_another_number_on_resume_is_said(data, tmp_path):
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=tmp_path, threads=1, **SETTINGS)
    callback = RecordingCallback()
    train(out=tmp_path, resume=True, threads=2, callback=callback)
    assert any("had threads=1 and continues with 2" in note for note in callback.notes)


@pytest.mark.parametrize("value", [0, 2000, "many", 1.5, True])
def test_a_number_or_auto(value):
    with pytest.raises(ConfigError, match="threads must be an integer from 1 to 1,024"):
        TrainConfig(threads=value)


# ---- a busy machine ----------------------------------------------------------------------------


def spin(core, ready):
    os.sched_setaffinity(0, {core})
    ready.set()
    while True:
        pass


def test_waiting_for_a_core_is_measured():
    """Another process on the same core takes half of it."""
    context = multiprocessing.get_context("spawn")
    allowed, ready = os.sched_getaffinity(0), context.Event()
    core = min(allowed)
    other = context.Process(target=spin, args=(core, ready), daemon=True)
    other.start()
    try:
        assert ready.wait(60)
        os.sched_setaffinity(0, {core})
        wait, end = CpuWait(), time.monotonic() + 1
        while time.monotonic() < end:
            pass
        assert wait.fraction(5.0) is None  # not long enough
        assert 0.3 < wait.fraction(0.5) <= 1
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()


def test_a_busy_machine_is_named_once(data, tmp_path, monkeypatch):
    monkeypatch.setattr(CpuWait, "fraction", lambda self, least: 0.4)
    callback = RecordingCallback()
    train(data, out=tmp_path / "busy", callback=callback, **SETTINGS)
    (said,) = [note for note in callback.notes if "busy" in note]
    assert "waits for a processor core 40% of the time" in said
    monkeypatch.setattr(CpuWait, "fraction", lambda self, least: 0.1)
    callback = RecordingCallback()
    train(data, out=tmp_path / "idle", callback=callback, **SETTINGS)
    assert not [note for note in callback.notes if "busy" in note]


def test_the_plan_says_the_number_and_why(data, tmp_path):
    plans = []
    callback = RecordingCallback()
    callback.on_plan = plans.append
    train(data, out=tmp_path, threads=2, callback=callback, **SETTINGS)
    assert plans[0]["threads"] == "2; as requested"
