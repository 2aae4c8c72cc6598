"""The fused kernels give what torch computes in float64, as near as rounding to bf16 allows. Needs a GPU."""

import copy

import pytest
import torch

from tests.support.training_kernels import (
    ATTENTION,
    LONG_ATTENTION,
    check_attention,
    check_gelu,
    check_layer_norm,
    check_long_gradients,
)
from vitrail.fast.variants import use_fused_kernels
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")


@pytest.mark.parametrize("case", ATTENTION + LONG_ATTENTION)
def test_attention_and_its_gradients(case):
    check_attention(case, "cuda", torch.bfloat16)


@pytest.mark.parametrize("case", LONG_ATTENTION)
def test_the_gradient_kernel_of_long_attention(case):
    check_long_gradients(case, "cuda", torch.bfloat16)


@pytest.mark.parametrize("shape", [(2, 50, 512), (3, 197, 3072), (1, 5, 100)])
def test_gelu_and_its_gradients(shape):
    check_gelu(shape, "cuda", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 50, 128), (5, 197, 768), (1, 3, 100)])
def test_layer_norm_and_its_gradients(shape, dtype):
    check_layer_norm(shape, "cuda", dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "special",
    [
        dict(position="rotary"),
        dict(qk_norm=True, layer_scale=0.1, class_token=False, pool="mean", position="sincos2d"),
        dict(size=60, qkv_bias="no-k"),
        dict(qkv_bias="none"),
    ],
    ids=str,
)
def test_a_model_with_fused_kernels_has_the_gradients_of_the_plain_one(special, compiled):
    """In bf16 both differ from fp32; the fused one by no more than the plain one, within a factor."""
    torch.manual_seed(0)
    settings = dict(width=64, depth=3, heads=2, patch=4, size=28, channels=1, classes=10)
    model = ViT(ViTConfig(**{**settings, **special})).cuda().train()
    images = torch.randn(8, 1, *model.config.pixels, device="cuda")
    weights = torch.randn(8, 10, device="cuda")

    def gradients(model, precision, run):
        with choose_device(precision).autocast():
            loss = (run(images).float() * weights).sum()
        loss.backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    fused = copy.deepcopy(model)
    use_fused_kernels(fused, compiled=compiled)
    exact = copy.deepcopy(model)
    exact = gradients(exact, "fp32", exact)
    plain = gradients(model, "bf16", model)
    found = gradients(fused, "bf16", torch.compile(fused) if compiled else fused)
    for name, expected in exact.items():
        error, usual = ((some[name] - expected).norm().item() for some in (found, plain))
        assert error <= 1.5 * usual + 2e-3 * expected.norm().item(), name
