"""Whether position embeddings of adjacent patches are alike, for the lab `positions`.

The correlation of similarity and distance over all pairs also counts patches that are blank in almost every
image, such as the border of MNIST: always black, they look the same wherever they are, and their embeddings
may well be alike at opposite sides. So the measure here compares adjacent patches with all other pairs, and
can leave out blank patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitrail.images.formats.sources import Dataset
from vitrail.views.positions import Positions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

USED = 0.1  # fraction of the training images in which a patch must have more than one pixel value
ALL, NOT_BLANK = "all patches", "patches that are not blank"


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Mean similarity of adjacent patches minus that of other pairs, by epoch and seed."""

    excess: Mapping[str, Mapping[int, list[float]]]
    """For `ALL` and `NOT_BLANK`: by epoch, a list over seeds; empty where the patches are too few."""
    patches: Mapping[str, int]
    """How many patches that are."""


def compare_neighbors(maps: Mapping[int, Sequence[Positions]], data: Dataset) -> Neighbors:
    """Compare adjacent patches with other pairs in the similarity maps of each epoch and seed."""
    grid = next(iter(maps.values()))[0].grid
    masks = {ALL: np.ones(grid, dtype=bool), NOT_BLANK: used_patches(data, grid)}
    excess = {
        kind: {epoch: _excess_by_seed(per_seed, mask) for epoch, per_seed in maps.items()}
        for kind, mask in masks.items()
    }
    return Neighbors(excess, {kind: int(mask.sum()) for kind, mask in masks.items()})


def _excess_by_seed(maps: Sequence[Positions], mask: Mask) -> list[float]:
    found = (neighbor_excess(one.similarity, mask) for one in maps)
    return [value for value in found if value is not None]


def used_patches(data: Dataset, grid: tuple[int, int]) -> Mask:
    """(h, w): the patches with more than one pixel value in at least `USED` of the training images.

    Image files are not read for it: all of their patches count as used.
    """
    images, (h, w) = data.train.images, grid
    if images is None:
        return np.ones(grid, dtype=bool)
    n, height, width, channels = images.shape
    patches = images.reshape(n, h, height // h, w, width // w, channels)
    varies = (patches != patches[:, :, :1, :, :1]).any(axis=(2, 4, 5))  # (n, h, w)
    return varies.mean(axis=0) >= USED


def neighbor_excess(similarity: NDArray[np.float64], mask: Mask) -> float | None:
    """Mean similarity of pairs side by side or one above the other minus that of all other pairs.

    None if one of the two kinds has no pair.

    Args:
        similarity: (N, N), patches in row-major order.
        mask: (h, w), the patches to compare; pairs with another patch are left out.
    """
    row, column = np.nonzero(mask)
    steps = np.abs(row[:, None] - row) + np.abs(column[:, None] - column)
    values = similarity[np.ix_(mask.ravel(), mask.ravel())]
    adjacent, others = values[steps == 1], values[steps > 1]
    return float(adjacent.mean() - others.mean()) if adjacent.size and others.size else None
