"""LayerNorm or RMSNorm of the residual stream, rounded to bf16 or quantized to fp8 in the same kernel.

The stream is stored without the biases of the products before it (`vitrail.fast.fused`): `shift` is their
sum, the same for every token, and is added here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.fast.blocks import Norm

_ELEMENTS = 4096  # of a tile
_FEW_ROWS = 2048  # below this, each row has a program of its own, so that more multiprocessors work


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    source, parts, shift, weight, bias, target, rows, width, eps, factor,
    R: tl.constexpr, C: tl.constexpr, CENTERED: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, C)
    place = row[:, None] * width + at[None, :]
    inside = (row[:, None] < rows) & (at[None, :] < width)
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            x += tl.load(parts + part * rows * width + place, mask=inside, other=0.0)
        rounded = x.to(source.dtype.element_ty)
        tl.store(source + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    x += tl.load(shift + at, mask=at < width, other=0.0)[None, :]
    if CENTERED:
        mean = tl.sum(x, 1) / width
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    w = tl.load(weight + at, mask=at < width, other=0.0)
    b = tl.load(bias + at, mask=at < width, other=0.0)
    y = x * scale[:, None] * w[None, :] + b[None, :]
    if FP8:
        y = tl.minimum(tl.maximum(y * factor, -448.0), 448.0)
    tl.store(target + place, y.to(target.dtype.element_ty), mask=inside)


def norm(norm: Norm, z: Tensor, parts: Tensor | None = None, *, dependent: bool = False) -> Tensor:
    """The norm of z + shift over the last axis of (M, D); in fp8 if it has a factor, else in the dtype of z.

    Args:
        parts: (n, M, D) in fp32, added to z first, in place.
        dependent: whether this is one of the kernels of a chain (`vitrail.fast.kernels.chain_products`).
    """
    M, D = z.shape
    out = torch.empty_like(z, dtype=z.dtype if norm.factor is None else torch.float8_e4m3fn)
    C = triton.next_power_of_2(D)
    R = max(1, _ELEMENTS // C) if M > _FEW_ROWS else 1
    with torch.cuda.device_of(z):
        _norm[(triton.cdiv(M, R),)](
            z, z if parts is None else parts, norm.shift, norm.weight, norm.bias, out, M, D, norm.eps,
            norm.factor or 1.0, R, C, norm.centered, norm.factor is not None,
            0 if parts is None else len(parts), dependent,
            num_warps=4 if C <= 4096 else 8, launch_pdl=dependent,
        )  # fmt: skip
    return out
