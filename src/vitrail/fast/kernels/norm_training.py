"""LayerNorm from a residual stream in fp32 or bf16 to bf16, and its gradient in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # of a tile
_PROGRAMS = 528  # of the gradient: four for each multiprocessor of an H200


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    source, weight, bias, target, means, factors, rows, width, eps, R: tl.constexpr, C: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, C)
    place = row[:, None] * width + at[None, :]
    inside = (row[:, None] < rows) & (at[None, :] < width)
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / width
    x = tl.where(inside, x - mean[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    w = tl.load(weight + at, mask=at < width, other=0.0)
    b = tl.load(bias + at, mask=at < width, other=0.0)
    y = x * factor[:, None] * w[None, :] + b[None, :]
    tl.store(target + place, y.to(target.dtype.element_ty), mask=inside)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(factors + row, factor, mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    source, weight, means, factors, dout, dx, sums, rows, width, R: tl.constexpr, C: tl.constexpr
):
    """Every so many tiles of R rows; and the sums over them that weight and bias need."""
    at = tl.arange(0, C)
    w = tl.load(weight + at, mask=at < width, other=0.0)
    dw = tl.zeros((C,), dtype=tl.float32)
    db = tl.zeros((C,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (tile * R + tl.arange(0, R)).to(tl.int64)
        place = row[:, None] * width + at[None, :]
        inside = (row[:, None] < rows) & (at[None, :] < width)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        factor = tl.load(factors + row, mask=row < rows, other=0.0)
        x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, (x - mean[:, None]) * factor[:, None], 0.0)
        gradient = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        dw += tl.sum(gradient * x, 0)
        db += tl.sum(gradient, 0)
        gradient = gradient * w[None, :]
        middle = tl.sum(gradient, 1) / width
        along = tl.sum(gradient * x, 1) / width
        gradient = (gradient - middle[:, None] - x * along[:, None]) * factor[:, None]
        tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=inside)
    mine = sums + tl.program_id(0) * 2 * width
    tl.store(mine + at, dw, mask=at < width)
    tl.store(mine + width + at, db, mask=at < width)


def _tile(width: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(width)
    return max(1, _ELEMENTS // columns), columns


@torch.library.custom_op("vitrail::layer_norm", mutates_args=())
def layer_norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LN of (..., D) in bf16; the mean of each row, and the factor it is multiplied by."""
    z = z.contiguous()
    D = z.shape[-1]
    rows = z.numel() // D
    out = torch.empty_like(z, dtype=torch.bfloat16)
    means, factors = (z.new_empty(rows, dtype=torch.float32) for _ in range(2))
    R, C = _tile(D)
    with torch.cuda.device_of(z):
        _forward[(triton.cdiv(rows, R),)](
            z, weight, bias, out, means, factors, rows, D, eps, R, C, num_warps=4
        )
    return out, means, factors


@torch.library.custom_op("vitrail::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    z: Tensor, weight: Tensor, means: Tensor, factors: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of z, and parts (n, 2, D) of the sums for weight and bias."""
    z, dout = z.contiguous(), dout.contiguous()
    D = z.shape[-1]
    rows = z.numel() // D
    R, C = _tile(D)
    programs = min(_PROGRAMS, triton.cdiv(rows, R))
    dx, sums = torch.empty_like(z), z.new_empty(programs, 2, D, dtype=torch.float32)
    with torch.cuda.device_of(z):
        _backward[(programs,)](z, weight, means, factors, dout, dx, sums, rows, D, R, C, num_warps=4)
    return dx, sums


@layer_norm.register_fake
def _(z: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(z, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    rows = z.numel() // z.shape[-1]
    return out, z.new_empty(rows, dtype=torch.float32), z.new_empty(rows, dtype=torch.float32)


@layer_norm_backward.register_fake
def _(z: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(z, memory_format=torch.contiguous_format)
    programs = min(_PROGRAMS, triton.cdiv(z.numel() // z.shape[-1], _tile(z.shape[-1])[0]))
    return dx, z.new_empty(programs, 2, z.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    z, weight, _, _ = inputs
    ctx.save_for_backward(z, weight, *output[1:])


def _gradient(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, sums = layer_norm_backward(*ctx.saved_tensors, dout)
    dw, db = sums.sum(0)
    return dx, dw, db, None


layer_norm.register_autograd(_gradient, setup_context=_save)
