"""Lab `blocks`: a small run."""

import math

import pytest

from vitrail.experiment.trial import one_thread
from vitrail_course.labs import blocks


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("blocks")
    with one_thread():
        return out, blocks.run(out, "small")


def test_small_run_leaves_no_files(small):
    out, result = small
    assert list(out.iterdir()) == []
    assert math.isfinite(result.number)
    assert result.n == 1, "the first of two seeds chooses the learning rate"
    assert set(result.numbers["accuracy"]) == {"1 x 32", "4 x 32"}
    assert "nan" not in result.setting
    assert len(result.figure.axes) == 2


def test_four_blocks_take_longer_than_one(small):
    steps = small[1].numbers["seconds per step"]
    assert steps["4 x 32"] > steps["1 x 32"] > 0
