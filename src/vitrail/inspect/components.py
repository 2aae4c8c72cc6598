"""Principal components, as several figures need them: in which directions do these rows differ most?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

SMALLEST = 1e-12  # a share of the variance below this is rounding, and its direction means nothing


def principal(rows: NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Unit directions (n, columns), most variance first, and the share of the variance along each.

    The rows' mean is taken out first. A direction and its opposite are the same component: the one
    is returned whose largest weight is positive, so that a figure is the same on every machine.
    Rows that are all equal have no components.
    """
    x = rows.astype(np.float64)
    x = x - x.mean(axis=0)
    tall = x.shape[0] >= x.shape[1]
    values, vectors = np.linalg.eigh(x.T @ x if tall else x @ x.T)  # the smaller of the two
    values, vectors = values[::-1].clip(min=0), vectors[:, ::-1]
    scale = float((rows.astype(np.float64) ** 2).sum())
    kept = values > SMALLEST * scale if scale else np.zeros(len(values), dtype=bool)
    found = vectors[:, kept].T if tall else (x.T @ vectors[:, kept] / np.sqrt(values[kept])).T
    largest = np.take_along_axis(found, np.abs(found).argmax(axis=1)[:, None], axis=1)
    return found * np.sign(largest), values[kept] / values.sum() if kept.any() else values[kept]
