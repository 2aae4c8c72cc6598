"""A color map without matplotlib, for terminals and small pages."""

from __future__ import annotations

_STOPS = [(10, 10, 60), (120, 20, 110), (235, 90, 50), (255, 235, 120)]


def heat(value: float) -> tuple[int, int, int]:
    """Map a value from 0 to 1 to (red, green, blue): dark blue, purple, orange, yellow."""
    position = min(max(value, 0.0), 1.0) * (len(_STOPS) - 1)
    low = min(int(position), len(_STOPS) - 2)
    fraction = position - low
    pairs = zip(_STOPS[low], _STOPS[low + 1], strict=True)
    red, green, blue = (round(start + (end - start) * fraction) for start, end in pairs)
    return red, green, blue


def around_zero(value: float) -> tuple[int, int, int]:
    """Map a value from 0 to 1 to (red, green, blue): blue, white at 0.5, red."""
    end, weight = ((33, 102, 172), 1 - 2 * value) if value < 0.5 else ((178, 24, 43), 2 * value - 1)
    red, green, blue = (round(247 + (part - 247) * weight) for part in end)
    return red, green, blue
