"""Lab `resolution`: position embeddings on a larger grid, and accuracy before and after fine-tuning."""

import numpy as np
import pytest
import torch

from vitrail.experiment.study import Difference, resolve_arm
from vitrail.experiment.trial import one_thread
from vitrail.model import ViT
from vitrail.model.resample import resize_grid
from vitrail_course.labs import resolution as lab
from vitrail_course.labs.custom_run import CustomRun, initial_accuracy, train_run
from vitrail_course.labs.datasets import load_dataset

BETTER = Difference(0.1, (0.08, 0.12), 3)
UNCLEAR = Difference(0.01, (-0.02, 0.04), 3)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("resolution"), "small")


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    fields = dict(size=(16, 16), patch=(4, 4), channels=1, width=8, depth=1, heads=2)
    recipe = resolve_arm(lab.RECIPE, load_dataset(None, 40, 20), {}, {"model": fields}, 1e-3, 0)
    return ViT(recipe.model)


def test_small_run_gives_number_figure_and_verdict(result):
    before, after = result.numbers["before fine-tuning"], result.numbers["after fine-tuning"]
    assert list(before) == list(after) == list(lab.ARMS)
    assert all(len(scores) == 2 for scores in (*before.values(), *after.values()))
    differences = np.subtract(before["interpolated"], before["new random"])
    assert result.number == pytest.approx(100 * differences.mean())
    assert "200 training images and 60 held-out images: 6 epochs at 16x16 pixels" in result.setting
    assert len(result.figure.axes) == 2


def test_positions_on_the_larger_grid(trained):
    old = trained.position.table.detach()
    weights = {arm: lab.resize_positions(arm, trained, 0) for arm in lab.ARMS}
    for arm_weights in weights.values():
        assert arm_weights["position.table"].shape == (65, 8)  # 8 x 8 patches and the class token
        assert np.array_equal(
            arm_weights["position.table"][0], old[0].numpy()
        )  # whose embedding is unchanged
        assert np.array_equal(arm_weights["tokens.proj.weight"], trained.tokens.proj.weight.detach().numpy())
    interpolated = resize_grid(old[1:], (4, 4), (8, 8)).numpy()
    assert np.array_equal(weights[lab.INTERPOLATED]["position.table"][1:], interpolated)
    new = weights[lab.RANDOM]["position.table"][1:]
    assert new.std() == pytest.approx(lab.SIGMA, rel=0.15)
    assert np.array_equal(new, lab.resize_positions(lab.RANDOM, trained, 0)["position.table"][1:])
    assert not np.array_equal(new, lab.resize_positions(lab.RANDOM, trained, 1)["position.table"][1:])


def test_initial_accuracy_is_that_of_the_given_weights():
    """At the same resolution, trained weights have the accuracy measured after training."""
    data = lab.resize_by(load_dataset(None, 100, 50), (16, 16), 1)
    fields = dict(size=(16, 16), patch=(4, 4), channels=1, width=16, depth=1, heads=2)
    recipe = resolve_arm(lab.RECIPE, data, {}, {"model": fields, "epochs": 5, "batch": 20}, 1e-2, 0)
    with one_thread():
        run_result = train_run(CustomRun(recipe, snapshot_epochs=(5,)), data)
        assert (
            initial_accuracy(CustomRun(recipe, initial_weights=run_result.snapshots[5]), data)
            == run_result.score
        )
        assert initial_accuracy(CustomRun(recipe), data) != run_result.score
