"""`--minutes`: as many epochs as fit in a time budget, and a run that is exactly one of that length."""

import json

import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    fingerprints,
    rows,
    stopped_and_resumed,
    train,
)
from vitrail.base.errors import ConfigError, InputError
from vitrail.cli import app
from vitrail.experiment.folds import cross_validate
from vitrail.training.callbacks import NullCallback
from vitrail.training.plan import rehearsal
from vitrail.training.plan.rehearsal import Pace, choose_epochs
from vitrail.training.recipes.settings import TrainConfig
from vitrail.training.start import dry_run

PACE = Pace(first_step=5, step=0.1, evaluation=2, closing=9)  # 100 steps: 12 s for an epoch, 14 s besides


@pytest.mark.parametrize(
    ("seconds", "every", "epochs", "words"),
    [
        (14 + 12 * 7, 1, 7, "7 of 40 epochs are trained, as many as fit in 2 minutes: an epoch"),
        (14 + 12 * 8 - 0.01, 1, 7, "with its evaluation takes about 12 s here."),
        (14 + 10 * 7 + 2 * 2, 5, 7, "7 of 40 epochs"),  # evaluated after 5 and 7
        (14 + 12 * 40, 1, 40, "All 40 epochs are trained: that takes about 8.2 min of the 2 minutes."),
        (25, 1, 1, "does not fit in 2 minutes: with evaluation it takes about 26 s here. To be quicker"),
        (-3, 1, 1, "does not fit"),
    ],
)
def test_as_many_epochs_as_fit(seconds, every, epochs, words):
    chosen, reason = choose_epochs(TrainConfig(epochs=40, evaluate_every=every), PACE, 100, seconds, 2)
    assert chosen == epochs
    assert words in reason


def test_the_run_is_one_of_the_reduced_length(data, tmp_path, monkeypatch):
    """Interrupted and resumed, too, and the time is not looked at again."""
    train(data, out=tmp_path / "two", **{**SETTINGS, "epochs": 2})
    monkeypatch.setattr(rehearsal, "rehearse", lambda trainer, seconds: Pace(0, 4, 0, 0))  # 20 s for an epoch
    callback = RecordingCallback()
    train(data, out=tmp_path / "whole", minutes=1, callback=callback, **SETTINGS)
    assert [note for note in callback.notes if "2 of 3 epochs are trained" in note]
    assert fingerprints(tmp_path / "whole") == fingerprints(tmp_path / "two")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["train"]["epochs"], config["request"]["minutes"]) == (2, 1)
    stopped_and_resumed(data, tmp_path / "run", 7, minutes=1, **SETTINGS)  # by the same command
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "two")
    monkeypatch.setattr(rehearsal, "rehearse", None)
    train(out=tmp_path / "whole", resume=True, epochs=3)
    assert len(rows(tmp_path / "whole")) == 3
    with pytest.raises(ConfigError, match="minutes is 2, but 1 in the run"):
        train(out=tmp_path / "whole", resume=True, minutes=2)


def test_the_plan_says_what_the_rehearsal_measured(data, tmp_path, monkeypatch):
    """And the threads that it chose; not another estimate, and not "as chosen before"."""
    monkeypatch.setattr(rehearsal, "rehearse", lambda trainer, seconds: Pace(0, 4, 1, 3))  # 21 s for an epoch
    plans = []
    callback = NullCallback()
    callback.on_plan = plans.append
    train(data, out=tmp_path / "run", minutes=1, callback=callback, **SETTINGS)
    train(data, out=tmp_path / "plain", callback=callback, **SETTINGS)
    dry_run(str(data), out=tmp_path / "dry", minutes=1, callback=callback, **SETTINGS)
    measured, plain, dry = plans
    assert measured["time"] == dry["time"] == "about 45 s, with evaluation, by the rehearsal"
    assert "extrapolated from one step" in plain["time"]
    assert measured["threads"] == plain["threads"] == dry["threads"]
    assert "as chosen before" not in measured["threads"]


def test_the_rehearsal_measures_this_machine(data, tmp_path):
    callback = RecordingCallback()
    out = tmp_path / "run"
    train(data, out=out, minutes=0.05, callback=callback, **{**SETTINGS, "epochs": 100_000})
    [note] = [note for note in callback.notes if "of 100000 epochs are trained" in note]
    config = json.loads((out / "config.json").read_text())
    assert len(rows(out)) == config["train"]["epochs"] == int(note.split()[0])
    assert sum(row["seconds"] for row in rows(out)) < 30  # of 3; the machine may be busy


def test_wrong_use(data, tmp_path):
    out = tmp_path / "run"
    for value in ("0", "-1", "nan"):
        done = CliRunner().invoke(app, ["train", str(data), "--out", str(out), f"--minutes={value}"])
        assert "minutes must be a number above 0, such as 30" in str(done.exception)
    with pytest.raises(InputError, match="folds= and minutes= exclude each other"):
        cross_validate(data, out=out, folds=2, minutes=1)
    assert not out.exists()
