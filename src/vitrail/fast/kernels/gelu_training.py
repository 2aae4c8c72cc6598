"""GELU and its gradient in one pass each; the second adds up the gradient of the bias before it.

The normal distribution takes one exponential (`vitrail.fast.kernels.gelu`), since erf takes a GPU longer than
reading and writing the values. Phi(x) is then at most 4e-7 off, far below the rounding of bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.kernels.gelu import normal

_ROWS, _COLUMNS, _WARPS = 32, 128, 8  # of a tile


@triton.jit  # type: ignore[untyped-decorator]
def _forward(source, target, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(source + at, mask=at < count, other=0.0).to(tl.float32)
    phi, _ = normal(x)
    tl.store(target + at, (x * phi).to(target.dtype.element_ty), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    source, dout, dx, sums, rows, columns, R: tl.constexpr, C: tl.constexpr
):
    """A tile of R rows and C columns, and the sum of each column. (A loop over tiles takes longer.)"""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = tl.program_id(1) * C + tl.arange(0, C)
    place = row[:, None] * columns + at[None, :]
    inside = (row[:, None] < rows) & (at[None, :] < columns)
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    phi, density = normal(x)
    gradient = gradient * (phi + x * density)
    tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * columns + at, tl.sum(gradient, 0), mask=at < columns)


@torch.library.custom_op("vitrail::gelu", mutates_args=())
def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """x Phi(x) of (..., F).

    Args:
        bias: (F,), which x includes; it gets its gradient here.
    """
    x = x.contiguous()
    out, size = torch.empty_like(x), _ROWS * _COLUMNS
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(x.numel(), size),)](x, out, x.numel(), size, num_warps=_WARPS)
    return out


@torch.library.custom_op("vitrail::gelu_backward", mutates_args=())
def gelu_backward(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and sums of it over parts of the rows (parts, F)."""
    x, dout = x.contiguous(), dout.contiguous()
    F = x.shape[-1]
    dx, parts = torch.empty_like(x), _parts(x)
    sums = x.new_empty(parts, F, dtype=torch.float32)
    grid = parts, triton.cdiv(F, _COLUMNS)
    with torch.cuda.device_of(x):
        _backward[grid](x, dout, dx, sums, x.numel() // F, F, _ROWS, _COLUMNS, num_warps=_WARPS)
    return dx, sums


def _parts(x: Tensor) -> int:
    return (x.numel() // x.shape[-1] + _ROWS - 1) // _ROWS


@gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gelu_backward.register_fake
def _(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(_parts(x), x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    dx, sums = gelu_backward(ctx.saved_tensors[0], dout)
    return dx, sums.sum(0)


gelu.register_autograd(_gradient, setup_context=_save)
