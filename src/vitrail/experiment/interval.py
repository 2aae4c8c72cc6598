"""Confidence intervals: of a mean by Student's t, of a fraction by Wilson's score.

An accuracy lies between 0 and 1, and three runs that all score 100 % do not prove that a fourth would: its
interval never leaves 0 to 1 and never has zero width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from vitrail.base.errors import require_extra

_NORMAL = NormalDist().inv_cdf(0.975)


def check_extra() -> None:
    """Fail before anything is trained if the package with Student's t is missing."""
    with require_extra("train"):
        import scipy.special  # noqa: F401


def _half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean, by Student's t."""
    from scipy.special import stdtrit

    n = len(values)
    return float(stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n)


def confidence_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    mean, half_width = fmean(values), _half_width(values)
    return mean - half_width, mean + half_width


def fraction_interval(fractions: Sequence[float], items: int) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean of fractions, such as accuracies; None for a single one.

    Wilson's score interval, with as many items as give the variance that is seen: that between the runs, by
    Student's t, and that of the items, of which every run saw the same.

    Args:
        fractions: one per run, each of the same items.
        items: how many there are, such as the number of held-out images.
    """
    if len(fractions) < 2:
        return None
    mean, half_width = min(1.0, max(0.0, fmean(fractions))), _half_width(fractions)
    variance = mean * (1 - mean)
    if variance == 0:
        return wilson_interval(mean, items)
    return wilson_interval(mean, variance / (half_width**2 / _NORMAL**2 + variance / items))


def share_interval(shares: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of a share that counts no items, such as that of an attention weight.

    By Student's t on the logit scale, so that it stays between 0 and 1.
    """
    bounds = confidence_interval([math.log(share / (1 - share)) for share in shares])
    return bounds and (1 / (1 + math.exp(-bounds[0])), 1 / (1 + math.exp(-bounds[1])))


def wilson_interval(fraction: float, items: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a fraction of so many items."""
    square = _NORMAL**2 / items
    center = (fraction + square / 2) / (1 + square)
    half_width = math.sqrt(square * fraction * (1 - fraction) + square**2 / 4) / (1 + square)
    return max(0.0, center - half_width), min(1.0, center + half_width)


def difference_interval(differences: Sequence[float], items: int | None = None) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean difference of two fractions; None for a single one.

    By Student's t over the runs, within -1 to 1. It reaches at least 3 / items to either side: a difference
    that no item showed may still occur at that rate (the rule of three).
    """
    interval = confidence_interval(differences)
    if interval is None or items is None:
        return interval
    mean = fmean(differences)
    half_width = max((interval[1] - interval[0]) / 2, 3 / items)
    return max(-1.0, mean - half_width), min(1.0, mean + half_width)
