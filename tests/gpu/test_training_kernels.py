"""The fused kernels give what torch computes in float64, as near as rounding to bf16 allows. Needs a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F

from vitrail.config import ViTConfig
from vitrail.fast.device import choose_device
from vitrail.model import ViT
from vitrail.training.lean import use_fused_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")

ROUNDING = 4e-3  # of bf16, relative to the norm of the result


def near(found, exact, rounding=ROUNDING):
    assert found.shape == exact.shape
    assert (found.double() - exact).norm() < rounding * exact.norm()


def attend(qkv, norms, cos, sin, eps=1e-6):
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    d = q.shape[-1]
    if norms.numel():
        q = F.layer_norm(q, (d,), norms[0], norms[1], eps)
        k = F.layer_norm(k, (d,), norms[2], norms[3], eps)
    if cos.numel():
        q, k = (
            x * torch.cat([cos, cos], -1)
            + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * torch.cat([sin, sin], -1)
            for x in (q, k)
        )
    weights = (q @ k.transpose(-2, -1) * d**-0.5).softmax(-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "norm", "rotary"),
    [
        (197, 12, 64, False, False),
        (256, 2, 64, False, False),
        (150, 3, 32, False, False),
        (50, 4, 32, False, False),
        (50, 4, 32, False, True),
        (64, 6, 64, True, False),
        (128, 2, 64, True, True),
        (17, 3, 32, True, True),
    ],
)
def test_attention_and_its_gradients(tokens, heads, width, norm, rotary):
    from vitrail.training.kernels.attention import short_attention

    torch.manual_seed(0)
    with torch.device("cuda"):
        qkv = (1.5 * torch.randn(3, tokens, 3, heads, width)).bfloat16().requires_grad_()
        bias = torch.randn(3 * heads * width, requires_grad=True)
        norms = torch.randn(4, width, requires_grad=True) if norm else torch.empty(0)
        angles = 3 * torch.rand(tokens, width // 2) if rotary else torch.empty(0)
        upstream = torch.randn(3, tokens, heads, width).bfloat16()
    tables = (angles.cos(), angles.sin()) if rotary else (angles, angles)
    out, _ = short_attention(qkv, bias, norms, *tables, width**-0.5, 1e-6)
    inputs = [qkv, norms] if norm else [qkv]
    gradient, dbias, *dnorms = torch.autograd.grad(out, [qkv, bias, *inputs[1:]], upstream)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    exact = attend(wide[0], wide[1] if norm else norms, *(table.double() for table in tables))
    exact_gradient, *exact_norms = torch.autograd.grad(exact, wide, upstream.double())
    transformed = 1.5 * ROUNDING if norm or rotary else ROUNDING  # q and k are rounded once more
    near(out, exact, transformed)
    near(gradient, exact_gradient, transformed)
    near(dbias, exact_gradient.sum((0, 1)).flatten(), 2e-2)  # sums of numbers of both signs
    for found, expected in zip(dnorms, exact_norms, strict=True):
        near(found, expected, 1e-2)


@pytest.mark.parametrize("shape", [(2, 50, 512), (3, 197, 3072), (1, 5, 100)])
def test_gelu_and_its_gradients(shape):
    from vitrail.training.kernels.gelu import gelu

    torch.manual_seed(0)
    x = (3 * torch.randn(shape, device="cuda")).bfloat16().requires_grad_()
    bias = torch.zeros(shape[-1], device="cuda", requires_grad=True)
    upstream = torch.randn(shape, device="cuda").bfloat16()
    out = gelu(x, bias)
    gradient, dbias = torch.autograd.grad(out, [x, bias], upstream)
    wide = x.detach().double().requires_grad_()
    exact = F.gelu(wide)
    (exact_gradient,) = torch.autograd.grad(exact, wide, upstream.double())
    near(out, exact)
    near(gradient, exact_gradient)
    near(dbias, exact_gradient.sum((0, 1)), 1e-5)  # added up before rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 50, 128), (5, 197, 768), (1, 3, 100)])
def test_layer_norm_and_its_gradients(shape, dtype):
    from vitrail.training.kernels.norm import layer_norm

    torch.manual_seed(0)
    with torch.device("cuda"):
        z = (2 * torch.randn(shape) + 1).to(dtype).requires_grad_()
        weight, bias = (torch.randn(shape[-1], requires_grad=True) for _ in range(2))
        upstream = torch.randn(shape).bfloat16()
    out = layer_norm(z, weight, bias, 1e-6)[0]
    found = torch.autograd.grad(out, [z, weight, bias], upstream)
    wide = [one.detach().double().requires_grad_() for one in (z, weight, bias)]
    exact = F.layer_norm(wide[0], shape[-1:], *wide[1:], 1e-6)
    near(out, exact)
    for one, expected in zip(found, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        near(one, expected, ROUNDING if one is found[0] else 1e-5)


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
