"""`vt.study`: arms, learning rates, seeds and intervals; killed and resumed; the learning rate sweep."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vitrail.base.errors import VitrailError
from vitrail.experiment.interval import (
    confidence_interval,
    difference_interval,
    fraction_interval,
)
from vitrail.experiment.study import Difference, Study, best_lr, resolve_arm, study
from vitrail.experiment.trial import Trial
from vitrail.images.formats.sources import open_dataset

TINY = dict(
    recipe="digits",
    epochs=6,
    batch=30,
    model=dict(width=16, depth=1, heads=2),
    augment=dict(rotate=0, zoom=1, translate=0),
    ema=None,
)
ARMS = {"plain": {}, "mean of all": {"model": {"pool": "mean-all"}}}

# Run as a script, this file is a study that a test kills.
STUDY = dict(arms=ARMS, seeds=2, lrs=[1e-3, 1e-2], **TINY)


def few():
    """300 training digits and 100 held out."""
    data = open_dataset("digits")
    return replace(data, train=data.train.take(np.arange(300)), val=data.val.take(np.arange(100)))


def numbers(found: Study):
    """All results but the times."""
    return [
        (arm.name, arm.lr, arm.scores, [(t.lr, t.seed, t.score, t.loss) for t in arm.sweep])
        for arm in found.arms.values()
    ]


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    return study(few(), out=tmp_path_factory.mktemp("study") / "complete", processes=1, **STUDY)


def test_means_intervals_and_the_difference(complete):
    for arm in complete.arms.values():
        assert arm.n == 2
        assert arm.mean == pytest.approx(np.mean(arm.scores))
        assert arm.images == len(few().eval_split)
        assert arm.interval == fraction_interval(arm.scores, arm.images)
        assert 0.2 < arm.mean < 1
        assert {(t.lr, t.seed) for t in arm.sweep} == {(1e-3, 0), (1e-2, 0)}
        assert arm.lr == best_lr(arm.sweep)
    first, second = complete.arms.values()
    found = complete.compare("plain", "mean of all")
    each = np.subtract(first.scores, second.scores)
    assert found.mean == pytest.approx(each.mean())
    assert found.interval == difference_interval(each.tolist(), first.images)
    assert found.n == 2


def test_study_json_and_figure(complete):
    saved = json.loads((complete.out / "study.json").read_text())
    assert [arm["name"] for arm in saved["arms"]] == ["plain", "mean of all"]
    assert saved["arms"][0]["mean"] == complete.arms["plain"].mean
    assert saved["arms"][0]["n"] == 2
    assert saved["environment"]["torch"]
    assert saved["seconds"] > 0
    assert saved["compared"][0]["with"] == "plain"
    assert (complete.out / "study.png").stat().st_size > 10_000
    assert "out" not in saved


def test_a_finished_study_is_read_and_not_run_again(complete, monkeypatch):
    monkeypatch.setattr("vitrail.experiment.trial.execute", None)
    again = study(few(), out=complete.out, processes=1, **STUDY)
    assert numbers(again) == numbers(complete)


def test_a_study_in_the_folder_of_another_is_an_error(complete):
    with pytest.raises(VitrailError, match=r"train.epochs is 3, but 6 in the run"):
        study(few(), out=complete.out, processes=1, **{**STUDY, "epochs": 3})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_two_processes_killed_and_resumed_give_the_same(complete, tmp_path):
    """A child process is killed while its workers train; the same call again finishes the study."""
    child = subprocess.Popen([sys.executable, __file__, str(tmp_path / "out")], start_new_session=True)
    runs = tmp_path / "out" / "runs"
    until = time.monotonic() + 60
    while not list(runs.glob("*/*.json")) and time.monotonic() < until:  # the first run is finished
        assert child.poll() is None
        time.sleep(0.01)
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    assert len(workers) >= 2
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    finished = {file: file.stat().st_mtime_ns for file in runs.glob("*/*.json")}
    assert 1 <= len(finished) < 6
    while any(map(alive, workers)):  # they exit by themselves
        assert time.monotonic() < until, "the workers outlive their parent"
        time.sleep(0.05)
    found = study(few(), out=tmp_path / "out", processes=1, **STUDY)
    assert numbers(found) == numbers(complete)
    assert {file: file.stat().st_mtime_ns for file in finished} == finished


def alive(process):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_sweep_gives_each_arm_its_own_learning_rate(tmp_path):
    """AdamW's best learning rate is far too low for SGD: with it SGD loses, with its own it does not."""
    arms = {"adamw": {}, "sgd": {"optimizer": "sgd"}}
    how = dict(arms=arms, out=tmp_path / "out", seeds=1, processes=1, **TINY)
    one = study(few(), lrs=[1e-2], **how)
    assert one.compare("sgd", "adamw").mean < -0.2
    swept = study(few(), lrs=[1e-2, 0.3], **how)  # reuses the runs of the first
    assert (swept.arms["adamw"].lr, swept.arms["sgd"].lr) == (1e-2, 0.3)
    assert swept.arms["adamw"].scores == one.arms["adamw"].scores
    assert swept.compare("sgd", "adamw").mean > -0.1
    assert "learning rate of sgd, 0.3, is the highest tried" in swept.notes[1]


