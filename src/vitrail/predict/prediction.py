"""What a model says of one picture, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import InputError
from vitrail.evaluation.calibration import COLDEST, HOTTEST, below_largest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.config import ViTConfig
    from vitrail.weights.bundle import Card


@dataclass(frozen=True)
class Scale:
    """How a model's logits become labels and scores."""

    labels: Sequence[str]
    """A name for each class; none where the model has no head."""
    temperature: float = 1.0
    threshold: float | None = None
    """Below this score the model does not know; None where nobody has found one."""

    def scores(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Probabilities (N, K) of logits (N, K), with the temperature: to the bit those of `evaluate`."""
        powers = [np.exp(part / self.temperature) for part in below_largest(logits)]
        return np.concatenate([part / part.sum(axis=1, keepdims=True) for part in powers])


def scale_of(config: ViTConfig, labels: Sequence[str] | None, card: Card) -> Scale:
    """The scale in a model's file; `vitrail evaluate --calibrate` puts temperature and threshold there."""
    labels = labels or [str(number) for number in range(config.classes)]
    metrics: Mapping[str, Any] = card.metrics
    temperature, threshold = metrics.get("temperature"), metrics.get("threshold")
    # A threshold is one for scores with its temperature: without that it means nothing.
    if not isinstance(temperature, (int, float)) or not COLDEST <= temperature <= HOTTEST:
        return Scale(labels)
    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 2:  # above 1 it is never sure
        return Scale(labels, float(temperature))
    return Scale(labels, float(temperature), float(threshold))


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says of one picture."""

    name: str
    """Its path as it was given, or "picture 3" for the fourth of a list."""
    label: str | None = None
    """The most likely class; None where the model does not know, has no head, or there is an error."""
    score: float | None = None
    """How probable the most likely class is, 0 to 1."""
    error: str | None = None
    """Why there is no answer, where there is none: mostly, why the picture could not be read."""
    embedding: NDArray[np.float32] | None = field(default=None, repr=False)
    """The pooled vector, (D,)."""
    logits: NDArray[np.float32] | None = field(default=None, repr=False)
    """As the model gave them, before any temperature, (K,)."""
    scale: Scale = field(default=Scale(()), repr=False)

    @property
    def unsure(self) -> bool:
        """Whether the model was asked and does not know; `top` has its guesses."""
        return self.score is not None and self.label is None

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most likely classes with their scores; none of a picture that could not be read."""
        if not isinstance(count, int) or count < 1:
            raise InputError("top must be a number of classes, 1 or more.", repr(count), "Such as 5.")
        if self.error is not None:
            return []
        if self.logits is None:
            do = "Use .embedding, or give the model a head with vitrail.surgery.reclass."
            raise InputError("top needs a model that knows classes.", "one without a head", do)
        scores = self.scale.scores(self.logits[None])[0]
        best = np.argsort(-scores, kind="stable")[:count]  # ties go to the first, as everywhere
        return [(self.scale.labels[i], float(scores[i])) for i in best]
