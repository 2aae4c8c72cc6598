"""Numbers of a stage for people and for JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def format_number(number: float | None) -> str:
    """A number in at most seven characters; None becomes a dash."""
    if number is None:
        return "-"
    return f"{number:.3g}" if len(f"{number:.3g}") <= 7 else f"{number:.0e}"


def summarize(tensor: Tensor) -> dict[str, float | None]:
    """Mean, standard deviation, minimum and maximum; None for NaN or infinity."""
    values = tensor.double()
    numbers = {
        "mean": values.mean(),
        "std": values.std(correction=0),
        "min": values.min(),
        "max": values.max(),
    }
    return {name: finite_or_none(number.item()) for name, number in numbers.items()}


def finite_or_none(values: Any) -> Any:
    """The number, or nested lists of numbers, with None for NaN and infinity, which JSON lacks."""
    if isinstance(values, list):
        return [finite_or_none(value) for value in values]
    return values if math.isfinite(values) else None
