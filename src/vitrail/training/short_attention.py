"""The gradient of attention over at most 256 tokens, as one Triton kernel.

The kernel holds all keys and values of a head and computes softmax again from q, k and v alone. It needs
nothing else of the forward pass, adds nothing up in memory, and writes the gradient where the product for q,
k and v expects it. PyTorch's flash attention needs three kernels and a copy for that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _WARPS, _STAGES = 32, 8, 2  # the fastest of eight for 197 tokens (H200, Triton 3.6)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    qkv, dout, dqkv, T, scale, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """One head: the gradients of q, M rows at a time, and of all of k and v. Weights are (keys, queries)."""
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = 3 * H * D
    source, target = qkv + image * T * row + head * D, dqkv + image * T * row + head * D
    columns, channels = tl.arange(0, N), tl.arange(0, D)
    keys = columns[:, None] * row + channels
    k = tl.load(source + H * D + keys, mask=columns[:, None] < T, other=0.0)
    v = tl.load(source + 2 * H * D + keys, mask=columns[:, None] < T, other=0.0)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    for start in range(0, T, M):
        rows = start + tl.arange(0, M)
        queries, inside = rows[:, None] * row + channels, rows[:, None] < T
        q = tl.load(source + queries, mask=inside, other=0.0)
        gradient = tl.load(
            dout + image * T * H * D + head * D + rows[:, None] * (H * D) + channels, mask=inside, other=0.0
        )
        scores = tl.dot(k, tl.trans(q)) * (scale * _LOG2_E)  # (N, M)
        scores = tl.where(columns[:, None] < T, scores, float("-inf"))
        weights = tl.exp2(scores - tl.max(scores, 0)[None, :])
        weights = weights / tl.sum(weights, 0)[None, :]
        dv += tl.dot(weights.to(v.dtype), gradient)
        dweights = tl.dot(v, tl.trans(gradient))  # (N, M)
        mean = tl.sum(weights * dweights, 0)
        dscores = (weights * (dweights - mean[None, :])).to(k.dtype)
        dk += tl.dot(dscores, q)
        dq = tl.dot(tl.trans(dscores), k)
        tl.store(target + queries, (dq * scale).to(dqkv.dtype.element_ty), mask=inside)
    tl.store(target + H * D + keys, (dk * scale).to(dqkv.dtype.element_ty), mask=columns[:, None] < T)
    tl.store(target + 2 * H * D + keys, dv.to(dqkv.dtype.element_ty), mask=columns[:, None] < T)


@torch.library.custom_op("vitrail::short_attention", mutates_args=())
def short_attention(qkv: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v in every head, by PyTorch's flash attention: (B, T, 3, k, d) to (B, T, k, d)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, k, T, d)
    heads = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    return heads.transpose(1, 2).contiguous()


@torch.library.custom_op("vitrail::short_attention_backward", mutates_args=())
def short_attention_backward(qkv: Tensor, dout: Tensor, scale: float) -> Tensor:
    """The gradient of `qkv`."""
    qkv, dout = qkv.contiguous(), dout.contiguous()
    B, T, _, H, D = qkv.shape
    dqkv, N = torch.empty_like(qkv), max(16, triton.next_power_of_2(T))
    M = min(_ROWS, N)
    _backward[(H, B)](qkv, dout, dqkv, T, scale, H, D, M, N, num_warps=_WARPS, num_stages=_STAGES)
    return dqkv


@short_attention.register_fake
def _(qkv: Tensor, scale: float) -> Tensor:
    B, T, _, H, D = qkv.shape
    return qkv.new_empty(B, T, H, D)


@short_attention_backward.register_fake
def _(qkv: Tensor, dout: Tensor, scale: float) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.scale = inputs
    ctx.save_for_backward(qkv)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
    (qkv,) = ctx.saved_tensors
    return short_attention_backward(qkv, dout, ctx.scale), None


short_attention.register_autograd(_gradient, setup_context=_save)
