"""Numbers as the pages say them."""

from __future__ import annotations

import math


def percent(share: float) -> str:
    """A share in percent; with more digits where 100 % would be said of less."""
    return f"{100 * share:.{2 if 0.9995 <= share < 1 else 1}f} %"


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): it holds for few pictures and near 0 and 1 too."""
    share, more = right / count, z * z / count
    middle = (share + more / 2) / (1 + more)
    reach = z / (1 + more) * math.sqrt(share * (1 - share) / count + more / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def size(count: int) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.1f} GB"
