"""GELU for a kernel: exact enough for the rounding of its result, with few slow instructions.

`normal` is for gradients in training. `gelu` is for inference: Phi(x) = 1 / (1 + 2^-p(x)) with an odd
polynomial p, which takes one exponential and one reciprocal. Relative to Phi it is at most 1.7e-3 off for
|x| <= 5.5 (p is fitted there to the logarithm of Phi(x) / Phi(-x)), below half a step of bf16, 2e-3. Beyond,
p goes on growing with x, and x or less than 2e-7 is left.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

_SIZE, _WARPS = 4096, 8
_P1, _P3 = tl.constexpr(2.2988028983912305), tl.constexpr(0.10907619258078)
_P5, _P7 = tl.constexpr(-0.0013998205635902662), tl.constexpr(1.2524655126311426e-05)
# Triton's own exp2 and division take nine instructions more, for denormal numbers that do not matter here.
# Its interpreter knows no assembly.
_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1" and torch.version.hip is None)


@triton.jit
def normal(x):  # type: ignore[no-untyped-def]
    """The normal distribution at x: its cumulative distribution Phi(x), and its density.

    By Abramowitz and Stegun 7.1.26: erfc(z) = (a_1 t + ... + a_5 t^5) exp(-z^2) with t = 1 / (1 + p z),
    z >= 0, at most 1.5e-7 off.
    """
    exponential = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # p / sqrt(2)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * series * exponential  # Phi(-|x|)
    return tl.where(x < 0, tail, 1.0 - tail), exponential * 0.3989422804014327


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    """x Phi(x), to the rounding of bf16."""
    square = x * x
    minus_p = x * (((-_P7 * square - _P5) * square - _P3) * square - _P1)
    if _ASSEMBLY:
        return x * _assembly(
            "rcp.approx.ftz.f32 $0, $1;", 1.0 + _assembly("ex2.approx.ftz.f32 $0, $1;", minus_p)
        )
    return x / (1.0 + tl.exp2(tl.minimum(minus_p, 126.0)))  # NumPy warns of infinity


@triton.jit  # type: ignore[untyped-decorator]
def _assembly(instruction: tl.constexpr, x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def _bias_gelu(source, bias, target, count, columns, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(source + at, mask=at < count, other=0.0).to(tl.float32)
    x += tl.load(bias + at % columns, mask=at < count, other=0.0)
    tl.store(target + at, gelu(x).to(target.dtype.element_ty), mask=at < count)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) of (M, F), in place.

    Args:
        bias: (F,) in fp32.
    """
    with torch.cuda.device_of(x):
        _bias_gelu[(triton.cdiv(x.numel(), _SIZE),)](
            x, bias, x, x.numel(), x.shape[-1], _SIZE, num_warps=_WARPS
        )
    return x
