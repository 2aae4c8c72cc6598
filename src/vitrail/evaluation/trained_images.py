"""How the evaluated images relate to those the model was trained on: the same ones, and ones unlike them.

A model's file has content keys of its training images, and statistics of their features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.evaluation.metrics import compute_metrics
from vitrail.weights.bundle.feature_statistics import FeatureStatistics, unit_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLAGGED = 0.05  # the largest fraction of validation images beyond the threshold
SHRINKAGE = 0.01  # of the covariance towards a multiple of the identity
_MIN_SPREAD = 1e-12  # of features of length 1; with less, all images have the same features


@dataclass(frozen=True)
class TrainedOn:
    """The evaluated images that are in the model's training set, and scores on the others."""

    images: int
    """Images that the model was trained on."""
    others: int
    """Images that it was not trained on; the scores are of these, and None if there are none."""
    loss: float | None = None
    top1: float | None = None
    mean_ap: float | None = None
    """For multi-label data."""
    is_exact: bool = True
    """False if one of a thousand others may be counted as a training image (a Bloom filter)."""

    def sentence(self) -> str:
        """What it means for the result."""
        about = "" if self.is_exact else "about "
        if not self.images:
            return "The model was trained on none of them."
        if not self.others:
            return "The model was trained on all of them: this is no estimate for new images."
        seen = f"The model was trained on {about}{self.images:,} of them"
        name, score = ("accuracy", self.top1) if self.mean_ap is None else ("mean AP", self.mean_ap)
        if score is None:
            return f"{seen}."
        return f"{seen}; on the other {self.others:,}, its {name} is {100 * score:.2f} %."


def score_others(
    trained: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    logits: NDArray[Any] | None,
    labels: NDArray[np.int64],
    classes: Sequence[str],
    is_exact: bool,
) -> TrainedOn:
    """Count the training images among the valid ones, and evaluate the others.

    Args:
        logits: (N, K), in the order of the classes; None for a model without a head.
    """
    seen, others = valid & trained, valid & ~trained
    found = TrainedOn(int(seen.sum()), int(others.sum()), is_exact=is_exact)
    if logits is None or not found.others:
        return found
    scores = compute_metrics(logits, labels, classes, others, worst=0)
    return replace(found, loss=scores.loss, top1=scores.top1, mean_ap=scores.mean_ap)


# ---- out of distribution -----


@dataclass(frozen=True)
class OutOfDistribution:
    """How many of the evaluated images are unlike those the model was trained on."""

    images: int
    fraction: float
    """Of the images that could be read; of the model's validation images it was at most 0.05."""

    def sentence(self) -> str:
        return (
            f"{self.images:,} images ({self.fraction:.1%}) are unlike the training images; of the model's "
            f"validation images at most {FLAGGED:.0%} were"
        )


def count_flagged(scores: NDArray[Any]) -> OutOfDistribution:
    """Count the scores above 1 (`FeatureStatistics.scores`)."""
    flagged = int((scores > 1).sum())
    return OutOfDistribution(flagged, flagged / max(1, len(scores)))


def fit_statistics(
    features: NDArray[Any], labels: NDArray[np.int64], validation: NDArray[Any], max_bytes: int
) -> FeatureStatistics | None:
    """Fit class means and a covariance to training features (N, D), a threshold to validation ones (M, D).

    For multi-label data, labels (N, K), the features have one mean. None if the statistics would take more
    than `max_bytes`, if there are too few images, or if their features hardly differ.
    """
    x = unit_length(features)
    center = x.mean(axis=0)
    x = x - center
    if labels.ndim == 2:
        means, residual = np.zeros((1, x.shape[1])), x  # x is centered
    else:
        _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
        sums = np.zeros((len(counts), x.shape[1]))
        np.add.at(sums, index, x)
        means = sums / counts[:, None]
        residual = x - means[index]
    covariance = residual.T @ residual / len(x)
    spread = np.trace(covariance) / len(covariance)
    if len(validation) == 0 or not spread > _MIN_SPREAD:
        return None
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * spread * np.eye(len(covariance))
    values, vectors = np.linalg.eigh(covariance)
    whitening = vectors / np.sqrt(values * len(values))  # so that a distance is about 1
    whitened = means @ whitening
    if max(np.abs(whitening).max(), np.abs(whitened).max()) > np.finfo(np.float16).max:
        return None  # the features of all images are nearly the same
    statistics = FeatureStatistics(
        center.astype(np.float32),
        whitening.astype(np.float16),
        whitened.astype(np.float16),
        np.ones(1, np.float32),
    )
    if statistics.bytes > max_bytes:
        return None
    # The smallest threshold that flags at most `FLAGGED` of the validation images, rounded up: the image at
    # the threshold is not beyond it.
    distances = np.sort(statistics.distances(validation))
    threshold = distances[len(distances) - 1 - int(FLAGGED * len(distances))]
    stored = np.nextafter(np.array([threshold], np.float32), np.float32(np.inf))
    return replace(statistics, threshold=np.maximum(stored, np.float32(1e-12)))
