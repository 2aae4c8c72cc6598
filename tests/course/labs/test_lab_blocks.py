"""Lab `blocks`: shapes with equal parameters, and the verdict for every outcome."""

import math

import pytest

from vitrail.experiment.study import count_parameters
from vitrail.experiment.trial import one_thread
from vitrail_course.labs import blocks
from vitrail_course.labs.blocks import WIDER_SHAPES, WIDTH, shape_fields, shape_name
from vitrail_course.labs.datasets import arm_recipe, load_dataset, plain_settings


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
    assert set(result.numbers["accuracy"]) == {"1 x 32", "4 x 32", "1 x 64"}
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
    def verdict(*by_depth):
        accuracy = {
            shape_name((depth, WIDTH)): {"scores": s} for depth, s in zip((1, 2, 4), by_depth, strict=True)
        }
        numbers = {"accuracy": accuracy, "depths": [1, 2, 4], "images": 1437, "held out": 360}
        return blocks.decide_verdict(numbers)

    low, middle, high = [0.5, 0.51, 0.52], [0.6, 0.612, 0.62], [0.7, 0.71, 0.722]
    assert verdict(low, middle, high).word == "holds"
    assert verdict(high, middle, low).word == "does not hold"
    unclear = verdict(middle, [0.5, 0.7, 0.6], [0.5, 0.6, 0.72])
    assert unclear.word == "not clear here", "no clear gain is no proof of none"
    assert "1,437 images" in unclear.condition
    assert "+10.0 [" in verdict(low, middle, high).condition, "points for each doubling"
