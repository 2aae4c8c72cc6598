"""What the kernels of `vitrail.fast.kernels` compute, by torch: where there is no Triton, and for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0
"""The largest number of fp8 e4m3."""


def to_fp8(x: Tensor, factor: float | Tensor) -> Tensor:
    """x factor in fp8 e4m3; what is too large becomes the largest number."""
    return (x.float() * factor).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def norm(
    z: Tensor,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    centered: bool = True,
    factor: float | None = None,
) -> Tensor:
    """The norm of z + shift over the last axis; see `vitrail.fast.kernels.norm`."""
    x = z.float() + shift
    D = x.shape[-1]
    y = F.layer_norm(x, (D,), weight, bias, eps) if centered else F.rms_norm(x, (D,), weight, eps) + bias
    return y.to(z.dtype) if factor is None else to_fp8(y, factor)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias), in place."""
    return x.copy_(F.gelu(x.float() + bias).to(x.dtype))


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    gelu: bool = False,
    add: bool = False,
    factor: float | None = None,
) -> Tensor:
    """out = f(x W^T scales + bias), or out += that; see `vitrail.fast.kernels.product`."""
    y = x.float() @ weight.float().T
    y = y if scales is None else y * scales
    y = y if bias is None else y + bias
    y = F.gelu(y) if gelu else y
    y = y + out.float() if add else y
    return out.copy_(y.to(out.dtype) if factor is None else to_fp8(y, factor))
