"""Confidence interval of a mean, by Student's t."""

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
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half_width = t_quantile(n - 1) * deviation / math.sqrt(n)
    return mean - half_width, mean + half_width


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of t: from the table, beyond it by two terms of the series in 1 / freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
