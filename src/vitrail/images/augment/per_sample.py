"""Parameters with one value per sample, applied to a batch of images."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_to(parameter: Tensor, x: Tensor, dims: int = 0) -> Tensor:
    """A parameter (B, ...) with `dims` more dimensions, on the device of `x`, without a synchronization.

    Floating point parameters get the dtype of `x`.
    """
    dtype = x.dtype if parameter.is_floating_point() else parameter.dtype
    return parameter.to(x.device, dtype, non_blocking=True)[(..., *[None] * dims)]


def interval_mask(start: Tensor, end: Tensor, length: int, x: Tensor) -> Tensor:
    """(B, length), true for the pixels of a side from `start` up to, not including, `end`."""
    pixels = torch.arange(length, device=x.device)
    return (pixels >= expand_to(start.long(), x, 1)) & (pixels < expand_to(end.long(), x, 1))
