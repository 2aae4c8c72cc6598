"""Lab `pool`: class token and mean of the patches, each at its own learning rate."""

import numpy as np
import pytest

from vitrail.experiment.trial import one_thread
from vitrail_course.labs import pool as lab


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("pool")
    with one_thread():
        return out, lab.run(out, "small")


def test_small_run_gives_number_figure_and_verdict(small_run):
    out, result = small_run
    assert list(out.iterdir()) == []  # runs are removed
    arms = result.numbers["arms"]
    assert list(arms) == ["class token", "mean pooling"]
    assert all(len(arm["sweep"]) == 2 for arm in arms.values())
    assert all(arm["lr"] == float(max(arm["sweep"], key=arm["sweep"].get)) for arm in arms.values())
    differences = np.subtract(arms["mean pooling"]["scores"], arms["class token"]["scores"])
    assert result.number == pytest.approx(100 * differences[1]), "the first seed chose the learning rates"
    assert result.n == 1
    at_class_lr = result.numbers["mean pooling at the class token's lr"]
    same = arms["class token"]["lr"] == arms["mean pooling"]["lr"]
    assert len(at_class_lr) == 2
    assert (at_class_lr == arms["mean pooling"]["scores"]) == same
    assert len(result.warnings) == 2, "of two learning rates, each is at an edge"
    assert "300 training images" in result.setting
    assert len(result.figure.axes) == 2


def test_one_arm_has_no_class_token():
    from vitrail.experiment.study import resolve_arm
    from vitrail_course.labs.datasets import input_fields, load_dataset

    data = load_dataset(None, 40, 20)
    mean_model, class_model = (
        resolve_arm(lab.RECIPE, data, lab.ARMS[arm], {"model": input_fields(data)}, 1e-3, 0).model
        for arm in (lab.MEAN, lab.CLASS)
    )
    assert (mean_model.tokens, mean_model.pool) == (16, "mean")
    assert (class_model.tokens, class_model.pool) == (17, "class")
