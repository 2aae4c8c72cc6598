"""Normalization: (pixels * scale - mean) / std, per channel. The only place where it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vitrail.images.preprocess import Preprocess


def normalize(pixels: Tensor, mean: Tensor, std: Tensor, scale: float) -> Tensor:
    """(pixels * scale - mean) / std, in the dtype of `mean`.

    The product is computed in the dtype of `pixels` and then rounded. float64 pixels give the bits of
    torchvision, timm and transformers; float32 pixels differ from these in the last bit and are faster.

    Args:
        pixels: (..., C, H, W), floating point.
        mean, std: (C, 1, 1), see `channel_statistics`.
    """
    return ((pixels * scale).to(mean.dtype) - mean) / std


def channel_statistics(
    preprocess: Preprocess, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as float32 tensors (C, 1, 1)."""
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
        for values in (preprocess.mean, preprocess.std)
    )
    return mean, std


def normalize_batch(pixels: Tensor, preprocess: Preprocess, like: Tensor) -> Tensor:
    """uint8 pixels (B, C, H, W) as model input, on the device and in the dtype of the parameter `like`."""
    mean, std = channel_statistics(preprocess, like.device)
    return normalize(pixels.to(like.device).float(), mean, std, preprocess.scale).to(like.dtype)


def build_normalize(preprocess: Preprocess, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that normalizes float images (B, C, H, W) with values from 0 to 1 on a device."""
    mean, std = channel_statistics(preprocess, device)
    return lambda images: normalize(images, mean, std, 255 * preprocess.scale)
