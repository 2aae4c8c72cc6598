"""Classification metrics, and the prediction for each image: pure functions of logits and labels.

Everything is computed in float64 over all images at once, so the numbers depend on the batch size only by
the rounding of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError
from vitrail.evaluation.calibration import ece, predict_top1, reliability_bins
from vitrail.weights.bundle.scores import Scores, sigmoid, subtract_row_max

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_CONFUSION = 200  # classes; a larger confusion matrix is not computed
_WORST = 20  # mistakes listed
_TOP = 5  # classes listed for each image
_ROWS = 8192  # rows of scores in memory at a time


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class."""

    name: str
    count: int
    """Images labeled with this class."""
    precision: float | None
    """Fraction of the predictions of this class that are correct; None if it was never predicted."""
    recall: float | None
    """Fraction of the images of this class that were predicted correctly; None if there are none."""
    f1: float | None = None
    """Harmonic mean of precision and recall; None for a class without images. 0 if none was found."""
    ap: float | None = None
    """Average precision, for multi-label data."""


@dataclass(frozen=True)
class Mistake:
    """A misclassified image and the model's confidence."""

    name: str
    predicted: str
    label: str
    confidence: float


@dataclass(frozen=True)
class ClassificationMetrics:
    """Classification metrics of a model; accuracies and precisions lie between 0 and 1."""

    count: int
    """Images evaluated."""
    loss: float
    """Mean cross-entropy, or binary cross-entropy for multi-label data."""
    per_class: list[ClassMetrics]
    mistakes: list[Mistake]
    """Wrong predictions of the highest confidence, in descending order."""
    macro_f1: float | None = None
    """Mean F1 over the classes that have images, each with the same weight."""
    top1: float | None = None
    top5: float | None = None
    """None for five classes or fewer, where it is always 1."""
    ece: float | None = None
    confusion: list[list[int]] | None = None
    """Rows are labels, columns are predictions."""
    mean_ap: float | None = None
    """Multi-label data: mean average precision over the classes."""
    exact: float | None = None
    """Multi-label data: fraction of the images with all labels predicted correctly (exact match)."""


def compute_metrics(
    logits: NDArray[Any],
    labels: NDArray[np.int64],
    classes: Sequence[str],
    valid: NDArray[Any] | None = None,
    names: Sequence[str] | None = None,
    worst: int = _WORST,
    scores: Scores | None = None,
) -> ClassificationMetrics:
    """Compute metrics of logits (N, K) for labels (N,), or multi-label targets (N, K) of 0 and 1.

    Args:
        scores: how these logits become scores. By default by softmax for labels (N,), and by sigmoid with
            thresholds of 0.5 for targets (N, K).
        valid: (N,), 0 for images to ignore.
        names: names of the images; their indices by default.
        worst: number of mistakes to list.
    """
    _check_shapes(logits, labels, classes)
    scores, K = scores or Scores(), len(classes)
    rows = np.arange(len(logits)) if valid is None else np.flatnonzero(valid)
    if not len(rows):
        raise InputError("There are no images to evaluate: none could be read. Check the data.")
    logits, labels = logits[rows], labels[rows]
    bad = int((~np.isfinite(logits)).any(axis=1).sum())
    if bad:
        raise InputError(
            f"The model's logits are NaN or infinite for {bad:,} of {len(logits):,} images; check its "
            "weights with `vitrail info MODEL --check`."
        )
    if labels.ndim == 2:  # any number of classes per image; a score above its threshold predicts the class
        z, target = logits.astype(np.float64), labels > 0
        positive = sigmoid(z) > class_thresholds(scores, K)
        predicted, confidence = predict_top1(logits, activation="sigmoid")
        each = np.arange(len(z))
        wrong = ~target[each, predicted] & positive[each, predicted]
        hits, count, predictions = (array.sum(axis=0) for array in (target & positive, target, positive))
        aps = [_average_precision(z[:, k], target[:, k]) for k in range(K)]
        loss = float((np.maximum(z, 0) - z * target + np.log1p(np.exp(-np.abs(z)))).mean())
    else:
        predicted, confidence = predict_top1(logits, activation=scores.activation)
        wrong, aps = predicted != labels, []
        count, predictions = np.bincount(labels, minlength=K), np.bincount(predicted, minlength=K)
        hits = np.bincount(labels[~wrong], minlength=K)
        loss = _cross_entropy(logits, labels)
    per_class = _class_metrics(classes, hits, count, predictions, aps)
    indices = np.flatnonzero(wrong)
    mistakes = [
        Mistake(
            name=str(rows[i]) if names is None else names[int(rows[i])],
            predicted=classes[predicted[i]],
            label=", ".join(classes[int(k)] for k in _true_classes(labels[i])) or "none",
            confidence=float(confidence[i]),
        )
        for i in indices[np.argsort(-confidence[indices], kind="stable")][:worst]
    ]
    common = ClassificationMetrics(
        len(labels), loss, per_class, mistakes, macro_f1=_mean([one.f1 for one in per_class])
    )
    if labels.ndim == 2:
        return replace(common, mean_ap=_mean(aps), exact=float((target == positive).all(axis=1).mean()))
    confusion = np.bincount(labels * K + predicted, minlength=K * K) if K <= _MAX_CONFUSION else None
    return replace(
        common,
        top1=float((~wrong).mean()),
        top5=float((_label_ranks(logits, labels) < 5).mean()) if K > 5 else None,
        ece=ece(reliability_bins(confidence, ~wrong)),
        confusion=None if confusion is None else confusion.reshape(K, K).tolist(),
    )


