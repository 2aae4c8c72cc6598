"""Lab `pool`: class token and mean of the patches, each at its own learning rate."""

import numpy as np
import pytest

from vitrail.labs import pool as lab
from vitrail.labs.study import Difference
from vitrail.labs.trial import one_thread

CLEAR = Difference(-0.1, (-0.12, -0.08), 3)
ALIKE = Difference(0.002, (-0.01, 0.014), 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("pool")
    with one_thread():
        return place, lab.run(place, "small")


def test_a_number_a_picture_a_verdict(found):
    place, result = found
    assert list(place.iterdir()) == []  # runs do not stay
    arms = result.numbers["arms"]
    assert list(arms) == ["class token", "mean of patches"]
    assert all(len(arm["sweep"]) == 2 for arm in arms.values())
    assert all(arm["rate"] == float(max(arm["sweep"], key=arm["sweep"].get)) for arm in arms.values())
    each = np.subtract(arms["mean of patches"]["scores"], arms["class token"]["scores"])
    assert result.number == pytest.approx(100 * each.mean())
    if arms["class token"]["rate"] == arms["mean of patches"]["rate"]:
        assert result.numbers["at the class token's rate"][0] == pytest.approx(each.mean())
    assert result.verdict.word in ("holds if", "does not hold")
    assert "300 pictures" in result.sentence
    assert len(result.figure.axes) == 2


def test_the_verdict_can_go_every_way():
    assert lab.judge(ALIKE, CLEAR).condition == "each has a learning rate of its own"
    assert lab.judge(ALIKE, ALIKE).condition.startswith("less than 1.4 points do not count")
    better = Difference(0.1, (0.08, 0.12), 3)
    assert (
        str(lab.judge(better, ALIKE)) == "does not hold: the mean of the patches gets 10.0 points more right"
    )
    assert "10.0 points less" in lab.judge(CLEAR, CLEAR).condition
    assert lab.judge(Difference(0.0, None, 1), ALIKE).word == "does not hold"


def test_one_arm_has_no_class_token():
    from vitrail.labs.given import fields_for, opened
    from vitrail.labs.study import settled

    data = opened(None, 40, 20)
    ours, theirs = (
        settled(lab.RECIPE, data, lab.ARMS[arm], {"model": fields_for(data)}, 1e-3, 0).model
        for arm in (lab.MEAN, lab.CLASS)
    )
    assert (ours.tokens, ours.pool) == (16, "mean")
    assert (theirs.tokens, theirs.pool) == (17, "class")
