"""Lab `positions`, and the runs that a study cannot do."""

from functools import partial

import numpy as np
import pytest
import torch

from vitrail.labs import positions as lab
from vitrail.labs.given import opened
from vitrail.labs.job import Job, do
from vitrail.labs.lab import Verdict
from vitrail.labs.study import Difference, settled, study
from vitrail.labs.trial import each, one_thread

TINY = dict(epochs=2, batch=30, model=dict(width=8, depth=1, heads=2, patch=2, size=8))


@pytest.fixture(autouse=True)
def alone():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def data():
    return opened(None, 90, 60)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("positions")
    with one_thread():
        return place, lab.run(place, "small")


def chosen(data, **more):
    return settled(lab.RECIPE, data, {}, {**TINY, **more}, 1e-2, 1)


def test_a_number_a_picture_a_verdict(found):
    place, result = found
    assert list(place.iterdir()) == []  # runs do not stay
    assert -100 <= result.number <= 100
    assert result.interval[0] <= result.number <= result.interval[1]
    assert list(result.numbers["arms"]) == ["none", "frozen random", "fixed sines", "learned"]
    assert all(len(arm["scores"]) == 2 for arm in result.numbers["arms"].values())
    scores = {name: arm["scores"] for name, arm in result.numbers["arms"].items()}
    assert result.number == pytest.approx(100 * np.mean(np.subtract(scores["learned"], scores["none"])))
    assert list(result.numbers["correlation of similarity and distance"]) == [1, 5]
    assert result.verdict.word in ("holds if", "does not hold")  # few pictures are noisy
    assert "300 pictures" in result.sentence
    assert len(result.figure.subfigs) == 2


def clear(mean):
    return Difference(mean, (mean - 0.01, mean + 0.01), 3)


def test_the_verdict_can_go_every_way():
    near = {1: [0.0, 0.0], 50: [-0.6, -0.62]}
    better = {name: clear(0.1) for name in (lab.RANDOM, lab.SINES)}
    alike = {name: Difference(0.01, (-0.02, 0.04), 3) for name in (lab.RANDOM, lab.SINES)}
    gains = {lab.RANDOM: clear(0.17), lab.SINES: clear(0.17), lab.LEARNED: clear(0.27)}
    assert lab.judge(gains, better, near) == Verdict("holds")
    assert "frozen random and fixed sines gain as much" in lab.judge(gains, alike, near).condition
    useless = gains | {lab.RANDOM: Difference(0.0, (-0.1, 0.1), 3)}
    assert "any kind are meant: fixed sines gain" in lab.judge(useless, alike, near).condition
    assert "r = +0.05" in lab.judge(gains, better, {1: [0.0, 0.0], 50: [0.0, 0.1]}).condition
    assert (
        "10.0 points here, 27 there" in lab.judge(gains | {lab.LEARNED: clear(0.1)}, better, near).condition
    )
    for none in (clear(-0.1), Difference(0.3, (-0.1, 0.7), 3), Difference(0.3, None, 1)):
        assert lab.judge(gains | {lab.LEARNED: none}, better, near).word == "does not hold"


# ---- runs -----------------------------------------------------------------------------------


def test_a_job_is_the_run_that_a_study_does(data, tmp_path):
    whole = study(
        data,
        arms={"plain": {}},
        out=tmp_path / "out",
        rates=[1e-2],
        seeds=[1],
        recipe=lab.RECIPE,
        processes=1,
        **TINY,
    )
    one = do(Job(chosen(data)), data)
    [trial] = whole.arms["plain"].sweep
    assert (one.score, one.loss) == (trial.score, trial.loss)


def test_frozen_rows_stay_and_all_else_learns(data):
    recipe = chosen(data)
    rows = lab.random_rows(recipe.model.tokens, recipe.model.width, 1)
    assert rows.std() == pytest.approx(0.5**0.5, rel=0.1)
    done = do(Job(recipe, rows=rows, keep=(1, 2)), data)
    assert sorted(done.states) == [1, 2]
    for state in done.states.values():
        assert np.array_equal(state["position.table"], rows)
    assert not np.array_equal(done.states[1]["tokens.proj.weight"], done.states[2]["tokens.proj.weight"])
    learned = do(Job(recipe, keep=(1, 2)), data)
    assert not np.array_equal(learned.states[1]["position.table"], learned.states[2]["position.table"])
    assert done.loss != learned.loss


def test_a_job_goes_on_from_given_weights(data):
    first = do(Job(chosen(data), keep=(2,)), data)
    slow = settled(lab.RECIPE, data, {}, TINY, 1e-12, 1)  # nothing changes
    again = do(Job(slow, start=first.states[2], keep=(2,)), data)
    assert again.loss == pytest.approx(first.loss, rel=1e-6)
    assert np.allclose(again.states[2]["position.table"], first.states[2]["position.table"], atol=1e-8)


def test_a_run_that_diverges_scores_nothing(data):
    bad = {
        name: np.full_like(value, np.nan)
        for name, value in do(Job(chosen(data), keep=(2,)), data).states[2].items()
    }
    done = do(Job(chosen(data), start=bad), data)
    assert (done.score, done.loss) == (0.0, None)


@pytest.mark.slow  # torch is loaded anew in each
def test_processes_do_not_change_the_numbers(data):
    jobs = [Job(chosen(data, epochs=1)), Job(chosen(data, epochs=2))]
    here = each(partial(do, data=data), jobs, 1)
    apart = each(partial(do, data=data), jobs, 2)
    assert [one.loss for one in here] == [one.loss for one in apart]


def test_data_of_ones_own(tmp_path):
    file = tmp_path / "own.npz"
    x = np.random.default_rng(0).integers(0, 256, (40, 14, 21, 3), dtype=np.uint8)
    np.savez(file, x_train=x, y_train=np.arange(40) % 2)
    (tmp_path / "out").mkdir()
    torch.manual_seed(0)
    result = lab.run(tmp_path / "out", "small", file)
    assert np.isfinite(result.number)
