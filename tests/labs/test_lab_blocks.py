"""The lab `blocks`: shapes with as many parameters, and a verdict that can go every way."""

import math

import pytest

from vitrail.labs import blocks
from vitrail.labs.blocks import INSTEAD, D, called, deeper, model_of
from vitrail.labs.given import opened, plainly, recipe_of
from vitrail.labs.lab import Verdict
from vitrail.labs.study import Difference, parameters
from vitrail.labs.trial import one_thread

MUCH, NONE, LESS = (Difference(x, (x - 0.1, x + 0.1), 4) for x in (0.5, 0.05, -0.5))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    place = tmp_path_factory.mktemp("blocks")
    with one_thread():
        return place, blocks.run(place, "small")


def test_a_small_run_gives_a_number_and_leaves_no_runs_behind(small):
    place, found = small
    assert list(place.iterdir()) == []
    assert math.isfinite(found.number)
    assert found.n == 2
    assert set(found.numbers["accuracy"]) == {"1 x 32", "4 x 32", "1 x 64"}
    assert found.verdict.word in ("holds", "holds if", "does not hold")
    assert "nan" not in found.sentence
    assert len(found.figure.axes) == 2


def test_four_blocks_take_longer_than_one(small):
    steps = small[1].numbers["seconds for a step"]
    assert steps["4 x 32"] > steps["1 x 32"] > 0


@pytest.mark.parametrize("many", INSTEAD)
def test_width_instead_of_blocks_is_as_many_parameters(many):
    data = opened(None, 16)

    def count(shape):
        return parameters(recipe_of(data, plainly(data, 1), {"model": model_of(shape)}))

    for shape in INSTEAD[many]:
        assert count(shape) == pytest.approx(count((many, D)), rel=0.05)
        assert called(shape) != called((many, D))


def test_a_verdict_for_every_outcome():
    depths = [1, 2, 4]
    width = {"4 x 32 more than 1 x 64": NONE}
    always = dict.fromkeys(deeper(depths), MUCH)
    assert set(always) == {(2, 1), (4, 1), (4, 2)}
    assert blocks.judge(depths, always, width) == Verdict("holds")
    assert blocks.judge(depths, dict.fromkeys(deeper(depths), NONE), width).word == "does not hold"
    assert blocks.judge(depths, dict.fromkeys(deeper(depths), LESS), width).word == "does not hold"
    until = blocks.judge(depths, {**always, (4, 2): NONE}, width)
    assert until == Verdict("holds if", "there are fewer than 2: beyond, no gain is clear at this scale")
    assert "and 4 are clearly worse" in blocks.judge(depths, {**always, (4, 2): LESS}, width).condition
    wider = {"4 x 32 more than 1 x 64": LESS}
    said = "1 x 64 (blocks x width) is clearly better than 4 x 32"
    for gains in (always, {**always, (4, 2): NONE}, dict.fromkeys(deeper(depths), NONE)):
        found = blocks.judge(depths, gains, wider)
        assert said in found.condition
        assert found.word != "holds"