def test_best_rate_by_score_then_loss_then_the_lower_rate():
    def trial(rate, score, loss):
        return Trial("a", rate, 0, score, loss, 1.0)

    assert best_lr([trial(1, 0.5, 2), trial(2, 0.6, 3)]) == 2
    assert best_lr([trial(1, 0.5, 2), trial(2, 0.5, 1)]) == 2
    assert best_lr([trial(1, 0.5, 2), trial(2, 0.5, 2)]) == 1
    assert best_lr([trial(1, 0.0, None), trial(2, 0.1, 9)]) == 2


def test_a_run_that_diverges_scores_zero_and_is_not_run_again(tmp_path, monkeypatch):
    how = dict(arms={"plain": {}}, seeds=1, lrs=[1e-2, 100.0], processes=1, clip=0.0, optimizer="sgd", **TINY)
    how["epochs"] = 4
    found = study(few(), out=tmp_path / "out", **how)
    assert found.arms["plain"].lr == 1e-2
    assert next(t for t in found.arms["plain"].sweep if t.lr == 100).score < 0.2
    monkeypatch.setattr("vitrail.experiment.trial.execute", None)
    assert numbers(study(few(), out=tmp_path / "out", **how)) == numbers(found)


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_an_error_and_does_not_hang(tmp_path):
    """Its worker processes import it, and would start processes of their own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from vitrail.experiment.study import study\n"
        f"study('digits', arms={{'a': {{}}}}, out={str(tmp_path / 'out')!r}, seeds=2, lrs=[0.1, 0.2], epochs=1)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ended unexpectedly" in last
    assert 'call study() below `if __name__ == "__main__":`' in last


def test_the_interval_is_students_t():
    for n in (2, 5, 30, 31, 40, 200):
        values = np.random.default_rng(n).normal(size=n)
        low, high = confidence_interval(values.tolist())
        assert (low, high) == pytest.approx(
            stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values)), abs=1e-4
        )
    assert confidence_interval([1.0]) is None


def test_a_difference_is_paired_by_seed():
    found = Difference.of([0.5, 0.7, 0.9], [0.4, 0.6, 0.8])
    assert (found.mean, found.n, found.significant) == (pytest.approx(0.1), 3, True)
    assert found.interval == pytest.approx((0.1, 0.1)), "variation common to both cancels"
    assert Difference.of([0.4, 0.6], [0.5, 0.2]).mean == pytest.approx(0.15)
    assert not Difference.of([0.4, 0.6], [0.5, 0.2]).significant
    assert Difference.of([0.5], [0.4]).interval is None
    with pytest.raises(ValueError, match="shorter"):
        Difference.of([0.5, 0.7], [0.4])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(arms={}), "arms must be a mapping of names to changes"),
        (dict(arms={"a/b": {}}), "arm name 'a/b' cannot be a folder name"),
        (dict(arms={"a": {"epochs": 3}}), "pass epochs to the study, for all arms"),
        (dict(arms={"a": {"lr": 1.0}}), "use lrs= for all arms"),
        (dict(arms={"a": {"model": {"depht": 3}}}), "depht"),
        (dict(arms={"a": {"nothing": 3}}), "TrainConfig has no field 'nothing'"),
        (dict(arms={"a": {}, "A": {}}), "more than case"),
        (dict(seeds=0), "seeds must be a count"),
        (dict(seeds=[1, 1]), "seeds must be a count"),
        (dict(selection_seeds=3), "selection_seeds is 3, but there are only 2 seeds"),
        (dict(lrs=[]), "lrs must be learning rates above 0"),
        (dict(lrs=[0.1, -1]), "lrs must be learning rates"),
        (dict(lr=0.1), "use lrs= and seeds= instead of lr and seed"),
        (dict(processes=0), "processes must be an integer from 1"),
    ],
)
def test_invalid_arguments_are_errors(tmp_path, wrong, message):
    with pytest.raises(VitrailError) as error:
        study(few(), out=tmp_path / "out", **{**STUDY, **wrong})
    assert message in str(error.value)
    assert not (tmp_path / "out" / "runs").exists()


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(VitrailError, match=r"new or empty folder, or a study's.* contains thesis.txt"):
        study(few(), out=tmp_path, **STUDY)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


if __name__ == "__main__":
    study(few(), out=sys.argv[1], processes=2, **STUDY)


def test_the_recipe_auto_chooses_once_for_all_arms():
    """By what the arms share: an arm of another size is the same model at that size."""
    shared = {"epochs": 3, "batch": 30}
    plain = resolve_arm("auto", few(), {}, shared, None, 0)
    small = resolve_arm("auto", few(), {"model": {"size": 24}}, shared, None, 0)
    assert small.model.size == (24, 24) != plain.model.size
    assert (small.model.width, small.model.depth, small.model.patch) == (
        plain.model.width,
        plain.model.depth,
        plain.model.patch,
    )
    assert inspect.signature(study).parameters["recipe"].default == "auto"
