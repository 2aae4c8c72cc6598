"""Lab `positions`, and the custom runs that a study cannot do."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.experiment.study import resolve_arm, study
from vitrail.experiment.trial import map_in_processes, one_thread
from vitrail.images.formats.sources import Dataset, Split
from vitrail_course.labs import positions as lab
from vitrail_course.labs.custom_run import CustomRun, train_run
from vitrail_course.labs.datasets import load_dataset

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
    assert (result.interval, result.n) == (None, 1), "of two seeds, the first one chooses the learning rate"
    assert list(result.numbers["arms"]) == ["none", "frozen random", "fixed sinusoidal", "learned"]
    assert all(len(arm["scores"]) == 2 for arm in result.numbers["arms"].values())
    scores = {name: arm["scores"] for name, arm in result.numbers["arms"].items()}
    assert result.number == pytest.approx(100 * (scores["learned"][1] - scores["none"][1]))
    assert list(result.numbers["correlation of similarity and distance"]) == [1, 5]
    by_epoch = result.numbers["adjacent minus other pairs"]
    assert {epoch: len(per_seed) for epoch, per_seed in by_epoch.items()} == {1: 2, 5: 2}
    assert "300 training images" in result.setting
    assert len(result.figure.subfigs) == 2


# ---- neighbors ------------------------------------------------------------------------------

GRID = (6, 6)
EVERYWHERE = np.ones(GRID, dtype=bool)
INNER = np.zeros(GRID, dtype=bool)
INNER[1:-1, 1:-1] = True


def similarity_of(embeddings):
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    return unit @ unit.T


def random_embeddings(seed=0):
    return np.random.default_rng(seed).normal(size=(36, 64))


def test_adjacent_patches_are_counted_side_by_side_and_one_above_the_other():
    row, column = (axis.ravel() for axis in np.indices(GRID))
    steps = abs(row[:, None] - row) + abs(column[:, None] - column)
    assert lab.neighbor_excess((steps == 1).astype(float), EVERYWHERE) == 1
    assert lab.neighbor_excess((steps == 2).astype(float), EVERYWHERE) < 0, "diagonal pairs are others"
    wrapped = np.zeros((36, 36))
    wrapped[5, 6] = wrapped[6, 5] = 1  # the end of a row and the start of the next
    assert lab.neighbor_excess(wrapped, EVERYWHERE) < 0


def test_neighbors_alike():
    row, column = (axis.ravel() for axis in np.indices(GRID))
    distance = np.hypot(row[:, None] - row, column[:, None] - column)
    for mask in (EVERYWHERE, INNER):
        assert lab.neighbor_excess(np.exp(-distance), mask) > 0.2


def test_a_border_that_is_alike_hides_neighbors_only_where_it_is_counted():
    row, column = (axis.ravel() for axis in np.indices(GRID))
    distance = np.hypot(row[:, None] - row, column[:, None] - column)
    border = ~INNER.ravel()
    similarity = np.where(
        border[:, None] & border, 1.0, np.where(border[:, None] | border, 0.0, np.exp(-distance))
    )
    pairs = ~np.eye(36, dtype=bool)
    r = np.corrcoef(similarity[pairs], distance[pairs])[0, 1]
    assert r > 0, "the correlation says that distant patches are alike"
    inner = lab.neighbor_excess(similarity, INNER)
    assert inner == pytest.approx(lab.neighbor_excess(np.exp(-distance), INNER)), "no pair of the border"
    only_border = np.where(border[:, None] & border, 1.0, 0.0)
    assert lab.neighbor_excess(only_border, INNER) == 0


def test_random_embeddings_have_no_excess():
    values = [lab.neighbor_excess(similarity_of(random_embeddings(seed)), INNER) for seed in range(20)]
    assert abs(np.mean(values)) < 0.01
    assert min(values) < 0 < max(values)


def test_too_few_patches_have_no_excess():
    one, pair = np.zeros(GRID, dtype=bool), np.zeros(GRID, dtype=bool)
    one[2, 2] = pair[2, 2:4] = True
    for mask in (one, pair, np.zeros(GRID, dtype=bool)):
        assert lab.neighbor_excess(np.eye(36), mask) is None


def test_blank_patches_have_one_pixel_value_in_more_than_nine_of_ten_images():
    images = np.full((20, 6, 9, 1), 7, np.uint8)  # a grid of 2 x 3 patches of 3 pixels
    images[:2, 1, 1] = 0  # in a tenth of the images
    images[:1, 1, 4] = 0  # in fewer
    images[:, :3, 6:] = np.arange(20)[:, None, None, None]  # differs between images, but has no content
    images[:, 5, 8] = 0
    data = Dataset("made up", ["a"], Split(np.zeros(20, np.int64), [""] * 20, images=images))
    assert lab.used_patches(data, (2, 3)).tolist() == [[True, False, False], [False, False, True]]
    files = Dataset("files", ["a"], Split(np.zeros(1, np.int64), [""], paths=[Path("a.png")]))
    assert lab.used_patches(files, (2, 3)).all()


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
