"""Mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019) of a batch.

Images are mixed in pairs of neighbors: positions 0 and 1 of the batch, 2 and 3, and so on. Any slice of
even length that starts at an even position holds complete pairs, so ranks and gradient accumulation may
split the batch. The parameters of a pair are a function of (seed, epoch, index of its first sample), see
`rng`, and hold for both: each keeps the same fraction of itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.base.fields import Config, documented, number
from vitrail.images.augment.per_sample import expand_to, interval_mask
from vitrail.images.rng import MIX_STREAM, random_uniform

_MAX_ALPHA = 100.0
_KNOTS = 8192  # of the table of the Beta distribution
_tables: dict[tuple[float, torch.device], tuple[Tensor, Tensor]] = {}  # torch.compile ignores functools.cache


def _alpha(doc: str) -> Any:
    return number(doc, f"from 0 to {_MAX_ALPHA:g}", lambda a: 0 <= a <= _MAX_ALPHA, 0.0)


def _probability(doc: str, default: float) -> Any:
    return number(doc, "from 0 to 1", lambda p: 0 <= p <= 1, default)


@documented
@dataclass(frozen=True, kw_only=True)
class Mixing(Config):
    """Mixup and CutMix of training images and their targets. Both are off by default."""

    mixup: float = _alpha("Mixup: images are averaged with weights from Beta(mixup, mixup); 0 is off")
    cutmix: float = _alpha("CutMix: a box is pasted, its area from Beta(cutmix, cutmix); 0 is off")
    probability: float = _probability("Probability that a pair is mixed at all", 1.0)
    cutmix_probability: float = _probability("Probability of CutMix rather than mixup if both are on", 0.5)


def mix_batch(
    images: Tensor, targets: Tensor, indices: Tensor, settings: Mixing, *, seed: int, epoch: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W) and targets (B, K), both floating point, mixed pair by pair.

    Args:
        indices: (B,) int64, the index of each sample in the data set, as in `augment_batch`. B is even.
    """
    if not (settings.mixup or settings.cutmix) or not settings.probability:
        return images, targets
    height, width = images.shape[-2:]
    own, box = sample_mixing(indices[::2], settings, (height, width), seed, epoch)
    top, bottom, left, right = box.unbind(1)
    area = (bottom - top) * (right - left) / (height * width)
    other = 1 - own * (1 - area)  # the fraction of the pixels that come from the partner

    rows, columns = interval_mask(top, bottom, height, images), interval_mask(left, right, width, images)
    pasted = (rows[:, :, None] & columns[:, None, :])[:, None, None]  # (P, 1, 1, H, W)
    weight = torch.where(pasted, 1.0, expand_to(1 - own, images, 4))
    return _blend(images, weight), _blend(targets, expand_to(other, targets, 2))


def sample_mixing(
    firsts: Tensor, settings: Mixing, size: tuple[int, int], seed: int, epoch: int | Tensor
) -> tuple[Tensor, Tensor]:
    """The weight (P,) that an image of each pair keeps outside the box, and the box (P, 4).

    For mixup the box is empty, for CutMix the weight is 1. The box is (top, bottom, left, right), with
    sides sqrt(1 - lambda) about a uniform center, clipped at the border.
    """
    numbers = random_uniform([seed, epoch, MIX_STREAM, firsts], 5).double()
    mixed, kind, quantile, *centers = numbers.unbind(1)
    selected, ones = mixed < settings.probability, torch.ones_like(quantile)
    cut = kind < (
        settings.cutmix_probability if settings.mixup and settings.cutmix else bool(settings.cutmix)
    )
    own = torch.where(selected & ~cut, beta(quantile, settings.mixup), ones) if settings.mixup else ones
    half = (1 - beta(quantile, settings.cutmix)).sqrt() / 2 if settings.cutmix else 0 * ones
    edges = []
    for side, center in zip(size, centers, strict=True):
        middle, reach = (center * side).floor(), (half * side).floor()
        edges += [(middle - reach).clamp(min=0), (middle + reach).clamp(max=side)]
    return own, torch.where((selected & cut)[:, None], torch.stack(edges, dim=1), 0.0)


def beta(quantile: Tensor, alpha: float) -> Tensor:
    """Samples of Beta(alpha, alpha) from uniform numbers: its inverse distribution function.

    Interpolated linearly in a table, by plain arithmetic: the rounding of a power may depend on the
    position in the batch.
    """
    if (alpha, quantile.device) not in _tables:
        _tables[alpha, quantile.device] = _beta_table(alpha, quantile.device)
    values, cumulative = _tables[alpha, quantile.device]
    lower = torch.minimum(quantile, 1 - quantile)  # the distribution is symmetric
    knot = (torch.searchsorted(cumulative, lower, right=True) - 1).clamp(max=_KNOTS - 1)
    part = (lower - cumulative[knot]) / (cumulative[knot + 1] - cumulative[knot])
    sample = values[knot] + part * (values[knot + 1] - values[knot])
    return torch.where(quantile < 0.5, sample, 1 - sample)


def _beta_table(alpha: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values x from 0 to 1/2, and the probability of Beta(alpha, alpha) below each.

    The knots are uniform in t = x^p with p = min(alpha, 1), where the density has no pole at 0:
    x^(alpha - 1) (1 - x)^(alpha - 1) dx is x^(alpha - p) (1 - x)^(alpha - 1) dt / p.
    """
    p = min(alpha, 1.0)
    x = (torch.linspace(0, 1, _KNOTS + 1, dtype=torch.float64) * 0.5**p) ** (1 / p)
    density = x ** (alpha - p) * (1 - x) ** (alpha - 1)
    cumulative = torch.cat([x[:1], (density[1:] + density[:-1]).cumsum(0)])
    return x.to(device), (cumulative / (2 * cumulative[-1])).to(device)


def _blend(x: Tensor, weight: Tensor) -> Tensor:
    """Each sample of a pair with this weight of its partner; weights 0 and 1 keep the bits."""
    pairs = x.unflatten(0, (len(x) // 2, 2))
    return (pairs * (1 - weight) + pairs.flip(1) * weight).flatten(0, 1)
