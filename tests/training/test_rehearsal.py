"""The rehearsal of a run: real steps that are taken back, and the time that the plan promises."""

import pytest

from bench.plans import measure
from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    fingerprints,
    one_thread,
    train,
    write_arrays,
)
from tests.training.test_loading import build
from vitrail.images.workers import WorkerPlan, Workers
from vitrail.training.callbacks import NullCallback
from vitrail.training.plan import rehearsal
from vitrail.training.plan.rehearsal import rehearse_run
from vitrail.training.trainer import Trainer

__all__ = ["one_thread"]


@pytest.fixture
def always(monkeypatch):
    """A rehearsal before every run, however short."""
    monkeypatch.setattr(rehearsal, "_SHORT_RUN", 0.0)
    monkeypatch.setattr(rehearsal, "_COST", 1.0)
    monkeypatch.setattr(rehearsal, "_MOST_STEPS", 1.0)
    monkeypatch.setattr(rehearsal, "_MOST_SECONDS", 0.05)


@pytest.mark.parametrize("more", [{}, {"optimizer": "muon"}, {"tune": "lora"}], ids=str)
def test_a_rehearsed_run_has_the_same_bits(data, tmp_path, always, monkeypatch, more):
    """Weights, optimizer, EMA and metrics, in the first epoch and in the last checkpoint."""
    taken = []
    step = Trainer.take_step
    monkeypatch.setattr(Trainer, "take_step", lambda self, batches: (taken.append(1), step(self, batches))[1])
    plans, callback = [], NullCallback()
    callback.on_plan = plans.append
    train(data, out=tmp_path / "rehearsed", callback=callback, **SETTINGS, **more)
    rehearsed = len(taken)
    monkeypatch.setattr(rehearsal, "rehearse_run", lambda trainer, estimate, loading: None)
    train(data, out=tmp_path / "plain", callback=RecordingCallback(), **SETTINGS, **more)
    assert "by the rehearsal" in plans[0]["time"]
    assert rehearsed >= len(taken) - rehearsed + 4, "steps were taken before the run"
    assert fingerprints(tmp_path / "rehearsed") == fingerprints(tmp_path / "plain")


@pytest.mark.slow
def test_the_time_of_the_plan_is_that_of_the_command(tmp_path):
    """From the plan to the end of the process, for a run of about a minute on this machine."""
    data = write_arrays(tmp_path / "data.npz", count=1000, held_out=200)
    run = f"{data} --recipe digits --epochs"
    at_200 = measure(f"{run} 200 --dry-run")["planned_s"]
    found = measure(f"{run} {max(2, round(200 * 60 / at_200))}")
    assert found["basis"] == "with evaluation, by the rehearsal"
    assert 0.5 < found["planned_s"] / found["taken_s"] < 2, found


def test_loading_counts_where_it_is_slower(data, always):
    """The images of the first steps are read before these start, so that steps alone would not show it."""
    trainer = build(data, epochs=10)
    assert rehearse_run(trainer, 100.0, 3.0) < 30
    trainer.workers = Workers(WorkerPlan("threads", 2, ""))
    assert rehearse_run(trainer, 100.0, 3.0) > trainer.steps * 3.0


def test_short_runs_and_few_steps_are_not_rehearsed(data):
    trainer = build(data, epochs=200)
    assert rehearse_run(trainer, 20.0, 0.0) is None
    few = build(data, epochs=2)
    assert rehearse_run(few, 1000.0, 0.0) is None
