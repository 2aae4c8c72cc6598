"""Principal component analysis, used by several figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_SMALLEST = 1e-12  # components with less than this fraction of the variance are rounding errors


def principal(rows: NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Principal components (n, columns) as unit vectors, and the fraction of the variance each explains.

    The rows are centered first. The sign of a component is arbitrary; it is chosen so that the largest weight
    is positive, which makes figures reproducible across machines. Rows that are all equal have no components.
    """
    x = rows.astype(np.float64)
    x = x - x.mean(axis=0)
    tall = x.shape[0] >= x.shape[1]
    values, vectors = np.linalg.eigh(x.T @ x if tall else x @ x.T)  # the smaller of the two
    values, vectors = values[::-1].clip(min=0), vectors[:, ::-1]
    scale = float((rows.astype(np.float64) ** 2).sum())
    valid = values > _SMALLEST * scale if scale else np.zeros(len(values), dtype=bool)
    components = vectors[:, valid].T if tall else (x.T @ vectors[:, valid] / np.sqrt(values[valid])).T
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    return components * np.sign(largest), values[valid] / values.sum() if valid.any() else values[valid]
