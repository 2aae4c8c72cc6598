"""Formatting of numbers in reports, and confidence intervals."""

from __future__ import annotations

import math


def percent(fraction: float) -> str:
    """A fraction in percent, with one more digit if it would otherwise be rounded up to 100 %."""
    return f"{100 * fraction:.{2 if 0.9995 <= fraction < 1 else 1}f} %"


def wilson(correct: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a fraction (Wilson 1927), valid also for few images and near 0 or 1."""
    fraction, correction = correct / count, z * z / count
    center = (fraction + correction / 2) / (1 + correction)
    variance = fraction * (1 - fraction) / count + correction / (4 * count)
    margin = z / (1 + correction) * math.sqrt(variance)
    return max(0.0, center - margin), min(1.0, center + margin)


def format_bytes(count: int) -> str:
    """A number of bytes with a decimal unit."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.1f} GB"
