"""The lab `norms`: gradients by block, what LayerNorm guarantees, and a verdict that can go every way."""

import math

import pytest
import torch
from torch import nn

from vitrail.config import ViTConfig
from vitrail.labs import norms
from vitrail.labs.given import opened, plainly
from vitrail.labs.lab import Verdict
from vitrail.labs.norms import ARMS, Spread
from vitrail.labs.study import Difference
from vitrail.labs.trial import one_thread
from vitrail.model import ViT


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    place = tmp_path_factory.mktemp("norms")
    with one_thread():
        return place, norms.run(place, "small")


def test_a_small_run_gives_all_arms_and_leaves_no_runs_behind(small):
    place, found = small
    assert list(place.iterdir()) == []
    assert math.isfinite(found.number)
    assert found.n == 2
    assert (
        set(found.numbers["accuracy"]) == set(ARMS) == set(found.numbers["gradient, first block over last"])
    )
    assert found.verdict.word in ("holds", "holds if", "does not hold")
    assert "nan" not in found.sentence
    assert len(found.figure.axes) == 2


def test_gradients_vanish_without_norm_and_residual_and_grow_without_norm(small):
    ratios = small[1].numbers["gradient, first block over last"]
    assert ratios["neither"] < 0.1 < ratios["pre-norm"] < 10
    first = small[1].numbers["gradient of the first block"]
    assert first["no norm"] > 100 * first["pre-norm"]


def test_before_its_gain_layernorm_has_mean_0_and_variance_1():
    model = ViT(ViTConfig(width=8, depth=2, heads=2, patch=2, size=8, channels=1, classes=3))
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    before, after = norms.spreads(model, images)
    assert before.standard
    assert after.standard  # gain and shift begin with 1 and 0
    for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
        nn.init.constant_(norm.weight, 2.0)
        nn.init.constant_(norm.bias, -3.0)
    before, after = norms.spreads(model, images)
    assert before.standard
    assert after.mean == pytest.approx(-3)
    assert after.variance == pytest.approx(4, rel=1e-2)


def test_gradients_are_those_of_the_blocks():
    data = opened(None, 32)
    shared = plainly(data, 1, width=8, depth=2, heads=2)
    found = norms.gradient_by_block(data, shared, {}, 3, seed=1)
    assert len(found) == 3
    assert all(one > 0 for one in found)
    assert found == norms.gradient_by_block(data, shared, {}, 3, seed=1)
    assert found != norms.gradient_by_block(data, shared, {"block": "post-norm"}, 3, seed=1)
    assert norms.fall([[2.0, 1.0], [8.0, 1.0]]) == pytest.approx(4)


def test_a_verdict_for_every_outcome():
    much, none, less = (Difference(x, (x - 0.1, x + 0.1), 3) for x in (0.5, 0.05, -0.5))
    all_better = dict.fromkeys([name for name in ARMS if name != "pre-norm"], much)
    places = {"post-norm": none, "res-post-norm": none}
    ratios = dict.fromkeys(ARMS, 1.0) | {"no residual": 1e-6, "neither": 1e-9}
    plain, learned = Spread(0.0, 1.0), Spread(0.3, 2.0)
    assert norms.judge(all_better | places, ratios, plain, plain) == Verdict("holds")
    kept = norms.judge(all_better | places, ratios | {"no residual": 0.5}, plain, plain)
    assert "with norms they keep their size" in kept.condition
    gain = norms.judge(all_better | places, ratios, plain, learned)
    assert gain == Verdict("holds if", "mean 0 and variance 1 are meant before the learned gain and shift")
    assert "worse post-norm" in norms.judge(all_better, ratios, plain, plain).condition
    two = norms.judge(all_better | places | {"post-norm": less}, ratios, plain, plain)
    assert "better post-norm" in two.condition
    needless = norms.judge(all_better | places | {"no norm": none}, ratios, plain, plain)
    assert "seeds do not make it clear" in needless.condition
    for worse in (none, less):
        wrong = norms.judge(all_better | {"no residual": worse}, ratios, plain, plain)
        assert wrong.word == "does not hold"
    assert norms.judge(all_better, ratios, learned, learned).word == "does not hold"
