"""Color augmentation of a batch: all color operations of a sample as one matrix and one offset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.images.augment.per_sample import expand_to
from vitrail.images.augment.randaugment import Operation

if TYPE_CHECKING:
    from vitrail.images.augment.pipeline import Augment

GRAY_WEIGHTS = [0.299, 0.587, 0.114]  # of red, green and blue
YIQ = torch.tensor(  # from RGB to the gray value and two chroma axes
    [GRAY_WEIGHTS, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]], dtype=torch.float64
)
QUARTER_TURN = torch.tensor([[0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64)  # red towards green
TO_GRAY = YIQ[:1].expand(3, 3)
_matrices: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}  # torch.compile ignores functools.cache
HUE_QUARTER = torch.linalg.inv(YIQ) @ QUARTER_TURN @ YIQ  # chroma rotated by 90 degrees, without the gray


def adjust_colors(
    x: Tensor, numbers: Mapping[str, Tensor], operations: list[Operation], settings: Augment
) -> Tensor:
    """Brightness, contrast, saturation, hue and grayscale, clamped to 0..1 once at the end.

    Saturation, hue and grayscale keep the gray value of each pixel, so they form one matrix in any order.
    Brightness and contrast are gain * x + lift * (mean gray of the image).
    """
    names = ("brightness", "contrast", "saturation")
    factors = [[1 + operation.amount(name) for name in names] for operation in operations]
    factors += [[1 + (2 * numbers[name] - 1) * getattr(settings, name) for name in names]]
    gain = chroma_gain = torch.ones_like(numbers["hue"])
    lift = torch.zeros_like(gain)
    for brightness, contrast, saturation in factors:
        gain, lift, chroma_gain = gain * brightness, lift * brightness, chroma_gain * saturation
        gain, lift = gain * contrast, lift + (1 - contrast) * gain
    if x.shape[1] == 3:
        chroma_gain = torch.where(numbers["gray"] < settings.gray, 0.0, chroma_gain)[:, None, None]
        angle = ((2 * numbers["hue"] - 1) * (2 * math.pi * settings.hue))[:, None, None]
        if angle.device not in _matrices:
            _matrices[angle.device] = _color_matrices(angle.device)
        gray, chroma, quarter = _matrices[angle.device]
        matrix = gray + chroma_gain * (angle.cos() * chroma + angle.sin() * quarter)
        red, green, blue = expand_to(matrix * gain[:, None, None], x, 2).unbind(2)  # (B, 3, 1, 1)
        out = (x[:, :1] * red).add_(x[:, 1:2] * green).add_(x[:, 2:] * blue)
    else:
        out = x * expand_to(gain, x, 3)
    if operations or settings.contrast:
        out += expand_to(lift, x, 3) * mean_gray(x)
    return out.clamp_(0, 1)


def _color_matrices(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """To gray, to what is left without the gray, and that rotated by 90 degrees; (3, 3) float64 each."""
    chroma = torch.eye(3) - TO_GRAY
    return TO_GRAY.to(device), chroma.to(device), HUE_QUARTER.to(device)


def mean_gray(x: Tensor) -> Tensor:
    """The mean gray value of each image, (B, 1, 1, 1), from integer sums, which do not depend on order."""
    scale = 2**24 // x.shape[3]  # so that the sum of a row is exact in float32
    sums = (x * scale).round_().sum(3).long().sum(2)  # (B, C)
    weights = GRAY_WEIGHTS if x.shape[1] == 3 else [1 / x.shape[1]] * x.shape[1]
    channels = [weight * total for weight, total in zip(weights, sums.to(x.dtype).unbind(1), strict=True)]
    return sum(channels[1:], channels[0])[:, None, None, None] / (scale * x.shape[2] * x.shape[3])
