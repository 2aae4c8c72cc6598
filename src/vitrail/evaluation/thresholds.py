"""Thresholds of a multi-label model: the score above which each class is predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.evaluation.calibration import sigmoid

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT = 0.5
MIN_IMAGES = 5  # with the class and without it; from fewer, a threshold would be mostly noise


def choose_thresholds(logits: NDArray[Any], targets: NDArray[Any]) -> tuple[float, ...]:
    """The threshold of each class that has the best F1 on these images, for logits and targets (N, K).

    It lies halfway between two neighboring scores. Of equally good ones it is the nearest to 0.5, which it
    is, too, for a class with too few images to choose by.
    """
    scores = sigmoid(logits.astype(np.float64))
    return tuple(_best_f1(scores[:, k], targets[:, k] > 0) for k in range(scores.shape[1]))


def _best_f1(scores: NDArray[np.float64], target: NDArray[np.bool_]) -> float:
    positives = int(target.sum())
    if min(positives, len(target) - positives) < MIN_IMAGES:
        return DEFAULT
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    ends = np.append(np.flatnonzero(np.diff(descending)), len(order) - 1)  # tied scores go together
    f1 = 2 * np.cumsum(target[order])[ends] / (ends + 1 + positives)
    cuts = (descending[ends] + np.append(descending[ends[:-1] + 1], 0.0)) / 2
    best = np.flatnonzero(f1 == f1.max())
    return float(cuts[best[np.abs(cuts[best] - DEFAULT).argmin()]])
