"""Lab `blocks`: shapes with equal parameters, and the verdict for every outcome."""

import math

import pytest

from vitrail.course.labs import blocks
from vitrail.course.labs.blocks import WIDER_SHAPES, WIDTH, depth_pairs, shape_fields, shape_name
from vitrail.course.labs.datasets import arm_recipe, load_dataset, plain_settings
from vitrail.course.labs.lab import Verdict
from vitrail.experiment.study import Difference, count_parameters
from vitrail.experiment.trial import one_thread

BETTER, UNCLEAR, WORSE = (Difference(x, (x - 0.1, x + 0.1), 4) for x in (0.5, 0.05, -0.5))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("blocks")
    with one_thread():
        return out, blocks.run(out, "small")


def test_small_run_leaves_no_files(small):
    out, result = small
    assert list(out.iterdir()) == []
    assert math.isfinite(result.number)
    assert result.n == 2
    assert set(result.numbers["accuracy"]) == {"1 x 32", "4 x 32", "1 x 64"}
    assert result.verdict.word in ("holds", "partly", "does not hold")
    assert "nan" not in result.sentence
    assert len(result.figure.axes) == 2


def test_four_blocks_take_longer_than_one(small):
    steps = small[1].numbers["seconds per step"]
    assert steps["4 x 32"] > steps["1 x 32"] > 0


@pytest.mark.parametrize("depth", WIDER_SHAPES)
def test_wider_models_have_equal_parameters(depth):
    data = load_dataset(None, 16)

    def count(shape):
        return count_parameters(arm_recipe(data, plain_settings(data, 1), {"model": shape_fields(shape)}))

    for shape in WIDER_SHAPES[depth]:
        assert count(shape) == pytest.approx(count((depth, WIDTH)), rel=0.05)
        assert shape_name(shape) != shape_name((depth, WIDTH))


def test_verdict_for_every_outcome():
    depths = [1, 2, 4]
    width = {"4 x 32 minus 1 x 64": UNCLEAR}
    always = dict.fromkeys(depth_pairs(depths), BETTER)
    assert set(always) == {(2, 1), (4, 1), (4, 2)}
    assert blocks.decide_verdict(depths, always, width) == Verdict("holds")
    assert (
        blocks.decide_verdict(depths, dict.fromkeys(depth_pairs(depths), UNCLEAR), width).word
        == "does not hold"
    )
    assert (
        blocks.decide_verdict(depths, dict.fromkeys(depth_pairs(depths), WORSE), width).word
        == "does not hold"
    )
    limited = blocks.decide_verdict(depths, {**always, (4, 2): UNCLEAR}, width)
    assert limited.word == "partly"
    assert "up to 2 blocks" in limited.condition
    assert (
        "4 blocks are clearly worse"
        in blocks.decide_verdict(depths, {**always, (4, 2): WORSE}, width).condition
    )
    wider = {"4 x 32 minus 1 x 64": WORSE}
    width_text = "1 x 64 (blocks x width) is clearly better than 4 x 32"
    for gains in (always, {**always, (4, 2): UNCLEAR}, dict.fromkeys(depth_pairs(depths), UNCLEAR)):
        result = blocks.decide_verdict(depths, gains, wider)
        assert width_text in result.condition
        assert result.word != "holds"
