"""The prediction for each image of an evaluation, with the scores that `vitrail predict` gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.weights.bundle.scores import Scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP = 5
_ROWS = 8192  # rows of scores in memory at a time


@dataclass(frozen=True)
class ImagePrediction:
    """The prediction for one image."""

    name: str
    label: str
    """The true class; those of multi-label data are joined by |."""
    predicted: str
    """The predicted class; those of a multi-label model are joined by |, and there may be none."""
    correct: bool
    confidence: float
    """The score of the most likely class."""
    top: list[dict[str, Any]]
    """The most likely classes, as {"label": ..., "score": ...}."""


@dataclass(frozen=True, eq=False)
class ImagePredictions(Sequence[ImagePrediction]):
    """The predictions for the images that could be read, in their order; rows are made on demand."""

    names: Sequence[str]
    labels: NDArray[np.int64]
    """(N,), or (N, K) of 0 and 1 for multi-label data."""
    classes: Sequence[str]
    best: NDArray[np.int32]
    """The most likely classes, (N, k)."""
    scores: NDArray[np.float64]
    """Their scores, (N, k)."""
    predicted: NDArray[np.bool_] | None = None
    """Multi-label data: the classes above their thresholds, (N, K)."""

    def __len__(self) -> int:
        return len(self.best)

    def __getitem__(self, index: int) -> ImagePrediction:  # type: ignore[override]
        best, scores = self.best[index].tolist(), self.scores[index].tolist()
        top = [{"label": self.classes[k], "score": score} for k, score in zip(best, scores, strict=True)]
        if self.predicted is None:
            true, predicted = [int(self.labels[index])], [best[0]]
        else:
            true = np.flatnonzero(self.labels[index]).tolist()
            predicted = np.flatnonzero(self.predicted[index]).tolist()
        label, said = ("|".join(self.classes[k] for k in indices) for indices in (true, predicted))
        return ImagePrediction(self.names[index], label, said, true == predicted, scores[0], top)

    def as_rows(self) -> Iterator[dict[str, Any]]:
        """Each prediction as a dictionary, for JSON."""
        return (asdict(self[index]) for index in range(len(self)))


def predict_images(
    logits: NDArray[Any],
    labels: NDArray[np.int64],
    classes: Sequence[str],
    valid: NDArray[np.bool_],
    names: Sequence[str],
    scale: Scores,
) -> ImagePredictions:
    """Predictions from logits (N, K), whose columns are the classes of the data.

    Args:
        valid: (N,), False for images that could not be read.
        scale: how these logits become scores.
    """
    rows = np.flatnonzero(valid)
    k = min(TOP, len(classes))
    best, top_scores = np.empty((len(rows), k), np.int32), np.empty((len(rows), k))
    multilabel = labels.ndim == 2
    predicted = np.empty((len(rows), len(classes)), bool) if multilabel else None
    thresholds = np.full(len(classes), 0.5) if scale.thresholds is None else np.array(scale.thresholds)
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        scores = scale.compute(logits[rows[part]])
        best[part] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        top_scores[part] = np.take_along_axis(scores, best[part].astype(np.int64), axis=1)
        if predicted is not None:
            predicted[part] = scores > thresholds
    return ImagePredictions(
        [names[i] for i in rows.tolist()], labels[rows], classes, best, top_scores, predicted
    )
