"""Pictures mixed with a partner for training: mixup (Zhang et al. 2017) and cutmix (Yun et al. 2019).

Partners are neighbours: positions 0 and 1 of the batch, 2 and 3, and so on. Any slice of even length
that starts at an even place holds both, so ranks and accumulation may cut the batch as they like.
What a pair gets is a function of (seed, epoch, the index of its first sample), see `chance`; both
partners get it: the first keeps as much of itself as the second does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitrail.data.augment import inside
from vitrail.data.chance import uniform
from vitrail.data.policy import beside
from vitrail.errors import InputError
from vitrail.fields import Config, number

STREAM = 2  # apart from the numbers that other parts draw for the same sample
MOST_ALPHA = 100.0
KNOTS = 8192


def alpha(doc: str) -> Any:
    return number(doc, f"from 0 to {MOST_ALPHA:g}", lambda a: 0 <= a <= MOST_ALPHA, 0.0)


def probability(doc: str, default: float) -> Any:
    return number(doc, "from 0 to 1", lambda p: 0 <= p <= 1, default)


@dataclass(frozen=True, kw_only=True)
class Mixing(Config):
    """How training pictures and their targets are mixed. They are not, unless asked for."""

    mixup: float = alpha("Both pictures shine through each other, with shares from Beta(mixup, mixup)")
    cutmix: float = alpha("A box of the other picture is pasted, with areas from Beta(cutmix, cutmix)")
    share: float = probability("Probability that a pair is mixed at all", 1.0)
    cutmix_share: float = probability("Probability of cutmix, rather than mixup, where both are on", 0.5)


def mix(
    images: Tensor, targets: Tensor, indices: Tensor, settings: Mixing, *, seed: int, epoch: int
) -> tuple[Tensor, Tensor]:
    """Pictures (B, C, H, W) and targets (B, K), floats both, mixed pair by pair.

    `indices` (B,) int64 say which sample each is; best left on the CPU, as in `augment`.
    """
    check(images, targets, indices)
    if not (settings.mixup or settings.cutmix) or not settings.share:
        return images, targets
    height, width = images.shape[-2:]
    own, box = draw(indices[::2], settings, (height, width), seed, epoch)
    top, bottom, left, right = box.unbind(1)
    area = (bottom - top) * (right - left) / (height * width)
    theirs = 1 - own * (1 - area)  # what the pair's targets take of each other: the pixels' mean

    rows, columns = inside(top, bottom, height, images), inside(left, right, width, images)
    pasted = (rows[:, :, None] & columns[:, None, :])[:, None, None]  # (P, 1, 1, H, W)
    weight = torch.where(pasted, 1.0, beside(1 - own, images, 4))
    return blend(images, weight), blend(targets, beside(theirs, targets, 2))


def check(images: Tensor, targets: Tensor, indices: Tensor) -> None:
    count = len(images)
    if images.ndim != 4 or not images.is_floating_point():
        got = f"{images.dtype} {tuple(images.shape)}"
        raise InputError("Pictures must be (B, C, H, W), floats.", got, "Mix them after augment.")
    if count % 2:
        must, do = (
            "Pictures must come in pairs.",
            "Use batches of an even size, and drop the odd one at the end.",
        )
        raise InputError(must, f"{count} pictures", do)
    if targets.ndim != 2 or len(targets) != count or not targets.is_floating_point():
        must, got = f"Targets must be ({count}, K), floats.", f"{targets.dtype} {tuple(targets.shape)}"
        raise InputError(must, got, "Give a share for each class: one_hot(labels, K).float().")
    if indices.shape != (count,) or indices.dtype != torch.int64:
        must = f"Indices must be {count} whole numbers (int64), one for each picture."
        got = f"{indices.dtype} {tuple(indices.shape)}"
        raise InputError(must, got, "Give each sample's place in the dataset.")


def draw(
    firsts: Tensor, settings: Mixing, size: tuple[int, int], seed: int, epoch: int
) -> tuple[Tensor, Tensor]:
    """For each pair how much of itself a picture keeps outside the box (P,), and the box (P, 4).

    Mixup's box is empty, and cutmix keeps all outside. The box has the sides sqrt(1 - lambda) about
    a centre anywhere in the picture, and is cut off at the border.
    """
    chance = uniform([seed, epoch, STREAM, firsts], 5).to(torch.float64)
    mixed, which, quantile, *centres = chance.unbind(1)
    on, ones = mixed < settings.share, torch.ones_like(quantile)
    cuts = which < (settings.cutmix_share if settings.mixup and settings.cutmix else bool(settings.cutmix))
    own = torch.where(on & ~cuts, beta(quantile, settings.mixup), ones) if settings.mixup else ones
    half = (1 - beta(quantile, settings.cutmix)).sqrt() / 2 if settings.cutmix else 0 * ones
    edges = []
    for side, centre in zip(size, centres, strict=True):
        middle, reach = (centre * side).floor(), (half * side).floor()
        edges += [(middle - reach).clamp(min=0), (middle + reach).clamp(max=side)]
    return own, torch.where((on & cuts)[:, None], torch.stack(edges, dim=1), 0.0)


def beta(quantile: Tensor, alpha: float) -> Tensor:
    """Numbers from Beta(alpha, alpha), for numbers even from 0 to 1: the inverse of its distribution.

    Read off a table between whose knots it is straight. That is plain arithmetic: a power would
    be rounded differently here and there in a batch.
    """
    values, shares = table(alpha, quantile.device)
    lower = torch.minimum(quantile, 1 - quantile)  # both halves are alike
    knot = (torch.searchsorted(shares, lower, right=True) - 1).clamp(max=KNOTS - 1)
    part = (lower - shares[knot]) / (shares[knot + 1] - shares[knot])
    found = values[knot] + part * (values[knot + 1] - values[knot])
    return torch.where(quantile < 0.5, found, 1 - found)


@cache
def table(alpha: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers x from 0 to 1/2, and which share of Beta(alpha, alpha) lies below each.

    The knots are even in t = x^p with p = min(alpha, 1), where the density has no pole at 0:
    x^(alpha - 1) (1 - x)^(alpha - 1) dx is x^(alpha - p) (1 - x)^(alpha - 1) dt / p.
    """
    p = min(alpha, 1.0)
    x = (torch.linspace(0, 1, KNOTS + 1, dtype=torch.float64) * 0.5**p) ** (1 / p)
    density = x ** (alpha - p) * (1 - x) ** (alpha - 1)
    shares = torch.cat([x[:1], (density[1:] + density[:-1]).cumsum(0)])
    return x.to(device), (shares / (2 * shares[-1])).to(device)


def blend(x: Tensor, weight: Tensor) -> Tensor:
    """Each of a pair with that weight of the other; 0 and 1 leave the bits of one as they are."""
    pairs = x.unflatten(0, (len(x) // 2, 2))
    return (pairs * (1 - weight) + pairs.flip(1) * weight).flatten(0, 1)
