"""What features tell about a data set: near-duplicates, outliers and likely label errors.

| finding        | rule                                                                                   |
|----------------|----------------------------------------------------------------------------------------|
| near-duplicate | neighbors by their features whose pixels correlate by `SAME` or more                    |
| label error    | a classifier that has not seen the image is surer of another class, by `MARGIN`        |
| outlier        | the distance to the nearest images of its class is beyond Q3 + `OUTLIER` IQR           |

Distances are 1 - cosine. The classifier is logistic regression on the features, five times on four fifths of
the images; an image and its near-duplicates are in the same fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.base.errors import InputError, printable
from vitrail.evaluation.forward import BATCH, run_model
from vitrail.evaluation.probes import fit_head
from vitrail.images.formats.sources import Dataset
from vitrail.images.loader import CorruptFiles
from vitrail.images.rng import random_permutation
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.feature_statistics import unit_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.problems import DatasetReport

SAME = 0.96
MARGIN = 0.4
OUTLIER = 2.0
_CANDIDATES = 20  # neighbors of which the pixels are compared
_NEIGHBORS = 5  # of its class, for the distance of an image
_FOLDS = 5
_L2 = 0.1
_BLOCK = 1 << 24  # products in memory at once

SIDE = 40  # pixels of a thumbnail
_COMPARED = 24  # pixels of what is compared
_CROPS = (0.92, 0.84, 0.76)  # sides, as fractions
_WORTH_CROPPING = 0.5  # the correlation of the whole images below which crops are not tried
_MIN_SPREAD = 1e-3  # of a thumbnail; below, it is of one color and like any other
_PAIRS = 4096  # thumbnails compared at a time


@dataclass(frozen=True)
class NearDuplicate:
    """Two images that look the same."""

    first: int
    second: int
    cosine: float
    """Of their features."""
    correlation: float
    """Of their pixels."""
    across: bool
    """Whether they are in different splits."""


@dataclass(frozen=True)
class Outlier:
    """An image that is unlike all others."""

    index: int
    distance: float
    """To the nearest images of its class, as a multiple of the median of all images."""


@dataclass(frozen=True)
class Mislabeled:
    """An image whose label is probably wrong."""

    index: int
    suggested: int
    probability: float
    """Of the suggested class."""
    given: float
    """Of the class that the image has."""


@dataclass(frozen=True, eq=False)
class EmbeddedDataset:
    """Features (N, D) of length 1 of the readable images of all splits."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    """(N,); for multi-label data (N, K)."""
    splits: NDArray[np.int64]
    rows: NDArray[np.int64]
    """The index of each image in its split."""
    names: list[str]
    thumbnails: Tensor
    """(N, 1, 40, 40), in float16."""


@dataclass(frozen=True)
class Curation:
    """The findings; the most certain first."""

    duplicates: list[NearDuplicate]
    outliers: list[Outlier]
    mislabeled: list[Mislabeled]


def embed_dataset(
    bundle: Bundle,
    data: Dataset,
    *,
    workers: Any = "auto",
    batch: int = BATCH,
    progress: Callable[[int], None] = lambda done: None,
) -> EmbeddedDataset:
    """The pooled features of every image that can be read."""
    if bundle.preprocess is None:
        raise InputError(f"This needs a model of images, and the model takes {bundle.model.config.input}.")
    model, parts, done = bundle.model, [], 0

    def compute(images: Tensor) -> Tensor:
        """The pooled vector of each image, and its thumbnail."""
        return torch.cat([model.encode(images).pooled, thumbnails(images).flatten(1)], dim=1)

    def add_progress(images: int) -> None:
        progress(done + images)

    names: list[str] = []
    for number, split in enumerate(data.splits.values()):
        if not len(split):
            continue
        rows, valid = run_model(
            model,
            split,
            bundle.preprocess,
            compute=compute,
            batch=batch,
            workers=workers,
            corrupt=CorruptFiles("skip"),
            progress=add_progress,
        )
        done += len(split)
        readable = np.flatnonzero(valid.numpy() > 0)
        names += [split.names[int(row)] for row in readable]
        of_split = np.full(len(readable), number)
        parts.append((rows.numpy()[readable], split.labels[readable], of_split, readable))
    if not parts or not names:
        raise InputError("None of the images could be read, so there are no features to compare.")
    outputs, labels, splits, rows_of = (np.concatenate(column) for column in zip(*parts, strict=True))
    features, small = outputs[:, : -SIDE * SIDE], torch.from_numpy(outputs[:, -SIDE * SIDE :]).half()
    unit = unit_length(features).astype(np.float32)
    return EmbeddedDataset(unit, labels, splits, rows_of, names, small.reshape(-1, 1, SIDE, SIDE))


def curate(images: EmbeddedDataset) -> Curation:
    """Near-duplicates, outliers and likely label errors."""
    if len(images.features) < 2:
        return Curation([], [], [])
    duplicates = _duplicates(images)
    if images.labels.ndim == 2 or len(images.features) < 2 * _FOLDS or len(np.unique(images.labels)) < 2:
        return Curation(duplicates, [], [])  # multi-label, or too few images
    groups = _groups(len(images.names), duplicates)
    mislabeled = _mislabeled(images, groups)
    doubtful = {one.index for one in mislabeled}
    return Curation(duplicates, _outliers(images, groups, doubtful), mislabeled)


def _duplicates(images: EmbeddedDataset) -> list[NearDuplicate]:
    """Neighbors with the same pixels, the most similar first."""
    cosines, neighbors = _neighbors(images.features)
    first = np.repeat(np.arange(len(neighbors)), neighbors.shape[1])
    both = np.stack([first, neighbors.ravel()], axis=1)
    pairs, places = np.unique(np.sort(both, axis=1), axis=0, return_index=True)
    correlation = correlations(images.thumbnails, torch.from_numpy(pairs)).numpy()
    found = []
    for place in np.flatnonzero(correlation >= SAME):
        one, two = (int(index) for index in pairs[place])
        cosine = float(cosines.ravel()[places[place]])
        across = bool(images.splits[one] != images.splits[two])
        found.append(NearDuplicate(one, two, cosine, float(correlation[place]), across))
    return sorted(found, key=lambda one: -one.correlation)


def _neighbors(features: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Cosines and indices of the nearest other images, (N, k) each."""
    count = len(features)
    k = min(_CANDIDATES, count - 1)
    cosines, indices = np.empty((count, k), np.float32), np.empty((count, k), np.int64)
    step = max(1, _BLOCK // count)
    for at in range(0, count, step):
        block = features[at : at + step] @ features.T
        block[np.arange(len(block)), at + np.arange(len(block))] = -2  # not itself
        some = np.argpartition(-block, k - 1, axis=1)[:, :k]
        cosines[at : at + step], indices[at : at + step] = np.take_along_axis(block, some, 1), some
    return cosines, indices


def _groups(count: int, duplicates: list[NearDuplicate]) -> NDArray[np.int64]:
    """A number for each image, the same for images that are near-duplicates."""
    group = np.arange(count)
    for one in duplicates:
        group[group == group[one.second]] = group[one.first]
    return group


def _outliers(images: EmbeddedDataset, groups: NDArray[np.int64], doubtful: set[int]) -> list[Outlier]:
    """Images far from those of their class, but for those whose label is in doubt; a copy is no neighbor."""
    distance = np.zeros(len(groups))
    for label in np.unique(images.labels):
        rows = np.flatnonzero(images.labels == label)
        for some in np.array_split(rows, len(rows) ** 2 // _BLOCK + 1):
            far = 1 - images.features[some] @ images.features[rows].T
            far[groups[some][:, None] == groups[rows][None]] = np.inf
            near = np.sort(far, axis=1)[:, :_NEIGHBORS]
            known = np.isfinite(near)
            distance[some] = np.where(known, near, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    low, middle, high = np.quantile(distance, [0.25, 0.5, 0.75])
    rows = np.flatnonzero(distance > high + OUTLIER * (high - low))
    order = rows[np.argsort(-distance[rows])]
    return [Outlier(int(r), float(distance[r] / max(middle, 1e-9))) for r in order if int(r) not in doubtful]


def add_findings(report: DatasetReport, found: Curation, images: EmbeddedDataset, data: Dataset) -> None:
    """The findings by the names of the images; pairs with the same pixels are in the report already."""
    splits = list(data.splits)
    names = [f"{splits[n]}: {printable(name)}" for n, name in zip(images.splits, images.names, strict=True)]
    disputed = [[name.rpartition(" (")[0] for name in group] for group in report.conflicting_labels]
    same = [set(group) for group in (*report.duplicates, *report.leaked, *disputed)]
    pairs = [(one, [names[one.first], names[one.second]]) for one in found.duplicates]
    new = [(one, pair) for one, pair in pairs if not any(set(pair) <= group for group in same)]
    report.near_leaks = [pair for one, pair in new if one.across]
    report.near_duplicates = [pair for one, pair in new if not one.across]
    report.outliers = [names[one.index] for one in found.outliers]
    report.label_errors = [
        {
            "image": names[one.index],
            "label": printable(data.classes[images.labels[one.index]]),
            "suggested": printable(data.classes[one.suggested]),
            "probability": round(one.probability, 4),
        }
        for one in found.mislabeled
    ]


# ---- label errors ---------------------------------------------------------------------------


def _mislabeled(images: EmbeddedDataset, groups: NDArray[np.int64]) -> list[Mislabeled]:
    """Images of which a classifier that has not seen them is surer that they are of another class."""
    labels = images.labels
    p = out_of_fold(images.features, labels, int(labels.max()) + 1, groups).numpy()  # (N, K)
    given, suggested = p[np.arange(len(p)), labels], p.argmax(axis=1)
    best = p.max(axis=1)
    rows = np.flatnonzero(best - given > MARGIN)
    found = [Mislabeled(int(r), int(suggested[r]), float(best[r]), float(given[r])) for r in rows]
    return sorted(found, key=lambda one: one.given - one.probability)


def out_of_fold(
    features: NDArray[np.float32], labels: NDArray[np.int64], classes: int, groups: NDArray[np.int64]
) -> Tensor:
    """Probabilities (N, K) of each image, by logistic regression on the folds without it."""
    x, y = torch.from_numpy(features), torch.from_numpy(labels).long()
    fold = (random_permutation([0, 0], int(groups.max()) + 1) % _FOLDS)[torch.from_numpy(groups)]
    result = torch.zeros(len(x), classes, dtype=torch.float64)
    for number in range(_FOLDS):
        held_out = fold == number
        if held_out.any() and (~held_out).any():
            weight, bias = fit_head(x[~held_out], y[~held_out], classes, _L2)
            result[held_out] = (x[held_out].double() @ weight.T + bias).softmax(dim=1)
    return result


# ---- the same image -----


def thumbnails(images: Tensor) -> Tensor:
    """Gray thumbnails (B, 1, SIDE, SIDE) of normalized images (B, C, H, W)."""
    gray = images.float().mean(dim=1, keepdim=True)
    return F.interpolate(gray, (SIDE, SIDE), mode="bilinear", antialias=True)


def correlations(images: Tensor, pairs: Tensor) -> Tensor:
    """The largest correlation of each pair (P, 2) of thumbnails, over crops of either: (P,)."""
    return torch.cat([_compare(*images[block.T]) for block in pairs.split(_PAIRS)] or [torch.zeros(0)])


def _compare(first: Tensor, second: Tensor) -> Tensor:
    whole = [_unit(_resize(one.float())) for one in (first, second)]
    best = (whole[0] * whole[1]).sum(dim=1)
    rows = torch.nonzero(best > _WORTH_CROPPING)[:, 0]
    for top, left, side in _boxes():
        for one, other in ((first, whole[1]), (second, whole[0])):
            crop = one[rows, :, top : top + side, left : left + side].float()
            found = (_unit(_resize(crop)) * other[rows]).sum(dim=1)
            best[rows] = torch.maximum(best[rows], found)
    return best


def _boxes() -> Iterator[tuple[int, int, int]]:
    for fraction in _CROPS:
        side = round(fraction * SIDE)
        rest = SIDE - side
        yield from ((top, left, side) for top, left in ((rest // 2, rest // 2), (0, 0), (0, rest), (rest, 0)))
        yield rest, rest, side


def _resize(images: Tensor) -> Tensor:
    return F.interpolate(images, (_COMPARED, _COMPARED), mode="bilinear", antialias=True)


def _unit(images: Tensor) -> Tensor:
    """Rows of mean 0 and length 1; zeros for an image of one color."""
    rows = images.flatten(1)
    rows = rows - rows.mean(dim=1, keepdim=True)
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length > _MIN_SPREAD * _COMPARED, rows / length.clamp(min=1e-12), 0.0)
