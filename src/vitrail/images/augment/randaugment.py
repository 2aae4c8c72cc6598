"""RandAugment and TrivialAugment: sampling of their operations, and those that map pixel values.

Their geometric and color operations become part of the matrices of `augment` and `color`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.images.augment.per_sample import expand_to

if TYPE_CHECKING:
    from vitrail.images.augment.pipeline import Augment

OPERATIONS = (
    *("identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate"),
    *("brightness", "saturation", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
MAX_MAGNITUDE = 30
NUMBERS = 3  # random numbers for each operation


@dataclass(frozen=True)
class Operation:
    """One operation of the policy for each sample of a batch."""

    index: Tensor
    """(B,) int64, into OPERATIONS."""
    magnitude: Tensor
    """(B,) from 0 to MAX_MAGNITUDE."""
    sign: Tensor
    """(B,) -1 or 1."""
    max_amounts: Mapping[str, float]
    """What an operation does at MAX_MAGNITUDE."""

    def selected(self, name: str) -> Tensor:
        """(B,) true for the samples that get this operation."""
        return self.index == OPERATIONS.index(name)

    def amount(self, name: str) -> Tensor:
        """(B,) how much of an operation each sample gets: 0, which changes nothing, if it gets another."""
        amount = self.sign * self.magnitude * self.max_amounts[name] / MAX_MAGNITUDE
        return torch.where(self.selected(name), amount, 0.0)


def sample_operations(numbers: Tensor, settings: Augment, size: tuple[int, int]) -> list[Operation]:
    """The operations of the policy, from (B, NUMBERS * n) random numbers; the ranges are torchvision's."""
    wide = settings.policy == "trivialaugment"
    across, down = (32.0 if wide else 150 / 331 * side for side in reversed(size))
    shear, degrees, factor, bits = (0.99, 135.0, 0.99, 6.0) if wide else (0.3, 30.0, 0.9, 4.0)
    amounts = (shear, shear, across, down, degrees, *[factor] * 4, bits)
    max_amounts = dict(zip(OPERATIONS[1:11], amounts, strict=True))
    operations = []
    for first in range(0, numbers.shape[1], NUMBERS):
        index, strength, sign = numbers[:, first : first + NUMBERS].unbind(1)
        magnitude = torch.full_like(strength, settings.policy_magnitude)
        if wide:
            magnitude = (strength * (MAX_MAGNITUDE + 1)).floor()
        signs = torch.where(sign < 0.5, -1.0, 1.0)
        operations.append(Operation((index * len(OPERATIONS)).long(), magnitude, signs, max_amounts))
    return operations


def apply_pixel_operations(x: Tensor, operations: list[Operation]) -> Tensor:
    """Posterize, solarize, autocontrast and equalize, as one lookup table of 256 entries per channel.

    They are torchvision's on 8-bit images, except that solarize of magnitude 0 changes nothing.
    """
    pixels = (x * 255).round_().clamp_(0, 255).long().flatten(2)  # (B, C, HW)
    ramp = torch.arange(256, device=x.device)
    table = ramp.expand(*x.shape[:2], 256)
    counts = torch.zeros_like(table).scatter_add_(2, pixels, pixels.new_ones(()).expand_as(pixels))
    changed = operations[0].index < 0
    for operation in operations:
        changed = changed | (operation.index >= OPERATIONS.index("posterize"))
        histogram = torch.zeros_like(table).scatter_add_(2, table, counts)  # after the operations so far
        bits = expand_to(operation.amount("posterize").abs().round().long(), x, 2)
        bright = ramp * MAX_MAGNITUDE >= 255 * (MAX_MAGNITUDE - expand_to(operation.magnitude.long(), x, 2))
        bright = bright & expand_to(operation.selected("solarize") & (operation.magnitude > 0), x, 2)
        mapped = torch.where(bright, 255 - ramp, ramp >> bits << bits)
        stretched, equalized = _contrast_tables(histogram, ramp)
        mapped = torch.where(expand_to(operation.selected("autocontrast"), x, 2), stretched, mapped)
        mapped = torch.where(expand_to(operation.selected("equalize"), x, 2), equalized, mapped)
        table = mapped.gather(2, table)
    return torch.where(expand_to(changed, x, 3), table.gather(2, pixels).view_as(x) / 255, x)


def _contrast_tables(counts: Tensor, ramp: Tensor) -> tuple[Tensor, Tensor]:
    """Lookup tables (B, C, 256) of autocontrast and of equalize for histograms (B, C, 256)."""
    low = torch.where(counts > 0, ramp, 255).amin(2, keepdim=True)
    high = torch.where(counts > 0, ramp, 0).amax(2, keepdim=True)
    stretched = ((ramp - low) * 255 // (high - low).clamp(min=1)).clamp(0, 255)
    step = (counts.sum(2, keepdim=True) - counts.gather(2, high)) // 255
    below = counts.cumsum(2) - counts
    equalized = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(high > low, stretched, ramp), torch.where(step > 0, equalized, ramp)


def sharpen(x: Tensor, factor: Tensor) -> Tensor:
    """Sharpness: factor 0 blurs, 1 changes nothing, 2 sharpens. The outermost pixels stay as they are."""
    if min(x.shape[-2:]) < 3:
        return x
    inner = x[..., 1:-1, 1:-1]
    columns = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    blurred = (columns[..., :-2] + columns[..., 1:-1]).add_(columns[..., 2:]).add_(4 * inner).div_(13)
    out = x.clone()
    out[..., 1:-1, 1:-1] += blurred.sub_(inner).mul_(expand_to(1 - factor, x, 3))
    return out.clamp_(0, 1)
