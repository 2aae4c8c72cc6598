"""Calibration of a classifier: reliability, temperature scaling and a confidence threshold.

The confidence of a prediction is the probability of the predicted class. A model is calibrated if predictions
of confidence c are correct with probability c. The expected calibration error (ECE) measures the gap.
Temperature scaling divides the logits by one number, which narrows the gap and changes no prediction (Guo et
al. 2017, "On Calibration of Modern Neural Networks"). A threshold on the confidence trades coverage for
accuracy: less certain predictions are rejected (selective classification).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError
from vitrail.weights.bundle.scores import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Activation,
    sigmoid,
    subtract_row_max,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.weights.bundle.bundle import Bundle

_BINS = 15


@dataclass(frozen=True)
class ReliabilityBin:
    """A bin of the reliability diagram: the images with a confidence in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean confidence, 0 in an empty bin."""
    accuracy: float
    """Accuracy, 0 in an empty bin."""


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Predictions of at least this confidence are accepted, the others rejected."""

    confidence: float
    accepted: int
    """Number of accepted predictions."""
    accuracy: float
    """Accuracy of the accepted predictions (selective accuracy)."""


@dataclass(frozen=True)
class StoredCalibration:
    """The temperature and the threshold stored in a model's file, evaluated on these images."""

    temperature: float
    ece: float
    threshold: ConfidenceThreshold | None


@dataclass(frozen=True)
class Calibration:
    """Result of temperature scaling on these images."""

    temperature: float
    fitted: bool
    """False if no temperature minimizes the loss; the temperature is then 1."""
    ece: float
    """ECE at temperature 1."""
    ece_scaled: float
    """ECE at the fitted temperature."""
    bins: list[ReliabilityBin]
    """Reliability diagram at temperature 1."""
    target_accuracy: float
    """The selective accuracy that the threshold must reach."""
    threshold: ConfidenceThreshold | None
    """On confidences at the fitted temperature; None if no threshold reaches that accuracy."""
    stored: StoredCalibration | None = None
    scaled_bins: list[ReliabilityBin] = field(default_factory=list)
    """Reliability diagram at the fitted temperature."""


def calibrate(
    logits: NDArray[Any],
    labels: NDArray[np.int64],
    target_accuracy: float,
    stored: dict[str, Any] | None = None,
    activation: Activation = "softmax",
) -> Calibration:
    """Fit a temperature to logits (N, K) and labels (N,), then a threshold for a selective accuracy.

    Args:
        stored: the metrics in the model's file, which may hold a temperature and a threshold.
        activation: of the model's scores; a temperature is fitted for softmax only.
    """
    predicted, confidence = predict_top1(logits, activation=activation)
    correct = predicted == labels
    best = fit_temperature(logits, labels) if activation == "softmax" else MIN_TEMPERATURE
    fitted = MIN_TEMPERATURE < best < MAX_TEMPERATURE
    temperature = best if fitted else 1.0
    scaled = predict_top1(logits, temperature, activation)[1]
    bins, scaled_bins = reliability_bins(confidence, correct), reliability_bins(scaled, correct)
    return Calibration(
        temperature=temperature,
        fitted=fitted,
        ece=ece(bins),
        ece_scaled=ece(scaled_bins),
        bins=bins,
        target_accuracy=target_accuracy,
        threshold=find_threshold(scaled, correct, target_accuracy),
        stored=_evaluate_stored(logits, correct, stored or {}, activation),
        scaled_bins=scaled_bins,
    )


