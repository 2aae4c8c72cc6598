"""Checks of the kernels of training against torch's autograd in float64: in bf16 on a GPU, in fp32 in the interpreter."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

ROUNDING = {torch.bfloat16: 4e-3, torch.float32: 1e-5}  # relative to the norm of the result


class Attention(NamedTuple):
    tokens: int
    heads: int
    width: int
    norm: bool = False
    rotary: bool = False


ATTENTION = [
    Attention(50, 4, 32),
    Attention(50, 4, 32, rotary=True),
    Attention(64, 6, 64, norm=True),
    Attention(128, 2, 64, norm=True, rotary=True),
    Attention(17, 3, 32, norm=True, rotary=True),
]
LONG_ATTENTION = [Attention(197, 12, 64), Attention(256, 2, 64), Attention(150, 3, 32)]


def near(found, exact, rounding):
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


def check_attention(case, device, dtype):
    """The heads, and the gradients of q, k and v, of the bias before them and of the norms."""
    from vitrail.fast.kernels.attention_kernel import short_attention

    tokens, heads, width, norm, rotary = case
    torch.manual_seed(0)
    with torch.device(device):
        qkv = (1.5 * torch.randn(3, tokens, 3, heads, width)).to(dtype).requires_grad_()
        bias = torch.randn(3 * heads * width, requires_grad=True)
        norms = torch.randn(4, width, requires_grad=True) if norm else torch.empty(0)
        angles = 3 * torch.rand(tokens, width // 2) if rotary else torch.empty(0)
        upstream = torch.randn(3, tokens, heads, width).to(dtype)
    tables = (angles.cos(), angles.sin()) if rotary else (angles, angles)
    out, _ = short_attention(qkv, bias, norms, *tables, width**-0.5, 1e-6)
    inputs = [qkv, norms] if norm else [qkv]
    gradient, dbias, *dnorms = torch.autograd.grad(out, [qkv, bias, *inputs[1:]], upstream)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    exact = attend(wide[0], wide[1] if norm else norms, *(table.double() for table in tables))
    exact_gradient, *exact_norms = torch.autograd.grad(exact, wide, upstream.double())
    rounding = ROUNDING[dtype]
    transformed = 1.5 * rounding if norm or rotary else rounding  # q and k are rounded once more
    near(out, exact, transformed)
    near(gradient, exact_gradient, transformed)
    near(dbias, exact_gradient.sum((0, 1)).flatten(), 5 * rounding)  # sums of numbers of both signs
    for found, expected in zip(dnorms, exact_norms, strict=True):
        near(found, expected, 2.5 * rounding)


def check_long_gradients(case, device, dtype):
    """The kernel that follows PyTorch's flash attention, from the exact heads and logarithms of sums."""
    from vitrail.fast.kernels.attention_kernel import short_attention_backward

    tokens, heads, width, _, _ = case
    torch.manual_seed(0)
    with torch.device(device):
        qkv = (1.5 * torch.randn(2, tokens, 3, heads, width)).to(dtype)
        upstream, empty = torch.randn(2, tokens, heads, width).to(dtype), torch.empty(0)
    wide = qkv.double().requires_grad_()
    exact = attend(wide, empty, empty, empty)
    (exact_gradient,) = torch.autograd.grad(exact, wide, upstream.double())
    q, k, _ = qkv.double().permute(2, 0, 3, 1, 4).unbind(0)
    lse = (q @ k.transpose(-2, -1) * width**-0.5).logsumexp(-1).float()
    given = (qkv, exact.detach().to(dtype).contiguous(), lse, upstream, empty, empty, empty)
    gradient, dbias, _ = short_attention_backward(*given, width**-0.5, 1e-6)
    near(gradient, exact_gradient, ROUNDING[dtype])
    near(dbias, exact_gradient.sum(1).flatten(1), 5 * ROUNDING[dtype])


def check_gelu(shape, device, dtype):
    from vitrail.fast.kernels.gelu_training import gelu

    torch.manual_seed(0)
    with torch.device(device):
        x = (3 * torch.randn(shape)).to(dtype).requires_grad_()
        bias = torch.zeros(shape[-1], requires_grad=True)
        upstream = torch.randn(shape).to(dtype)
    out = gelu(x, bias)
    gradient, dbias = torch.autograd.grad(out, [x, bias], upstream)
    wide = x.detach().double().requires_grad_()
    exact = F.gelu(wide)
    (exact_gradient,) = torch.autograd.grad(exact, wide, upstream.double())
    near(out, exact, ROUNDING[dtype])
    near(gradient, exact_gradient, ROUNDING[dtype])
    near(dbias, exact_gradient.sum((0, 1)), 1e-5)  # added up before rounding


def check_layer_norm(shape, device, dtype):
    """Of a residual stream of this dtype; what it returns is in bf16."""
    from vitrail.fast.kernels.norm_training import layer_norm

    torch.manual_seed(0)
    with torch.device(device):
        z = (2 * torch.randn(shape) + 1).to(dtype).requires_grad_()
        weight, bias = (torch.randn(shape[-1], requires_grad=True) for _ in range(2))
        upstream = torch.randn(shape).bfloat16()
    out = layer_norm(z, weight, bias, 1e-6)[0]
    found = torch.autograd.grad(out, [z, weight, bias], upstream)
    wide = [one.detach().double().requires_grad_() for one in (z, weight, bias)]
    exact = F.layer_norm(wide[0], shape[-1:], *wide[1:], 1e-6)
    near(out, exact, ROUNDING[torch.bfloat16])
    for one, expected in zip(found, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        near(one, expected, ROUNDING[dtype] if one is found[0] else 1e-5)
