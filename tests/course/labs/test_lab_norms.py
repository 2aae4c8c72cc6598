"""Lab `norms`: gradients by block, statistics of LayerNorm, and the verdict for every outcome."""

import math

import pytest
import torch
from torch import nn

from vitrail.experiment.trial import one_thread
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail_course.labs import norms
from vitrail_course.labs.datasets import load_dataset, plain_settings
from vitrail_course.labs.norms import ARMS


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("norms")
    with one_thread():
        return out, norms.run(out, "small")


def test_small_run_has_all_arms_and_leaves_no_files(small):
    out, result = small
    assert list(out.iterdir()) == []
    assert math.isfinite(result.number)
    assert result.n == 1, "the first of two seeds chooses the learning rate"
    gradients = result.numbers["gradient by seed, first and last block"]
    assert set(result.numbers["accuracy"]) == set(ARMS) == set(gradients)
    assert "nan" not in result.setting
    assert len(result.figure.axes) == 2


def test_gradients_vanish_without_norm_and_residual_and_grow_without_norm(small):
    gradients = small[1].numbers["gradient by seed, first and last block"]
    ratios = {
        name: math.prod(first / last for first, last in runs) ** (1 / len(runs))
        for name, runs in gradients.items()
    }
    assert ratios["neither"] < 0.1 < ratios["pre-norm"] < 10
    assert gradients["no norm"][0][0] > 100 * gradients["pre-norm"][0][0]


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
