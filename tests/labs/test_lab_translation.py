"""The lab `translation`: equivariance in known cases, a verdict that can go every way."""

import math
from dataclasses import replace

import pytest
import torch

from vitrail.errors import VitrailError
from vitrail.labs import translation
from vitrail.labs.given import opened
from vitrail.labs.lab import Verdict
from vitrail.labs.shift import CNN, amid, builders_for, change, reach
from vitrail.labs.study import Difference
from vitrail.labs.translation import POOLS, fading, inputs_of, judge, judge_all
from vitrail.labs.trial import one_thread

MUCH, SOME, NONE, LESS = (Difference(x, (x - 0.1, x + 0.1), 4) for x in (0.5, 0.2, 0.05, -0.5))


@pytest.fixture(autouse=True)
def alone():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    place = tmp_path_factory.mktemp("translation")
    with one_thread():
        return place, translation.run(place, "small")


@pytest.fixture(scope="module")
def digits():
    return inputs_of(opened(None, 64).train)


def test_a_small_run_gives_a_number_and_leaves_nothing_behind(small):
    place, found = small
    assert list(place.iterdir()) == []
    assert math.isfinite(found.number)
    assert found.n == 2
    assert found.verdict.word in ("holds", "holds if", "does not hold")
    assert "nan" not in found.sentence
    assert len(found.figure.axes) == 3
    counts = [found.numbers["parameters"][name] for name in translation.ARMS]
    assert max(counts) < 1.2 * min(counts)


def test_what_must_be_so_when_a_picture_moves(small):
    """A CNN follows every pixel, with pools every whole stride; a ViT whole patches, but for its positions."""
    moved = small[1].numbers["change when moved"]
    for word in ("random", "trained"):
        assert max(moved[f"CNN without pools, {word}"].values()) < 1e-4
        assert moved[f"CNN, {word}"]["1 patch"] < 1e-4 < 0.05 < moved[f"CNN, {word}"]["1 pixel"]
        without = moved[f"ViT without positions, {word}"]
        assert without["1 patch"] < 1e-4 < 0.05 < without["1 pixel"]
        assert min(moved[f"ViT, {word}"].values()) > 0.05


def test_one_pixel_reaches_a_neighbourhood_in_a_cnn_and_all_of_a_vit(small, digits):
    reached = small[1].numbers["pixels that one reaches"]
    assert reached["CNN without pools"] == 7  # three convolutions of 3 x 3
    assert reached["ViT"] == digits[0].shape[3] == 16
    assert reach(CNN(1, 10, pools=True).eval(), torch.rand(2, 1, 48, 48)) < 48


def test_moved_by_nothing_nothing_changes(digits):
    for build in builders_for(digits[0], 10).values():
        assert change(build().eval(), digits[0][:4], 0) < 1e-5


def test_pictures_amid_others(digits):
    images = digits[0][:12]
    scenes = amid(images)
    assert scenes.shape == (12, 1, 48, 48)
    assert torch.equal(scenes[:, :, 16:32, 16:32], images)
    assert not torch.equal(scenes[:, :, :16, :16], images)


def test_tiny_pictures_are_doubled_and_files_refused():
    split = opened(None, 10).train
    images, labels = inputs_of(split)
    assert images.shape == (10, 1, 16, 16)
    assert torch.equal(images[:, :, ::2, ::2], images[:, :, 1::2, 1::2])
    assert images.min() >= -1
    assert images.max() <= 1
    assert len(labels) == 10
    with pytest.raises(VitrailError, match="pictures in files"):
        inputs_of(replace(split, images=None))


# ---- verdicts -------------------------------------------------------------------------------


def test_an_advantage_must_be_there_and_fade():
    assert fading({1: MUCH, 2: NONE}, "first", "last") == (True, "holds (+50.0 points first, +5.0 last)")
    assert fading({1: MUCH, 2: MUCH, 3: SOME}, "", "")[0]
    assert fading({1: MUCH, 2: LESS}, "", "")[0]
    assert not fading({1: SOME, 2: MUCH}, "", "")[0]
    assert not fading({1: NONE, 2: LESS}, "", "")[0]
    assert not fading({1: LESS, 2: NONE}, "", "")[0]


def test_a_verdict_for_every_outcome():
    still, moves = {"1 pixel": 0.0, "1 patch": 0.0}, {"1 pixel": 0.9, "1 patch": 0.5}
    moved = {"CNN without pools, trained": still, "CNN, trained": still, "ViT, trained": moves}
    fades, never = {1: MUCH, 2: NONE}, {1: NONE, 2: NONE}
    assert judge(judge_all(moved, fades, fades, fades)) == Verdict("holds")
    pools = {**moved, "CNN, trained": {"1 pixel": 0.8, "1 patch": 0.0}}
    assert judge(judge_all(pools, fades, fades, fades)) == Verdict("holds if", POOLS)
    some = judge(judge_all(moved, never, fades, fades))
    assert some.word == "holds if"
    assert some.condition.startswith(
        "only equivariance and hybrids are meant (equivariance: holds; small data: does"
    )
    wrong = {**moved, "CNN without pools, trained": moves}
    assert judge(judge_all(wrong, never, never, never)).word == "does not hold"
    assert judge(judge_all({**moved, "ViT, trained": still}, never, never, never)).word == "does not hold"
