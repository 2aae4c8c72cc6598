"""The fused forward pass gives the model's own outputs, for every kind of block it takes on."""

import pytest
import torch
from torch import nn

import vitrail as vt
from tests.contract.test_options import CASES, config_of, difference
from tests.support.models import add_noise
from tests.support.plain_kernels import use_plain_kernels
from vitrail.fast.choices import Choices
from vitrail.fast.fused import FusedForward

CONFIGS = [
    {},
    {"layer_scale": 0.5},
    {"norm": "rms"},
    {"qk_norm": True},
    {"position": "rotary"},
    {"position": "relative"},
    {"qkv_bias": "no-k"},
    {"mlp": "gated"},
    {"activation": "silu"},
    {"pool": "mean"},
    {"registers": 2},
    {"classes": 0},
]


def build(**fields):
    torch.manual_seed(0)
    model = vt.create("mu/4", **fields).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model, torch.randn(3, *model.config.input_shape)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    use_plain_kernels(monkeypatch)


def fuse(model, chained=False, **how):
    choices = Choices(torch.device("cpu"), remember=False)
    return FusedForward(model, choices, dtype=torch.float32, chained=chained, **how)


@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_outputs_are_the_models(fields):
    model, images = build(**fields)
    fused = fuse(model)
    assert fused.left is None
    with torch.no_grad():
        pooled, logits = fused(images)
        torch.testing.assert_close(pooled, model.encode(images).pooled, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(logits, model(images), atol=1e-6, rtol=1e-5)


CHAINED = [
    {},
    {"layer_scale": 0.5},
    {"norm": "rms"},
    {"qkv_bias": "none"},
    {"pool": "mean"},
    {"registers": 2},
]
CHAINED += [
    {"classes": 0},
    {"head": "distilled", "distillation_token": True},
    {"pool": "mean", "pool_norm": "after"},
    {"norm_pre": True},
]


@pytest.mark.parametrize("fields", CHAINED, ids=str)
@pytest.mark.parametrize("count", [1, 5])
def test_the_chain_for_small_batches_gives_the_models_outputs(fields, count):
    model, images = build(width=64, heads=4, mlp_width=128, **fields)
    fused = fuse(model, chained=True)
    assert fused.chain is not None
    images = images[:1].repeat(count, 1, 1, 1) * torch.linspace(0.5, 1.5, count)[:, None, None, None]
    with torch.no_grad():
        pooled, logits = fused(images)
        torch.testing.assert_close(pooled, model.encode(images).pooled, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(logits, model(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"position": "rotary"},
        {"qk_norm": True},
        {"position": "relative"},
        {"mlp": "gated"},
        {"width": 48},
        {"heads": 8},
    ],
    ids=str,
)
def test_other_models_are_not_chained(fields):
    model, images = build(**{"width": 64, "heads": 4, "mlp_width": 128, **fields})
    fused = fuse(model, chained=True)
    assert fused.chain is None
    with torch.no_grad():
        torch.testing.assert_close(fused(images)[1], model(images), atol=1e-5, rtol=1e-4)


def test_fp8_is_not_chained():
    model, _ = build(width=64, heads=4, mlp_width=128)
    assert fuse(model, ranges={"blocks.0.mlp.fc2": 8.0}, chained=True).chain is None


def test_a_second_image_does_not_see_the_first():
    """What all images share is computed once, and must not be added to."""
    model, images = build()
    fused = fuse(model)
    with torch.no_grad():
        fused(images[:1])
        torch.testing.assert_close(fused(images[1:2])[1], model(images[1:2]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fields", [{"block": "post-norm"}, {"block": "parallel"}, {"norm": "none"}], ids=str)
def test_other_blocks_are_left_plain_and_named(fields):
    model, images = build(**fields)
    fused = fuse(model)
    assert str(next(iter(fields.values()))) in fused.left
    with torch.no_grad():
        torch.testing.assert_close(fused(images)[1], model(images))


def test_every_option_of_a_config_is_computed():
    """Over the cases that together contain every pair of options."""
    fused_count = 0
    for case in CASES:
        config = config_of(case)
        model = add_noise(vt.ViT(config)).eval()
        fused, images = fuse(model), torch.randn(2, 3, *config.pixels)
        fused_count += fused.left is None
        with torch.no_grad():
            exact, found = model(images), fused(images)[1]
        assert difference(found, exact) < (1e-3 if config.norm == "none" else 1e-4), case
    assert fused_count > 5


def test_fp8_is_near_and_kept_layers_are_not_rounded():
    model, images = build()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ranges = dict.fromkeys(layers, 8.0)
    with torch.no_grad():
        exact, rounded = model(images), fuse(model, ranges=ranges)(images)[1].float()
        kept = fuse(model, ranges=ranges, keep=layers)(images)[1]
    assert torch.cosine_similarity(rounded.flatten(), exact.flatten(), dim=0) > 0.999
    assert not torch.allclose(rounded, exact, atol=1e-6)
    torch.testing.assert_close(kept, exact, atol=1e-6, rtol=1e-5)
