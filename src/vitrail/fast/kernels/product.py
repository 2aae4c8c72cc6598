"""x W^T in bf16 or fp8, with what follows it fused in: scales, bias, GELU, residual, quantization to fp8.

A persistent kernel: each multiprocessor computes tiles one after the other, and loads of the next tile start
while the last one is written. Tiles are read and written by the tensor memory accelerator (compute capability
9.0 and later).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.fast.kernels.gelu import gelu
from vitrail.fast.products import Product, processors


@dataclass(frozen=True)
class Tiles:
    """How a product is cut; which is the fastest depends on its shape, and is measured."""

    rows: int
    columns: int
    depth_bytes: int
    """Bytes of a row of a tile of x, and of W."""
    warps: int
    stages: int
    parts: int
    """In how many parts the columns of a tile are finished: fewer registers and less shared memory each."""

    @property
    def name(self) -> str:
        shape = f"{self.rows}x{self.columns}x{self.depth_bytes}"
        return f"Triton {shape}, {self.warps} warps, {self.stages} stages, {self.parts} parts"


LARGE_TILES = (
    Tiles(128, 256, 128, 8, 3, 2),
    Tiles(128, 256, 128, 8, 4, 4),
    Tiles(128, 128, 128, 4, 3, 2),
    Tiles(256, 128, 128, 8, 3, 2),
)
SMALL_TILES = (
    Tiles(64, 32, 128, 4, 4, 1),
    Tiles(64, 64, 128, 4, 4, 1),
    Tiles(64, 128, 128, 4, 4, 1),
    Tiles(128, 64, 128, 4, 4, 1),
    Tiles(128, 128, 128, 4, 3, 2),
)
"""For batches of a few images, whose large tiles would not fill the GPU."""


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    y, target, scales, bias, factor, row, column,
    WIDTH: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, ADD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Finish a part of a tile and write it. (Columns of W beyond the last one do not exist.)"""
    at = column + tl.arange(0, WIDTH)
    if SCALED:
        y = y * tl.load(scales + at)[None, :]
    if BIAS:
        y = y + tl.load(bias + at)[None, :]
    if GELU:
        y = gelu(y)
    if ADD:
        y = y + target.load([row, column]).to(tl.float32)
    if FP8:
        y = tl.minimum(tl.maximum(y * factor, -448.0), 448.0)
    target.store([row, column], y.to(target.dtype))


# Compiled once for all batches, not for every number of rows that 16 divides, or does not.
@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, w, target, scales, bias, factor, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, ADD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    steps = tl.cdiv(K, DEPTH)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        group = tile // (GROUP * across)  # tiles of a group of rows after each other: W stays in the cache
        first = group * GROUP
        height = min(down - first, GROUP)
        row = (first + (tile % (GROUP * across)) % height) * ROWS
        column = ((tile % (GROUP * across)) // height) * COLUMNS
        y = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(steps):
            y = tl.dot(x.load([row, step * DEPTH]), w.load([column, step * DEPTH]).T, y)
        HALF: tl.constexpr = COLUMNS // 2
        if PARTS == 1:
            _finish(
                y, target, scales, bias, factor, row, column,
                COLUMNS, SCALED, BIAS, GELU, ADD, FP8,
            )  # fmt: skip
        else:
            left, right = tl.split(tl.permute(tl.reshape(y, (ROWS, 2, HALF)), (0, 2, 1)))
            if PARTS == 2:
                _finish(left, target, scales, bias, factor, row, column, HALF, SCALED, BIAS, GELU, ADD, FP8)
                column += HALF
                _finish(right, target, scales, bias, factor, row, column, HALF, SCALED, BIAS, GELU, ADD, FP8)
            else:
                _finish_halves(
                    left, target, scales, bias, factor, row, column,
                    ROWS, HALF // 2, SCALED, BIAS, GELU, ADD, FP8,
                )  # fmt: skip
                _finish_halves(
                    right, target, scales, bias, factor, row, column + HALF,
                    ROWS, HALF // 2, SCALED, BIAS, GELU, ADD, FP8,
                )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _finish_halves(  # type: ignore[no-untyped-def]
    y, target, scales, bias, factor, row, column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, ADD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    left, right = tl.split(tl.permute(tl.reshape(y, (ROWS, 2, WIDTH)), (0, 2, 1)))
    _finish(left, target, scales, bias, factor, row, column, WIDTH, SCALED, BIAS, GELU, ADD, FP8)
    _finish(right, target, scales, bias, factor, row, column + WIDTH, WIDTH, SCALED, BIAS, GELU, ADD, FP8)


def product(product: Product, x: Tensor, out: Tensor, tiles: Tiles) -> Tensor:
    """out = f(x W^T scales + bias), or out += that.

    Args:
        x: (M, K), in bf16 or fp8 as the weights (N, K); K times the bytes of a value is a multiple of 16, and
            N is a multiple of `tiles.columns`.
        out: (M, N).
    """
    weight = product.weight
    (M, K), N = x.shape, weight.shape[0]
    depth = tiles.depth_bytes // x.element_size()
    width = tiles.columns // tiles.parts
    descriptors = [
        TensorDescriptor.from_tensor(tensor, list(shape))
        for tensor, shape in (
            (x, (tiles.rows, depth)),
            (weight, (tiles.columns, depth)),
            (out, (tiles.rows, width)),
        )
    ]
    # Two programs of four warps fit on a multiprocessor: one finishes a tile while the other multiplies.
    most = processors(x.device) * (2 if tiles.warps == 4 else 1)
    programs = min(most, triton.cdiv(M, tiles.rows) * (N // tiles.columns))
    scales, bias = (out if one is None else one for one in (product.scales, product.bias))  # or unused
    with torch.cuda.device_of(x):
        _product[(programs,)](
            *descriptors, scales, bias, product.factor or 1.0,
            M, N, K, tiles.rows, tiles.columns, depth, 8, programs, tiles.parts,
            product.scales is not None, product.bias is not None, product.gelu, product.add,
            product.factor is not None,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out
