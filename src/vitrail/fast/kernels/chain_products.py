"""The kernels of a few images, when a product takes as long as a norm or the launch of a kernel.

norm      is part of the product after it: norm(z + s) W^T + b = r ((z W^T + W s) - m W 1) + b, with mean m
          and reciprocal standard deviation r of a token; the norm's weight and bias are in W and b already.
          W s and W 1 are known, and the product that wrote z has left the statistics of its columns.
launch    of a kernel, and the reading of its weights into the cache, begin while the one before it runs
          (programmatic dependent launch, compute capability 9.0).
long K    is cut into `splits`, so that all multiprocessors work; the norm that follows adds them up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.fast.chain import ChainTiles, FoldedNorm
from vitrail.fast.kernels.gelu import gelu as _gelu

_LINE = tl.constexpr(64)  # values of a line of the cache: 128 bytes in bf16
_QUERIES, _KEYS = 64, 128  # of a program of attention at a time
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(weights, row, first, ROWS: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for (ROWS, COUNT) weights to be read into the cache of the GPU; nothing waits for them."""
    at = first + tl.arange(0, triton.next_power_of_2(triton.cdiv(COUNT, _LINE))) * _LINE
    address = weights + (row + tl.arange(0, ROWS))[:, None] * K + tl.minimum(at, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, w, weights, target, bias, sums, shifted, statistics, shift, found, M, eps,
    N: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, CENTERED: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    column, row, split = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS, tl.program_id(2)
    STEPS: tl.constexpr = triton.cdiv(triton.cdiv(K, DEPTH), SPLITS)
    first = split * STEPS
    if DEPENDENT:
        gdc_launch_dependents()
        if tl.program_id(1) == 0:
            _prefetch(weights, column, first * DEPTH, COLUMNS, STEPS * DEPTH, K)
        gdc_wait()
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = rows[:, None] < M
    if NORM:  # read now and used later
        slot = tl.arange(0, SLOTS)[None, :]
        at = rows[:, None] * CHUNKS + slot
        means = tl.load(statistics + at, mask=inside & (slot < CHUNKS), other=0.0)
        squares = tl.load(statistics + M * CHUNKS + at, mask=inside & (slot < CHUNKS), other=0.0)
    y = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(first, first + STEPS):
        y = tl.dot(x.load([row, step * DEPTH]), w.load([column, step * DEPTH]).T, y)
    if NORM:
        mean = tl.sum(means, 1) / CHUNKS
        if CENTERED:
            y -= mean[:, None] * tl.load(sums + columns)[None, :]
            means = tl.where(slot < CHUNKS, means - mean[:, None], 0.0)
        variance = (tl.sum(squares, 1) + (K // CHUNKS) * tl.sum(means * means, 1)) / K
        y = (y + tl.load(shifted + columns)[None, :]) / tl.sqrt(variance + eps)[:, None]
    if BIAS:
        y += tl.load(bias + columns)[None, :]
    if GELU:
        y = _gelu(y)
    place = (split * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    if ADD:
        y += tl.load(target + place, mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(target.dtype.element_ty)
    tl.store(target + place, rounded, mask=inside)
    if ADD:
        y = rounded.to(tl.float32) + tl.load(shift + columns)[None, :]
        mean = tl.sum(y, 1) / COLUMNS
        y -= mean[:, None]
        at = rows * (N // COLUMNS) + column // COLUMNS
        tl.store(found + at, mean, mask=rows < M)
        tl.store(found + M * (N // COLUMNS) + at, tl.sum(y * y, 1), mask=rows < M)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiles: ChainTiles,
    *,
    bias: Tensor | None = None,
    norm: FoldedNorm | None = None,
    gelu: bool = False,
    shift: Tensor | None = None,
    found: Tensor | None = None,
) -> None:
    (M, K), N = x.shape, weight.shape[0]
    dependent = x.device.type == "cuda"
    x_tiles, w_tiles = (
        TensorDescriptor.from_tensor(tensor, [count, tiles.depth])
        for tensor, count in ((x, tiles.rows), (weight, tiles.columns))
    )
    none: Any = out  # an unused pointer
    sums, shifted, statistics = (norm.sums, norm.shifted, norm.statistics) if norm else (none, none, none)
    bias, shift, found, add = (
        *(none if one is None else one for one in (bias, shift, found)), shift is not None,
    )  # fmt: skip
    chunks = statistics.shape[-1] if norm else 1
    with torch.cuda.device_of(x):
        _product[(N // tiles.columns, triton.cdiv(M, tiles.rows), tiles.splits)](
            x_tiles, w_tiles, weight, out, bias, sums, shifted, statistics, shift, found, M,
            norm.eps if norm else 1.0, N, K, chunks, triton.next_power_of_2(chunks),
            tiles.rows, tiles.columns, tiles.depth, tiles.splits,
            norm is not None, norm is not None and norm.centered, bias is not none, gelu, add, dependent,
            num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=dependent,
        )  # fmt: skip


def project(
    x: Tensor,
    weight: Tensor,
    tiles: ChainTiles,
    *,
    bias: Tensor | None = None,
    norm: FoldedNorm | None = None,
    gelu: bool = False,
) -> Tensor:
    """f(norm(x) W^T + bias) of (M, K) and (N, K) in bf16; N is a multiple of `tiles.columns`."""
    out = x.new_empty(len(x), len(weight))
    _launch(x, weight, out, tiles, bias=bias, norm=norm, gelu=gelu)
    return out


def add_project(x: Tensor, weight: Tensor, z: Tensor, shift: Tensor, tiles: ChainTiles) -> Tensor:
    """z += x W^T; returns the statistics of z + shift."""
    found = z.new_empty(2, len(z), len(weight) // tiles.columns, dtype=torch.float32)
    _launch(x, weight, z, tiles, shift=shift, found=found)
    return found


def project_in_parts(x: Tensor, weight: Tensor, tiles: ChainTiles) -> Tensor:
    """Parts (splits, M, N) in fp32 whose sum is x W^T."""
    out = x.new_empty(tiles.splits, len(x), len(weight), dtype=torch.float32)
    _launch(x, weight, out, tiles)
    return out


# ---- attention ------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _attention(  # type: ignore[no-untyped-def]
    qkv, out, T, queries, scale, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    rows, head, image = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.program_id(2)
    channel, stride = tl.arange(0, D), 3 * H * D
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    source = qkv + image.to(tl.int64) * T * stride + head * D + channel[None, :]
    q = tl.load(source + rows[:, None] * stride, mask=rows[:, None] < queries, other=0.0)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS, D), tl.float32)
    for first in range(0, T, KEYS):
        keys = first + tl.arange(0, KEYS)
        k = tl.load(source + H * D + keys[:, None] * stride, mask=keys[:, None] < T, other=0.0)
        v = tl.load(source + 2 * H * D + keys[:, None] * stride, mask=keys[:, None] < T, other=0.0)
        scores = tl.dot(q, k.T) * (scale * _LOG2_E)
        scores = tl.where(keys[None, :] < T, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(largest - larger)
        total = total * fade + tl.sum(weights, 1)
        y = tl.dot(weights.to(v.dtype), v, y * fade[:, None])
        largest = larger
    y = y / total[:, None]
    target = out + (image.to(tl.int64) * queries + rows[:, None]) * (H * D) + head * D + channel[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=rows[:, None] < queries)


def attend_first(qkv: Tensor, heads: int, scale: float, queries: int) -> Tensor:
    """The heads (B queries, k d) of the first tokens of each image, which attend to all.

    Args:
        qkv: (B, T, 3 k d); d is a power of two.
    """
    B, T, _ = qkv.shape
    D = qkv.shape[-1] // 3 // heads
    out = qkv.new_empty(B * queries, heads * D)
    dependent = qkv.device.type == "cuda"
    rows = max(16, min(_QUERIES, triton.next_power_of_2(queries)))
    with torch.cuda.device_of(qkv):
        _attention[(triton.cdiv(queries, rows), heads, B)](
            qkv, out, T, queries, scale, heads, D, rows, _KEYS, dependent,
            num_warps=4, num_stages=2, launch_pdl=dependent,
        )  # fmt: skip
    return out