def predict_top1(
    logits: NDArray[Any], temperature: float = 1.0, activation: Activation = "softmax"
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Predicted class and confidence of each image, both (N,). Ties go to the first class."""
    predicted = logits.argmax(axis=1).astype(np.int64)
    if activation == "sigmoid":
        return predicted, sigmoid(logits.max(axis=1).astype(np.float64) / temperature)
    chunks = [1 / np.exp(z / temperature).sum(axis=1) for z in subtract_row_max(logits)]
    return predicted, np.concatenate([np.zeros(0), *chunks])


# ---- ECE ------------------------------------------------------------------------------------


def reliability_bins(
    confidence: NDArray[Any], correct: NDArray[Any], bins: int = _BINS
) -> list[ReliabilityBin]:
    """Bins of equal width from 0 to 1. A confidence on an edge belongs to the lower bin, as in the paper."""
    index = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    divisor = np.maximum(count, 1)
    mean = np.bincount(index, confidence, minlength=bins) / divisor
    accuracy = np.bincount(index, correct.astype(np.float64), minlength=bins) / divisor
    return [
        ReliabilityBin(i / bins, (i + 1) / bins, int(count[i]), float(mean[i]), float(accuracy[i]))
        for i in range(bins)
    ]


def ece(bins: list[ReliabilityBin]) -> float:
    """Expected calibration error: mean distance of confidence and accuracy, weighted by the bins' counts."""
    count = sum(one.count for one in bins)
    return sum(one.count * abs(one.confidence - one.accuracy) for one in bins) / max(count, 1)


# ---- temperature ----------------------------------------------------------------------------


def fit_temperature(logits: NDArray[Any], labels: NDArray[np.int64]) -> float:
    """The temperature T that minimizes the cross-entropy of softmax(logits / T).

    The loss is convex in b = 1 / T, so its derivative has one root. Newton's method finds it, with bisection
    (in log b) where a step leaves the bracket. If the loss has no minimum, as when every prediction is
    correct, the result is MIN_TEMPERATURE or MAX_TEMPERATURE.
    """
    chunks = subtract_row_max(logits)
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    b = 1.0
    slope, curvature = _loss_derivatives(chunks, labels, b)
    if slope == 0 and curvature == 0:  # all logits of each row are equal: every temperature has the same loss
        return 1.0
    if _loss_derivatives(chunks, labels, high)[0] <= 0:
        return MIN_TEMPERATURE
    if _loss_derivatives(chunks, labels, low)[0] >= 0:
        return MAX_TEMPERATURE
    for _ in range(200):
        low, high = (low, b) if slope > 0 else (b, high)
        step = b - slope / curvature if curvature > 0 else 0.0
        last, b = b, step if low < step < high else math.sqrt(low * high)
        if abs(b - last) <= 1e-12 * b:
            break
        slope, curvature = _loss_derivatives(chunks, labels, b)
    return 1 / b


def _loss_derivatives(
    chunks: list[NDArray[np.float64]], labels: NDArray[np.int64], b: float
) -> tuple[float, float]:
    """First and second derivative, with respect to b, of the mean cross-entropy of softmax(b z)."""
    first = second = 0.0
    start = 0
    for z in chunks:
        y = labels[start : start + len(z)]
        start += len(z)
        p = np.exp(b * z)
        p /= p.sum(axis=1, keepdims=True)
        mean = (p * z).sum(axis=1)
        first += float((mean - z[np.arange(len(z)), y]).sum())
        second += float((p * (z - mean[:, None]) ** 2).sum())
    return first / start, second / start


# ---- threshold ------------------------------------------------------------------------------


def find_threshold(
    confidence: NDArray[Any], correct: NDArray[Any], target_accuracy: float
) -> ConfidenceThreshold | None:
    """The lowest threshold with at least this selective accuracy, hence the largest coverage; or None."""
    check_target_accuracy(target_accuracy)
    order = np.argsort(-confidence, kind="stable")
    descending = confidence[order]
    accuracy = np.cumsum(correct[order]) / np.arange(1, len(order) + 1)
    last_of_ties = np.append(descending[1:] != descending[:-1], True)[: len(order)]  # accepted together
    candidates = np.flatnonzero((accuracy >= target_accuracy) & last_of_ties)
    if not len(candidates):
        return None
    last = candidates[-1]
    return ConfidenceThreshold(float(descending[last]), int(last) + 1, float(accuracy[last]))


def check_target_accuracy(target_accuracy: float) -> None:
    if not 0 < target_accuracy <= 1:
        raise InputError(
            f"target_accuracy must be above 0 and at most 1, not {target_accuracy:g}; use 0.95, say."
        )


# ---- calibration in a model's file ----------------------------------------------------------


def _evaluate_stored(
    logits: NDArray[Any], correct: NDArray[Any], metrics: dict[str, Any], activation: Activation
) -> StoredCalibration | None:
    """Evaluate a file's temperature and threshold on these logits; None without a usable temperature."""
    temperature, confidence = metrics.get("temperature"), metrics.get("threshold")
    if not isinstance(temperature, (int, float)) or not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return None
    scaled = predict_top1(logits, temperature, activation)[1]
    threshold = None
    if isinstance(confidence, (int, float)):
        accepted = scaled >= confidence
        accuracy = float(correct[accepted].mean()) if accepted.any() else 0.0
        threshold = ConfidenceThreshold(float(confidence), int(accepted.sum()), accuracy)
    return StoredCalibration(float(temperature), ece(reliability_bins(scaled, correct)), threshold)


def with_calibration(bundle: Bundle, calibration: Calibration) -> Bundle:
    """A copy of the bundle with this temperature and threshold in its card."""
    metrics = {n: value for n, value in bundle.card.metrics.items() if n not in ("temperature", "threshold")}
    metrics["temperature"] = calibration.temperature
    if calibration.threshold is not None:
        metrics["threshold"] = calibration.threshold.confidence
    return replace(bundle, card=replace(bundle.card, metrics=metrics))
