"""From logits to labels and scores, the same for `evaluate`, `predict`, the server and exported files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.evaluation.calibration import MAX_TEMPERATURE, MIN_TEMPERATURE, sigmoid, subtract_row_max

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.model.config import ViTConfig
    from vitrail.weights.bundle.bundle import Card
    from vitrail.weights.bundle.scores import Activation, Scores


@dataclass(frozen=True)
class Scale:
    """How logits become labels and scores: class names, activation, temperature, thresholds."""

    labels: Sequence[str]
    """One per class; empty if the model has no head."""
    temperature: float = 1.0
    threshold: float | None = None
    """Below this score the prediction has no label ("don't know"); None if none has been calibrated."""
    activation: Activation = "softmax"
    thresholds: tuple[float, ...] | None = None
    """Multi-label models: the score above which each class is predicted."""

    @property
    def multilabel(self) -> bool:
        return self.thresholds is not None

    def scores(self, logits: NDArray[Any]) -> NDArray[np.float64]:
        """Softmax or sigmoid with the temperature, (N, K): bit-equal to what `evaluate` computes."""
        if self.activation == "sigmoid":
            return sigmoid(logits.astype(np.float64) / self.temperature)
        powers = [np.exp(part / self.temperature) for part in subtract_row_max(logits)]
        return np.concatenate([part / part.sum(axis=1, keepdims=True) for part in powers])

    def predicted(self, scores: NDArray[np.float64]) -> list[int]:
        """The predicted classes for scores (K,), best first.

        One class, or none below the threshold; of a multi-label model, all classes above their thresholds.
        """
        if self.thresholds is not None:
            above = np.flatnonzero(scores > np.asarray(self.thresholds))
            return above[np.argsort(-scores[above], kind="stable")].tolist()
        best = int(scores.argmax())
        return [best] if self.threshold is None or scores[best] >= self.threshold else []

    def select(self, columns: Sequence[int]) -> Scale:
        """The scale of some of the classes, in this order."""
        labels = [self.labels[k] for k in columns]
        chosen = None if self.thresholds is None else tuple(self.thresholds[k] for k in columns)
        return replace(self, labels=labels, thresholds=chosen)


def load_scale(config: ViTConfig, labels: Sequence[str] | None, card: Card, scores: Scores) -> Scale:
    """Read the scale from a model file; `vitrail evaluate --calibrate` stores temperature and threshold."""
    labels = labels or [str(number) for number in range(config.classes)]
    how: dict[str, Any] = {"activation": scores.activation, "thresholds": scores.thresholds}
    metrics: Mapping[str, Any] = card.metrics
    temperature, threshold = metrics.get("temperature"), metrics.get("threshold")
    # A threshold belongs to the scores at its temperature; without that it means nothing.
    if scores.thresholds is not None or not isinstance(temperature, (int, float)):
        return Scale(labels, **how)
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return Scale(labels, **how)
    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 2:  # above 1 no score reaches it
        return Scale(labels, float(temperature), **how)
    return Scale(labels, float(temperature), float(threshold), **how)
