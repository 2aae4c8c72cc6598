"""How a model's logits become scores and labels, the same for evaluate, predict, the server and exports.

A file records the activation and the thresholds of a multi-label model. `vitrail evaluate --calibrate` adds a
temperature, and a threshold below which a prediction has no label, to the metrics of the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from vitrail.base.errors import ConfigError, suggest
from vitrail.base.fields import is_real, short_repr

if TYPE_CHECKING:
    from numpy.typing import NDArray

Activation = Literal["softmax", "sigmoid"]
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0  # the range in which a temperature is searched
DEFAULT_THRESHOLD = 0.5  # of a class in a multi-label model
_MIN_IMAGES = 5  # with the class and without it; from fewer, its threshold would be mostly noise
_CHUNK_ROWS = 8192  # rows of logits in float64 at a time


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Softmax, or sigmoid for a model trained with binary cross-entropy."""

    activation: Activation = "softmax"
    thresholds: tuple[float, ...] | None = None
    """Multi-label models: a class is predicted if its score is above its threshold, one per class. None for
    models of one label per image."""
    temperature: float = 1.0
    """Logits are divided by it."""
    threshold: float | None = None
    """Below this score the prediction has no label ("don't know"); None if none has been calibrated."""
    labels: Sequence[str] = ()
    """One per class where scores are computed; empty in a bundle, which has its own, and without a head."""

    def __post_init__(self) -> None:
        if self.activation not in get_args(Activation):
            words = get_args(Activation)
            raise ConfigError(
                f"unknown activation {short_repr(self.activation)}. {suggest(str(self.activation), words)}"
            )
        if self.thresholds is None:
            return
        if self.activation != "sigmoid":
            raise ConfigError("thresholds belong to sigmoid scores; softmax scores have none.")
        if not all(is_real(one) and 0 <= one <= 1 for one in self.thresholds):
            raise ConfigError(f"thresholds must be numbers from 0 to 1, not {short_repr(self.thresholds)}.")

    @property
    def multilabel(self) -> bool:
        return self.thresholds is not None

    def compute(self, logits: NDArray[Any]) -> NDArray[np.float64]:
        """Scores (N, K) of logits (N, K)."""
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

    def select(self, columns: Sequence[int]) -> Scores:
        """The scores of some of the classes, in this order."""
        labels = [self.labels[k] for k in columns]
        chosen = None if self.thresholds is None else tuple(self.thresholds[k] for k in columns)
        return replace(self, labels=labels, thresholds=chosen)

    def calibrated(self, labels: Sequence[str] | None, classes: int, metrics: Mapping[str, Any]) -> Scores:
        """These scores with class names, numbers by default, and the calibration in a card's metrics."""
        named = replace(self, labels=labels or [str(number) for number in range(classes)])
        temperature, threshold = metrics.get("temperature"), metrics.get("threshold")
        # A threshold belongs to the scores at its temperature; without that it means nothing.
        if self.multilabel or not isinstance(temperature, (int, float)):
            return named
        if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            return named
        named = replace(named, temperature=float(temperature))
        if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 2:  # above 1 no score reaches it
            return named
        return replace(named, threshold=float(threshold))

    def check_classes(self, classes: int) -> None:
        """Check that there is a threshold for each class."""
        if self.thresholds is not None and len(self.thresholds) != classes:
            raise ConfigError(
                f"thresholds must be {classes} numbers, one for each class of the model, not "
                f"{len(self.thresholds)}."
            )

    def summary(self) -> str:
        """One phrase for a page or a table."""
        if self.thresholds is None:
            return f"{self.activation}, one label per image"
        low, high = min(self.thresholds, default=0.5), max(self.thresholds, default=0.5)
        at = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        return f"sigmoid, multi-label; thresholds {at}"

    def describe(self) -> dict[str, Any]:
        """What a file records, for JSON."""
        return {"activation": self.activation, "thresholds": self.thresholds}


def parse_scores(fields: Mapping[str, Any] | None, classes: int) -> Scores:
    """The scores in a file's JSON; a file without them has softmax, as all had before format 2."""
    fields = dict(fields or {})
    thresholds = fields.pop("thresholds", None)
    scores = Scores(
        activation=fields.pop("activation", "softmax"),
        thresholds=tuple(thresholds) if isinstance(thresholds, list) else thresholds,
    )
    if fields:
        raise ValueError(f"scores has no {', '.join(fields)}")
    scores.check_classes(classes)
    return scores


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-z)) without overflow."""
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -700, 700))))


def subtract_row_max(logits: NDArray[Any]) -> list[NDArray[np.float64]]:
    """Chunks of the logits in float64, minus the maximum of each row, so that exp cannot overflow."""
    starts = range(0, len(logits), _CHUNK_ROWS)
    chunks = [logits[start : start + _CHUNK_ROWS].astype(np.float64) for start in starts]
    return [chunk - chunk.max(axis=1, keepdims=True) for chunk in chunks]


# ---- thresholds of a multi-label model ------------------------------------------------------


def choose_thresholds(logits: NDArray[Any], targets: NDArray[Any]) -> tuple[float, ...]:
    """The threshold of each class that has the best F1 on these images, for logits and targets (N, K).

    It lies halfway between two neighboring scores; of equally good ones it is the nearest to 0.5. A class
    with too few images to choose by has 0.5.
    """
    scores = sigmoid(logits.astype(np.float64))
    return tuple(_best_f1(scores[:, k], targets[:, k] > 0) for k in range(scores.shape[1]))


def _best_f1(scores: NDArray[np.float64], target: NDArray[np.bool_]) -> float:
    positives = int(target.sum())
    if min(positives, len(target) - positives) < _MIN_IMAGES:
        return DEFAULT_THRESHOLD
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    ends = np.append(np.flatnonzero(np.diff(descending)), len(order) - 1)  # tied scores go together
    f1 = 2 * np.cumsum(target[order])[ends] / (ends + 1 + positives)
    cuts = (descending[ends] + np.append(descending[ends[:-1] + 1], 0.0)) / 2
    best = np.flatnonzero(f1 == f1.max())
    return float(cuts[best[np.abs(cuts[best] - DEFAULT_THRESHOLD).argmin()]])