def _check_shapes(logits: NDArray[Any], labels: NDArray[Any], classes: Sequence[str]) -> None:
    shape = (len(logits), len(classes))
    if logits.shape != shape or labels.shape not in (shape, shape[:1]):
        raise InputError(
            f"For {len(classes)} classes the logits must have shape (N, {len(classes)}) and the labels (N,) "
            f"or (N, {len(classes)}), not {logits.shape} and {labels.shape}; check that model and data match."
        )
    most = len(classes) - 1 if labels.ndim == 1 else 1
    if labels.size and not 0 <= labels.min() <= labels.max() <= most:
        raise InputError(
            f"Labels must be integers from 0 to {most}, not {labels.min()} to {labels.max()}; check the data."
        )


# ---- parts ----------------------------------------------------------------------------------


def class_thresholds(scores: Scores, classes: int) -> NDArray[np.float64]:
    """The threshold of each class of multi-label data."""
    return np.full(classes, 0.5) if scores.thresholds is None else np.array(scores.thresholds)


def _true_classes(label: Any) -> NDArray[np.int64]:
    """The classes of one image, from its label or its row of targets."""
    return np.flatnonzero(label) if np.ndim(label) else np.array([label])


def _class_metrics(
    classes: Sequence[str],
    hits: NDArray[Any],
    count: NDArray[Any],
    predictions: NDArray[Any],
    aps: Sequence[float | None],
) -> list[ClassMetrics]:
    """Metrics of each class from its correct predictions, its images and its predictions, all (K,)."""
    return [
        ClassMetrics(
            name,
            int(count[k]),
            precision=_divide(hits[k], predictions[k]),
            recall=_divide(hits[k], count[k]),
            f1=_divide(2 * hits[k], count[k] + predictions[k]) if count[k] else None,
            ap=aps[k] if aps else None,
        )
        for k, name in enumerate(classes)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that there are."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def _divide(part: Any, total: Any) -> float | None:
    return float(part / total) if total else None


def _cross_entropy(logits: NDArray[Any], labels: NDArray[np.int64]) -> float:
    total, start = 0.0, 0
    for z in subtract_row_max(logits):
        y = labels[start : start + len(z)]
        start += len(z)
        total += float((np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), y]).sum())
    return total / start


def _label_ranks(logits: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank of each image's label among the logits (N,), from 0.

    Ties go to the first class, as in argmax: a model with equal logits for all classes has no top-5 accuracy
    of 100 %.
    """
    own = logits[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    return ((logits > own) | ((logits == own) & earlier)).sum(axis=1)


def _average_precision(scores: NDArray[np.float64], target: NDArray[np.bool_]) -> float | None:
    """Area under the precision-recall curve, as a sum of steps; tied scores are one step.

    None for a class without images.
    """
    if not target.any():
        return None
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    hits = np.cumsum(target[order])[ends]
    recall_steps = np.diff(hits, prepend=0) / hits[-1]
    return float((recall_steps * hits / (ends + 1)).sum())


@dataclass(frozen=True)
class RealAccuracy:
    """Accuracy by ImageNet-ReaL labels, and the number of images that have any."""

    accuracy: float
    count: int


def real_accuracy(
    logits: NDArray[Any], real: Sequence[Sequence[int]], valid: NDArray[Any] | None = None
) -> RealAccuracy:
    """Fraction of the predictions that are among an image's ReaL labels, over images that have some."""
    if len(real) != len(logits):
        raise InputError(
            f"ReaL labels are needed for every image, but there are {len(real):,} rows for {len(logits):,} "
            "images; use the complete validation set."
        )
    predicted = logits.argmax(axis=1)
    labeled = [row for row in range(len(real)) if len(real[row]) and (valid is None or valid[row])]
    if not labeled:
        raise InputError("No image has a ReaL label; check the file of ReaL labels.")
    correct = sum(int(predicted[row]) in real[row] for row in labeled)
    return RealAccuracy(correct / len(labeled), len(labeled))


# ---- the prediction for each image -----


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
        true = _true_classes(self.labels[index]).tolist()
        found = best[:1] if self.predicted is None else np.flatnonzero(self.predicted[index]).tolist()
        label, predicted = ("|".join(self.classes[int(k)] for k in indices) for indices in (true, found))
        return ImagePrediction(self.names[index], label, predicted, true == found, scores[0], top)

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
    """Predict from logits (N, K), whose columns are the classes of the data.

    Args:
        valid: (N,), False for images that could not be read.
        scale: how these logits become scores.
    """
    rows, multilabel = np.flatnonzero(valid), labels.ndim == 2
    thresholds = class_thresholds(scale, len(classes))
    parts = []
    for part in np.array_split(rows, len(rows) // _ROWS + 1):
        scores = scale.compute(logits[part])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :_TOP]
        predicted = scores > thresholds if multilabel else np.zeros((len(part), 0), bool)
        parts.append((best, np.take_along_axis(scores, best, axis=1), predicted))
    best, top_scores, predicted = (np.concatenate(column) for column in zip(*parts, strict=True))
    names = [names[i] for i in rows.tolist()]
    found = predicted if multilabel else None
    return ImagePredictions(names, labels[rows], classes, best.astype(np.int32), top_scores, found)
