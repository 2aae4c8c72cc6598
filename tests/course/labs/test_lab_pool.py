"""Lab `pool`: class token and mean of the patches, each at its own learning rate."""

import numpy as np
import pytest

from vitrail.course.labs import pool as lab
from vitrail.experiment.study import Difference
from vitrail.experiment.trial import one_thread

WORSE = Difference(-0.1, (-0.12, -0.08), 3)
EQUAL = Difference(0.002, (-0.01, 0.014), 3)


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
    assert result.number == pytest.approx(100 * differences.mean())
    if arms["class token"]["lr"] == arms["mean pooling"]["lr"]:
        assert result.numbers["at the class token's lr"][0] == pytest.approx(differences.mean())
    assert result.verdict.word in ("partly", "does not hold")
    assert "300 training images" in result.sentence
    assert len(result.figure.axes) == 2


def test_verdict_for_every_outcome():
    assert lab.decide_verdict(EQUAL, WORSE).condition == "each needs its own learning rate"
    assert lab.decide_verdict(EQUAL, EQUAL).condition.startswith("equal only to within 1.4 points")
    better = Difference(0.1, (0.08, 0.12), 3)
    assert lab.decide_verdict(better, EQUAL).word == "does not hold"
    assert "10.0 points higher" in lab.decide_verdict(better, EQUAL).condition
    assert "10.0 points lower" in lab.decide_verdict(WORSE, WORSE).condition
    assert lab.decide_verdict(Difference(0.0, None, 1), EQUAL).word == "does not hold"


def test_one_arm_has_no_class_token():
    from vitrail.course.labs.datasets import input_fields, load_dataset
    from vitrail.experiment.study import resolve_arm

    data = load_dataset(None, 40, 20)
    mean_model, class_model = (
        resolve_arm(lab.RECIPE, data, lab.ARMS[arm], {"model": input_fields(data)}, 1e-3, 0).model
        for arm in (lab.MEAN, lab.CLASS)
    )
    assert (mean_model.tokens, mean_model.pool) == (16, "mean")
    assert (class_model.tokens, class_model.pool) == (17, "class")
