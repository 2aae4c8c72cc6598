"""Confidence intervals: of a mean by Student's t, of a fraction by Wilson's score.

An accuracy lies between 0 and 1, and three runs that all score 100 % do not prove that a fourth would: its
interval never leaves 0 to 1 and never has zero width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_NORMAL = 1.959964  # the limit of t for many degrees of freedom
# The 97.5 % quantile of t with 1, 2, ... degrees of freedom.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def confidence_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    half_width = t_quantile(n - 1) * _deviation(values) / math.sqrt(n)
    return mean - half_width, mean + half_width


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def fraction_interval(fractions: Sequence[float], items: int) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean of fractions, such as accuracies; None for a single one.

    Wilson's score interval, with as many items as give the variance that is seen: that between the runs, by
    Student's t, and that of the items, of which every run saw the same.

    Args:
        fractions: one per run, each of the same items.
        items: how many there are, such as the number of held-out images.
    """
    n = len(fractions)
    if n < 2:
        return None
    mean = min(1.0, max(0.0, math.fsum(fractions) / n))
    half_width = t_quantile(n - 1) * _deviation(fractions) / math.sqrt(n)
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
    mean = math.fsum(differences) / len(differences)
    half_width = max((interval[1] - interval[0]) / 2, 3 / items)
    return max(-1.0, mean - half_width), min(1.0, mean + half_width)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of t: from the table, beyond it by two terms of the series in 1 / freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
