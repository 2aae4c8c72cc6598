"""Attention over at most 256 tokens: a kernel holds a whole head and computes softmax again for the gradient.

Up to 128 tokens, one kernel goes from the product for q, k and v to the heads, norms of q and k and rotary
position embedding included, and another one back. Above that, PyTorch's flash attention goes forward, and the
gradient is one kernel where flash attention needs three and a copy.

All gradients are written where the product for q, k and v expects them. The gradient of its bias is their
sum over tokens, which the kernel adds up while it has them: so the bias is an argument here although the
product has added it already.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS, MAX_FUSED = 256, 128
_ROWS, _WARPS, _STAGES = 32, 8, 3  # above 128 tokens: the fastest of eight for 197 tokens (H200, Triton 3.6)
_LOG2_E = tl.constexpr(1.4426950408889634)


# ---- parts of the kernels -------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _load(source, rows, T, stride, count: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows, count) values; zeros from row T on."""
    columns = tl.arange(0, count)
    return tl.load(source + rows[:, None] * stride + columns[None, :], mask=rows[:, None] < T, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store(target, values, rows, T, stride, count: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, count)
    tl.store(
        target + rows[:, None] * stride + columns[None, :],
        values.to(target.dtype.element_ty),
        mask=rows[:, None] < T,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _normalize(x1, x2, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows in two halves, with mean 0 and variance 1 over both; and the factor of each row."""
    mean = (tl.sum(x1, 1) + tl.sum(x2, 1)) / D
    x1 = x1 - mean[:, None]
    x2 = x2 - mean[:, None]
    factor = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)
    return x1 * factor[:, None], x2 * factor[:, None], factor


@triton.jit  # type: ignore[untyped-decorator]
def _transform(  # type: ignore[no-untyped-def]
    source, rows, T, stride, norm, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr
):
    """q or k of a head as two halves (their channels form the pairs of a rotation), in fp32."""
    half = tl.arange(0, D // 2)
    x1 = _load(source, rows, T, stride, D // 2).to(tl.float32)
    x2 = _load(source + D // 2, rows, T, stride, D // 2).to(tl.float32)
    if NORM:
        x1, x2, _ = _normalize(x1, x2, eps, D)
        x1 = x1 * tl.load(norm + half)[None, :] + tl.load(norm + D + half)[None, :]
        x2 = x2 * tl.load(norm + D // 2 + half)[None, :] + tl.load(norm + D + D // 2 + half)[None, :]
    if ROTARY:
        c = _load(cos, rows, T, D // 2, D // 2)
        s = _load(sin, rows, T, D // 2, D // 2)
        y1 = x1 * c - x2 * s
        x2 = x2 * c + x1 * s
        x1 = y1
    return x1, x2


@triton.jit  # type: ignore[untyped-decorator]
def _transform_back(  # type: ignore[no-untyped-def]
    source, g1, g2, rows, T, stride, norm, dnorm, cos, sin, eps,
    D: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The gradient of q or k before `_transform`; that of the norm's parameters goes to `dnorm`."""
    half = tl.arange(0, D // 2)
    if ROTARY:
        c = _load(cos, rows, T, D // 2, D // 2)
        s = _load(sin, rows, T, D // 2, D // 2)
        turned = g1 * c + g2 * s
        g2 = g2 * c - g1 * s
        g1 = turned
    if NORM:
        x1 = _load(source, rows, T, stride, D // 2).to(tl.float32)
        x2 = _load(source + D // 2, rows, T, stride, D // 2).to(tl.float32)
        x1, x2, factor = _normalize(x1, x2, eps, D)
        tl.store(dnorm + half, tl.sum(g1 * x1, 0))
        tl.store(dnorm + D // 2 + half, tl.sum(g2 * x2, 0))
        tl.store(dnorm + D + half, tl.sum(g1, 0))
        tl.store(dnorm + D + D // 2 + half, tl.sum(g2, 0))
        g1 = g1 * tl.load(norm + half)[None, :]
        g2 = g2 * tl.load(norm + D // 2 + half)[None, :]
        mean = (tl.sum(g1, 1) + tl.sum(g2, 1)) / D
        along = (tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / D
        g1 = (g1 - mean[:, None] - x1 * along[:, None]) * factor[:, None]
        g2 = (g2 - mean[:, None] - x2 * along[:, None]) * factor[:, None]
    return g1, g2


@triton.jit
def _softmax(q1, q2, k1, k2, rows, T, scale):  # type: ignore[no-untyped-def]
    """The attention weights (queries, keys) of a head."""
    scores = tl.dot(q1, tl.trans(k1))
    scores = tl.dot(q2, tl.trans(k2), scores) * (scale * _LOG2_E)
    scores = tl.where(rows[None, :] < T, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


# ---- up to 128 tokens -----------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    qkv, out, norms, cos, sin, T, scale, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """One head of one image."""
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, stride = tl.arange(0, N), 3 * H * D
    source = qkv + image * T * stride + head * D
    q1, q2 = _transform(source, rows, T, stride, norms, cos, sin, eps, D, NORM, ROTARY)
    k1, k2 = _transform(source + H * D, rows, T, stride, norms + 2 * D, cos, sin, eps, D, NORM, ROTARY)
    v = _load(source + 2 * H * D, rows, T, stride, D)
    kind = v.dtype
    weights = _softmax(q1.to(kind), q2.to(kind), k1.to(kind), k2.to(kind), rows, T, scale)
    _store(out + image * T * H * D + head * D, tl.dot(weights.to(kind), v), rows, T, H * D, D)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    qkv, dout, dqkv, dbias, norms, dnorms, cos, sin, T, scale, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """One head of one image: gradients of q, k and v, and this head's part of those of bias and norms."""
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, stride = tl.arange(0, N), 3 * H * D
    source, target = qkv + image * T * stride + head * D, dqkv + image * T * stride + head * D
    q1, q2 = _transform(source, rows, T, stride, norms, cos, sin, eps, D, NORM, ROTARY)
    k1, k2 = _transform(source + H * D, rows, T, stride, norms + 2 * D, cos, sin, eps, D, NORM, ROTARY)
    v = _load(source + 2 * H * D, rows, T, stride, D)
    gradient = _load(dout + image * T * H * D + head * D, rows, T, H * D, D)
    kind = v.dtype
    q1, q2, k1, k2 = q1.to(kind), q2.to(kind), k1.to(kind), k2.to(kind)
    weights = _softmax(q1, q2, k1, k2, rows, T, scale)
    dv = tl.dot(tl.trans(weights.to(kind)), gradient)
    _store(target + 2 * H * D, dv, rows, T, stride, D)
    columns, half = tl.arange(0, D), tl.arange(0, D // 2)
    sums = dbias + image * stride + head * D
    tl.store(sums + 2 * H * D + columns, tl.sum(dv, 0))
    dweights = tl.dot(gradient, tl.trans(v))
    mean = tl.sum(weights * dweights, 1)
    dscores = (weights * (dweights - mean[:, None])).to(kind)
    back = tl.trans(dscores)
    mine = dnorms + (image * H + head) * 4 * D
    g1, g2 = _transform_back(
        source, tl.dot(dscores, k1) * scale, tl.dot(dscores, k2) * scale,
        rows, T, stride, norms, mine, cos, sin, eps, D, NORM, ROTARY,
    )  # fmt: skip
    _store(target, g1, rows, T, stride, D // 2)
    _store(target + D // 2, g2, rows, T, stride, D // 2)
    tl.store(sums + half, tl.sum(g1, 0))
    tl.store(sums + D // 2 + half, tl.sum(g2, 0))
    g1, g2 = _transform_back(
        source + H * D, tl.dot(back, q1) * scale, tl.dot(back, q2) * scale,
        rows, T, stride, norms + 2 * D, mine + 2 * D, cos, sin, eps, D, NORM, ROTARY,
    )  # fmt: skip
    _store(target + H * D, g1, rows, T, stride, D // 2)
    _store(target + H * D + D // 2, g2, rows, T, stride, D // 2)
    tl.store(sums + H * D + half, tl.sum(g1, 0))
    tl.store(sums + H * D + D // 2 + half, tl.sum(g2, 0))


# ---- more tokens ----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _backward_long(  # type: ignore[no-untyped-def]
    qkv, out, lse, dout, dqkv, dbias, T, scale,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One head: the gradients of q, M rows at a time, and of all of k and v. Weights are (keys, queries)."""
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    stride = 3 * H * D
    source, target = qkv + image * T * stride + head * D, dqkv + image * T * stride + head * D
    heads = image * T * H * D + head * D
    columns, channels = tl.arange(0, N), tl.arange(0, D)
    k = _load(source + H * D, columns, T, stride, D)
    v = _load(source + 2 * H * D, columns, T, stride, D)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    dq_sum = tl.zeros((D,), dtype=tl.float32)
    for start in range(0, T, M):
        rows = start + tl.arange(0, M)
        q = _load(source, rows, T, stride, D)
        gradient = _load(dout + heads, rows, T, H * D, D)
        value = _load(out + heads, rows, T, H * D, D)
        mean = tl.sum(value.to(tl.float32) * gradient.to(tl.float32), 1)
        total = tl.load(lse + (image * H + head) * T + rows, mask=rows < T, other=0.0) * _LOG2_E
        scores = tl.dot(k, tl.trans(q)) * (scale * _LOG2_E)  # (N, M)
        weights = tl.where(columns[:, None] < T, tl.exp2(scores - total[None, :]), 0.0)
        dv += tl.dot(weights.to(v.dtype), gradient)
        dweights = tl.dot(v, tl.trans(gradient))  # (N, M)
        dscores = (weights * (dweights - mean[None, :])).to(k.dtype)
        dk += tl.dot(dscores, q)
        dq = tl.dot(tl.trans(dscores), k) * scale
        dq_sum += tl.sum(dq, 0)
        _store(target, dq, rows, T, stride, D)
    dk = dk * scale
    _store(target + H * D, dk, columns, T, stride, D)
    _store(target + 2 * H * D, dv, columns, T, stride, D)
    sums = dbias + image * stride + head * D + channels
    tl.store(sums, dq_sum)
    tl.store(sums + H * D, tl.sum(dk, 0))
    tl.store(sums + 2 * H * D, tl.sum(dv, 0))


# ---- operators ------------------------------------------------------------------------------


def _side(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def _warps(tokens: int) -> int:
    """The fastest of 2, 4 and 8 for 50 and 64 tokens; more of them hold more weights in registers."""
    return 4 if tokens <= 64 else 8


@torch.library.custom_op("vitrail::short_attention", mutates_args=())
def short_attention(
    qkv: Tensor, bias: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v in every head: (B, T, k, d), and what the gradient needs.

    Args:
        qkv: (B, T, 3, k, d), bias included.
        bias: (3 k d,), for its gradient; empty if there is none.
        norms: (4, d), weight and bias of the norms of q and of k; empty if there are none.
        cos, sin: (T, d / 2), of the rotary position embedding; empty if there is none.
    """
    qkv = qkv.contiguous()
    B, T, _, H, D = qkv.shape
    if T <= MAX_FUSED:
        out = qkv.new_empty(B, T, H, D)
        kinds = bool(norms.numel()), bool(cos.numel())
        with torch.cuda.device_of(qkv):
            _forward[(H, B)](
                qkv, out, norms, cos, sin, T, scale, eps, H, D, _side(T), *kinds, num_warps=_warps(T)
            )
        return out, qkv.new_empty(0, dtype=torch.float32)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, k, T, d)
    heads, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    return heads.transpose(1, 2).contiguous(), lse[..., :T].contiguous()


@torch.library.custom_op("vitrail::short_attention_backward", mutates_args=())
def short_attention_backward(
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    norms: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, of the bias for each image (B, 3 k d), and of the norms for each head."""
    qkv, dout = qkv.contiguous(), dout.contiguous()
    B, T, _, H, D = qkv.shape
    dqkv, dbias, dnorms = _new_gradients(qkv, norms)
    with torch.cuda.device_of(qkv):
        if T <= MAX_FUSED:
            kinds = bool(norms.numel()), bool(cos.numel())
            _backward[(H, B)](
                *(qkv, dout, dqkv, dbias, norms, dnorms, cos, sin, T, scale, eps, H, D, _side(T), *kinds),
                num_warps=_warps(T),
            )
        else:
            _backward_long[(H, B)](
                *(qkv, out, lse, dout, dqkv, dbias, T, scale, H, D, _ROWS, _side(T)),
                num_warps=_WARPS,
                num_stages=_STAGES,
            )
    return dqkv, dbias, dnorms


def _new_gradients(qkv: Tensor, norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, _, _, H, D = qkv.shape
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    dbias = qkv.new_empty(B, 3 * H * D, dtype=torch.float32)
    return dqkv, dbias, norms.new_empty(B * H if norms.numel() else 0, 4, D)


@short_attention.register_fake
def _(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, T, _, H, D = qkv.shape
    lse = (0,) if T <= MAX_FUSED else (B, H, T)
    return qkv.new_empty(B, T, H, D), qkv.new_empty(lse, dtype=torch.float32)


@short_attention_backward.register_fake
def _(qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, norms: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _new_gradients(qkv, norms)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, norms, cos, sin, ctx.scale, ctx.eps = inputs
    ctx.has_bias, ctx.has_norms = bool(bias.numel()), bool(norms.numel())
    ctx.save_for_backward(qkv, *output, norms, cos, sin)


def _gradient(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    qkv, out, lse, *tables = ctx.saved_tensors
    dqkv, dbias, dnorms = short_attention_backward(qkv, out, lse, dout, *tables, ctx.scale, ctx.eps)
    sums = (one.sum(0) if used else None for one, used in ((dbias, ctx.has_bias), (dnorms, ctx.has_norms)))
    return dqkv, *sums, *[None] * 4


short_attention.register_autograd(_gradient, setup_context=_save)
