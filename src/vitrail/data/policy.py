"""What RandAugment and TrivialAugment draw, and those of their operations that work on levels.

Their operations on place and colour are folded into the one matrix each that `augment` makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vitrail.data.augment import Augment

OPS = (
    *("identity", "shear-x", "shear-y", "shift-x", "shift-y", "turn", "brightness", "saturation", "contrast"),
    *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
LAST = 30  # strengths go from 0 to here


@dataclass(frozen=True)
class Step:
    """One operation of a policy for each sample."""

    op: Tensor  # (B,) its place in OPS
    strength: Tensor  # (B,) from 0 to LAST
    sign: Tensor  # (B,) -1 or 1
    most: Mapping[str, float]  # what an operation does at the strength LAST

    def drew(self, name: str) -> Tensor:
        return self.op == OPS.index(name)

    def amount(self, name: str) -> Tensor:
        """How much of the operation a sample gets: 0, which is nothing, where it drew another."""
        return torch.where(self.drew(name), self.sign * self.strength * self.most[name] / LAST, 0.0)


def draw_steps(chance: Tensor, settings: Augment, size: tuple[int, int]) -> list[Step]:
    """The policy's operations, from three numbers each; the ranges are torchvision's."""
    wide = settings.policy == "trivial"
    across, down = (32.0 if wide else 150 / 331 * side for side in reversed(size))
    skew, turn, factor, bits = (0.99, 135.0, 0.99, 6.0) if wide else (0.3, 30.0, 0.9, 4.0)
    most = dict(zip(OPS[1:11], (skew, skew, across, down, turn, *[factor] * 4, bits), strict=True))
    steps = []
    for first in range(0, chance.shape[1], 3):
        op, bin, sign = chance[:, first : first + 3].unbind(1)
        strength = (bin * (LAST + 1)).floor() if wide else torch.full_like(bin, settings.policy_strength)
        steps.append(Step((op * len(OPS)).long(), strength, torch.where(sign < 0.5, -1.0, 1.0), most))
    return steps


def map_levels(x: Tensor, steps: list[Step]) -> Tensor:
    """Posterize, solarize, autocontrast and equalize: what becomes of each of 256 levels, step by step.

    All are those of torchvision on 8-bit pictures, but for solarize of strength 0, which does nothing.
    """
    levels = (x * 255).round_().clamp_(0, 255).long().flatten(2)  # (B, C, HW)
    ramp = torch.arange(256, device=x.device)
    table = ramp.expand(*x.shape[:2], 256)
    counts = torch.zeros_like(table).scatter_add_(2, levels, levels.new_ones(()).expand_as(levels))
    changed = steps[0].op < 0
    for step in steps:
        changed = changed | (step.op >= OPS.index("posterize"))
        now = torch.zeros_like(table).scatter_add_(2, table, counts)  # of levels as they are by now
        bits = beside(step.amount("posterize").abs().round().long(), x, 2)
        bright = ramp * LAST >= 255 * (LAST - beside(step.strength.long(), x, 2))
        bright = bright & beside(step.drew("solarize") & (step.strength > 0), x, 2)
        after = torch.where(bright, 255 - ramp, ramp >> bits << bits)
        stretched, equal = spread(now, ramp)
        after = torch.where(beside(step.drew("autocontrast"), x, 2), stretched, after)
        after = torch.where(beside(step.drew("equalize"), x, 2), equal, after)
        table = after.gather(2, table)
    return torch.where(beside(changed, x, 3), table.gather(2, levels).view_as(x) / 255, x)


def spread(counts: Tensor, ramp: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of levels, (B, C, 256), that stretch a histogram to both ends, and that make it even."""
    low = torch.where(counts > 0, ramp, 255).amin(2, keepdim=True)
    high = torch.where(counts > 0, ramp, 0).amax(2, keepdim=True)
    stretched = ((ramp - low) * 255 // (high - low).clamp(min=1)).clamp(0, 255)
    step = (counts.sum(2, keepdim=True) - counts.gather(2, high)) // 255
    below = counts.cumsum(2) - counts
    equal = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(high > low, stretched, ramp), torch.where(step > 0, equal, ramp)


def sharpen(x: Tensor, factor: Tensor) -> Tensor:
    """0 is blurred, 1 the picture itself, 2 sharpened; the outermost pixels stay as they are."""
    if min(x.shape[-2:]) < 3:
        return x
    inner = x[..., 1:-1, 1:-1]
    three = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    blurred = (three[..., :-2] + three[..., 1:-1]).add_(three[..., 2:]).add_(4 * inner).div_(13)
    out = x.clone()
    out[..., 1:-1, 1:-1] += blurred.sub_(inner).mul_(beside(1 - factor, x, 3))
    return out.clamp_(0, 1)


def beside(parameter: Tensor, x: Tensor, dims: int = 0) -> Tensor:
    """(B, ...) with so many more dims, on x's device, without waiting for it; numbers as precise as x."""
    dtype = x.dtype if parameter.is_floating_point() else parameter.dtype
    return parameter.to(x.device, dtype, non_blocking=True)[(..., *[None] * dims)]
