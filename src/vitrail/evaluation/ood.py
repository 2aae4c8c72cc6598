"""Out of distribution: fit the feature statistics that go into a model's file, and count by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.weights.bundle.feature_statistics import FeatureStatistics, unit_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLAGGED = 0.05  # the largest fraction of validation images beyond the threshold
_MIN_SPREAD = 1e-12  # of features of length 1; with less, all images have the same features
SHRINKAGE = 0.01  # of the covariance towards a multiple of the identity


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
    """Class means and a shared covariance of training features (N, D), with a threshold by validation (M, D).

    For multi-label data, labels (N, K), the features have one mean. None if the statistics would take more
    than `max_bytes`, if there are too few images, or if their features hardly differ.
    """
    x = unit_length(features)
    center = x.mean(axis=0)
    x = x - center
    means, nearest = _class_means(x, labels)
    residual = x - means[nearest]
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
    return None if statistics.bytes > max_bytes else _with_threshold(statistics, validation)


def _class_means(x: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[Any, Any]:
    """The mean of each class that has images, (m, D), and the index of each image's mean, (N,)."""
    if labels.ndim == 2:
        return np.zeros((1, x.shape[1])), np.zeros(len(x), np.int64)  # x is centered
    _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), x.shape[1]))
    np.add.at(sums, index, x)
    return sums / counts[:, None], index


def _with_threshold(statistics: FeatureStatistics, validation: NDArray[Any]) -> FeatureStatistics:
    """The statistics with the smallest threshold that flags at most `FLAGGED` of the validation images."""
    distances = np.sort(statistics.distances(validation))
    threshold = distances[len(distances) - 1 - int(FLAGGED * len(distances))]
    # Rounded up: the image at the threshold is not beyond it.
    stored = np.nextafter(np.array([threshold], np.float32), np.float32(np.inf))
    return replace(statistics, threshold=np.maximum(stored, np.float32(1e-12)))
