"""Lab `positions`, and the custom runs that a study cannot do."""

from functools import partial

import numpy as np
import pytest
import torch

from vitrail.course.labs import positions as lab
from vitrail.course.labs.custom_run import CustomRun, train_run
from vitrail.course.labs.datasets import load_dataset
from vitrail.experiment.study import resolve_arm, study
from vitrail.experiment.trial import map_in_processes, one_thread

TINY = dict(epochs=2, batch=30, model=dict(width=8, depth=1, heads=2, patch=2, size=8))


@pytest.fixture(autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def data():
    return load_dataset(None, 90, 60)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("positions")
    with one_thread():
        return out, lab.run(out, "small")


def tiny_recipe(data, **more):
    return resolve_arm(lab.RECIPE, data, {}, {**TINY, **more}, 1e-2, 1)


def test_small_run_gives_number_figure_and_verdict(small_run):
    out, result = small_run
    assert list(out.iterdir()) == []  # runs are removed
    assert -100 <= result.number <= 100
    assert result.interval[0] <= result.number <= result.interval[1]
    assert list(result.numbers["arms"]) == ["none", "frozen random", "fixed sinusoidal", "learned"]
    assert all(len(arm["scores"]) == 2 for arm in result.numbers["arms"].values())
    scores = {name: arm["scores"] for name, arm in result.numbers["arms"].items()}
    assert result.number == pytest.approx(100 * np.mean(np.subtract(scores["learned"], scores["none"])))
    assert list(result.numbers["correlation of similarity and distance"]) == [1, 5]
    assert "300 training images" in result.sentence
    assert len(result.figure.subfigs) == 2


def numbers(none=0.7, learned=0.97, late=(-0.6, -0.62, -0.61), early=(0.0, 0.01, -0.01)):
    arms = {lab.NONE: none, lab.LEARNED: learned}
    return {
        "arms": {name: {"scores": [mean, mean + 0.004, mean - 0.003]} for name, mean in arms.items()},
        "correlation of similarity and distance": {"1": list(early), "50": list(late)},
        "held out": 10_000,
        "images": 60_000,
    }


def test_verdict_for_every_outcome():
    assert lab.decide_verdict(numbers()).word == "holds"
    smaller = lab.decide_verdict(numbers(learned=0.8))
    assert smaller.word == "partly"
    assert "Not clear: the gain from none to learned ones is 27 points (+10.0 [" in smaller.condition
    assert "the slide does not say which it compares" in smaller.condition
    assert "close patches are similar" in lab.decide_verdict(numbers(late=(0.1, 0.11, 0.12))).condition
    unclear = lab.decide_verdict(numbers(late=(-0.9, 0.2, 0.1)))
    assert "Not clear: after 50 epochs, embeddings of close patches are similar" in unclear.condition
    other = numbers()
    other["images"] = 10_000
    other["correlation of similarity and distance"] = {"1": [0.1, 0.11, 0.12], "10": [0.2, 0.21, 0.23]}
    fewer = lab.decide_verdict(other)
    assert fewer.word == "partly"
    assert "but with 10,000 images instead of 60,000" in fewer.condition, "not the setting of the slide"
    assert "but with 10 epochs instead of 50" in fewer.condition
    assert "Not true" not in fewer.condition
    worse = numbers(none=0.97, learned=0.7, late=(0.1, 0.11, 0.12))
    assert lab.decide_verdict(worse).word == "does not hold"


# ---- runs -----------------------------------------------------------------------------------


def test_custom_run_equals_the_run_of_a_study(data, tmp_path):
    reference = study(
        data,
        arms={"plain": {}},
        out=tmp_path / "out",
        lrs=[1e-2],
        seeds=[1],
        recipe=lab.RECIPE,
        processes=1,
        **TINY,
    )
    run_result = train_run(CustomRun(tiny_recipe(data)), data)
    [trial] = reference.arms["plain"].sweep
    assert (run_result.score, run_result.loss) == (trial.score, trial.loss)


def test_frozen_positions_do_not_change_and_other_weights_do(data):
    recipe = tiny_recipe(data)
    rows = lab.random_positions(recipe.model.tokens, recipe.model.width, 1)
    assert rows.std() == pytest.approx(0.5**0.5, rel=0.1)
    run_result = train_run(CustomRun(recipe, frozen_positions=rows, snapshot_epochs=(1, 2)), data)
    assert sorted(run_result.snapshots) == [1, 2]
    for state in run_result.snapshots.values():
        assert np.array_equal(state["position.table"], rows)
    assert not np.array_equal(
        run_result.snapshots[1]["tokens.proj.weight"], run_result.snapshots[2]["tokens.proj.weight"]
    )
    learned = train_run(CustomRun(recipe, snapshot_epochs=(1, 2)), data)
    assert not np.array_equal(learned.snapshots[1]["position.table"], learned.snapshots[2]["position.table"])
    assert run_result.loss != learned.loss


def test_custom_run_starts_from_given_weights(data):
    first = train_run(CustomRun(tiny_recipe(data), snapshot_epochs=(2,)), data)
    tiny_lr = resolve_arm(lab.RECIPE, data, {}, TINY, 1e-12, 1)  # changes nothing
    again = train_run(CustomRun(tiny_lr, initial_weights=first.snapshots[2], snapshot_epochs=(2,)), data)
    assert again.loss == pytest.approx(first.loss, rel=1e-6)
    assert np.allclose(again.snapshots[2]["position.table"], first.snapshots[2]["position.table"], atol=1e-8)


def test_diverged_run_has_score_zero(data):
    nan_weights = {
        name: np.full_like(value, np.nan)
        for name, value in train_run(CustomRun(tiny_recipe(data), snapshot_epochs=(2,)), data)
        .snapshots[2]
        .items()
    }
    run_result = train_run(CustomRun(tiny_recipe(data), initial_weights=nan_weights), data)
    assert (run_result.score, run_result.loss) == (0.0, None)


@pytest.mark.slow  # loads torch in each worker
def test_workers_give_the_same_numbers(data):
    runs = [CustomRun(tiny_recipe(data, epochs=1)), CustomRun(tiny_recipe(data, epochs=2))]
    in_process = map_in_processes(partial(train_run, data=data), runs, 1)
    in_workers = map_in_processes(partial(train_run, data=data), runs, 2)
    assert [run_result.loss for run_result in in_process] == [run_result.loss for run_result in in_workers]


def test_user_data(tmp_path):
    file = tmp_path / "own.npz"
    x = np.random.default_rng(0).integers(0, 256, (40, 14, 21, 3), dtype=np.uint8)
    np.savez(file, x_train=x, y_train=np.arange(40) % 2)
    (tmp_path / "out").mkdir()
    torch.manual_seed(0)
    result = lab.run(tmp_path / "out", "small", file)
    assert np.isfinite(result.number)
