"""Lab `norms`: gradients by block, statistics of LayerNorm, and the verdict for every outcome."""

import math

import pytest
import torch
from torch import nn

from vitrail.config import ViTConfig
from vitrail.course.labs import norms
from vitrail.course.labs.datasets import load_dataset, plain_settings
from vitrail.course.labs.lab import Verdict
from vitrail.course.labs.norms import ARMS, NormStatistics
from vitrail.experiment.study import Difference
from vitrail.experiment.trial import one_thread
from vitrail.model import ViT


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("norms")
    with one_thread():
        return out, norms.run(out, "small")


def test_small_run_has_all_arms_and_leaves_no_files(small):
    out, result = small
    assert list(out.iterdir()) == []
    assert math.isfinite(result.number)
    assert result.n == 2
    assert (
        set(result.numbers["accuracy"]) == set(ARMS) == set(result.numbers["gradient, first block over last"])
    )
    assert result.verdict.word in ("holds", "partly", "does not hold")
    assert "nan" not in result.sentence
    assert len(result.figure.axes) == 2


def test_gradients_vanish_without_norm_and_residual_and_grow_without_norm(small):
    ratios = small[1].numbers["gradient, first block over last"]
    assert ratios["neither"] < 0.1 < ratios["pre-norm"] < 10
    first = small[1].numbers["gradient of the first block"]
    assert first["no norm"] > 100 * first["pre-norm"]


def test_layernorm_statistics_before_and_after_gain_and_bias():
    model = ViT(ViTConfig(width=8, depth=2, heads=2, patch=2, size=8, channels=1, classes=3))
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    before, after = norms.norm_statistics(model, images)
    assert before.is_standard
    assert after.is_standard  # gain and bias are initialized to 1 and 0
    for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
        nn.init.constant_(norm.weight, 2.0)
        nn.init.constant_(norm.bias, -3.0)
    before, after = norms.norm_statistics(model, images)
    assert before.is_standard
    assert after.mean == pytest.approx(-3)
    assert after.variance == pytest.approx(4, rel=1e-2)


def test_gradient_norms_by_block():
    data = load_dataset(None, 32)
    shared = plain_settings(data, 1, width=8, depth=2, heads=2)
    result = norms.gradient_by_block(data, shared, {}, 3, seed=1)
    assert len(result) == 3
    assert all(one > 0 for one in result)
    assert result == norms.gradient_by_block(data, shared, {}, 3, seed=1)
    assert result != norms.gradient_by_block(data, shared, {"block": "post-norm"}, 3, seed=1)
    assert norms.gradient_ratio([[2.0, 1.0], [8.0, 1.0]]) == pytest.approx(4)


def test_verdict_for_every_outcome():
    better, unclear, worse = (Difference(x, (x - 0.1, x + 0.1), 3) for x in (0.5, 0.05, -0.5))
    all_better = dict.fromkeys([name for name in ARMS if name != "pre-norm"], better)
    places = {"post-norm": unclear, "res-post-norm": unclear}
    ratios = dict.fromkeys(ARMS, 1.0) | {"no residual": 1e-6, "neither": 1e-9}
    plain, learned = NormStatistics(0.0, 1.0), NormStatistics(0.3, 2.0)
    assert norms.decide_verdict(all_better | places, ratios, plain, plain) == Verdict("holds")
    preserved = norms.decide_verdict(all_better | places, ratios | {"no residual": 0.5}, plain, plain)
    assert "with norms they keep their size" in preserved.condition
    gain = norms.decide_verdict(all_better | places, ratios, plain, learned)
    assert gain.word == "partly"
    assert "before the learned gain and bias" in gain.condition
    assert "post-norm is worse" in norms.decide_verdict(all_better, ratios, plain, plain).condition
    better_post_norm = norms.decide_verdict(all_better | places | {"post-norm": worse}, ratios, plain, plain)
    assert "post-norm is better" in better_post_norm.condition
    unclear_norm = norms.decide_verdict(all_better | places | {"no norm": unclear}, ratios, plain, plain)
    assert "not clear with 3 seeds" in unclear_norm.condition
    for difference in (unclear, worse):
        wrong = norms.decide_verdict(all_better | {"no residual": difference}, ratios, plain, plain)
        assert wrong.word == "does not hold"
    assert norms.decide_verdict(all_better, ratios, learned, learned).word == "does not hold"
