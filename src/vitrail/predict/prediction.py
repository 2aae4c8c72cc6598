"""The prediction for one image: label, score, embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import InputError
from vitrail.evaluation.calibration import MAX_TEMPERATURE, MIN_TEMPERATURE, subtract_row_max

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.config import ViTConfig
    from vitrail.weights.bundle import Card


@dataclass(frozen=True)
class Scale:
    """How logits become labels and scores: class names, temperature, threshold."""

    labels: Sequence[str]
    """One per class; empty if the model has no head."""
    temperature: float = 1.0
    threshold: float | None = None
    """Below this score the prediction has no label ("don't know"); None if none has been calibrated."""

    def scores(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Softmax with the temperature, (N, K): bit-equal to what `evaluate` computes."""
        powers = [np.exp(part / self.temperature) for part in subtract_row_max(logits)]
        return np.concatenate([part / part.sum(axis=1, keepdims=True) for part in powers])


def load_score_scale(config: ViTConfig, labels: Sequence[str] | None, card: Card) -> Scale:
    """Read the scale from a model file; `vitrail evaluate --calibrate` stores temperature and threshold."""
    labels = labels or [str(number) for number in range(config.classes)]
    metrics: Mapping[str, Any] = card.metrics
    temperature, threshold = metrics.get("temperature"), metrics.get("threshold")
    # A threshold belongs to the scores at its temperature; without that it means nothing.
    if not isinstance(temperature, (int, float)) or not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return Scale(labels)
    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 2:  # above 1 no score reaches it
        return Scale(labels, float(temperature))
    return Scale(labels, float(temperature), float(threshold))


@dataclass(frozen=True, eq=False)
class Prediction:
    """The prediction for one image."""

    name: str
    """Its path as given, or "image 3" for the fourth image of a list."""
    label: str | None = None
    """The most likely class; None below the threshold, without a head, or on an error."""
    score: float | None = None
    """The probability of the most likely class."""
    error: str | None = None
    """Why there is no prediction, mostly why the image could not be read."""
    embedding: NDArray[np.float32] | None = field(default=None, repr=False)
    """The pooled vector, (D,)."""
    logits: NDArray[np.float32] | None = field(default=None, repr=False)
    """Before any temperature, (K,)."""
    scale: Scale = field(default=Scale(()), repr=False)

    @property
    def unsure(self) -> bool:
        """Whether the score is below the threshold; `top` still lists the classes."""
        return self.score is not None and self.label is None

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most likely classes with their scores; empty for an image that could not be read."""
        if not isinstance(count, int) or count < 1:
            raise InputError(f"top must be an integer of at least 1, not {count!r}.")
        if self.error is not None:
            return []
        if self.logits is None:
            raise InputError(
                "This model has no head, so there are no classes to rank; use .embedding, or add a head with "
                "vitrail.surgery.reclass."
            )
        scores = self.scale.scores(self.logits[None])[0]
        best = np.argsort(-scores, kind="stable")[:count]  # ties go to the first class
        return [(self.scale.labels[i], float(scores[i])) for i in best]
