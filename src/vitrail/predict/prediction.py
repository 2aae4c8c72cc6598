"""The prediction for one image: label, score, embedding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.errors import InputError
from vitrail.base.summary import Summary
from vitrail.weights.bundle.scores import Scores

if TYPE_CHECKING:
    from numpy.typing import NDArray


_SHOWN = 3  # classes in a summary


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Summary):
    """The prediction for one image."""

    name: str
    """Its path as given, or "image 3" for the fourth image of a list."""
    label: str | None = None
    """The most likely class. None below the threshold, without a head, or on an error; of a multi-label
    model, None if no class is above its threshold."""
    score: float | None = None
    """The score of the most likely class: its probability, by softmax or by sigmoid."""
    ood_score: float | None = None
    """How unlike the training images this one is: above 1 it is out of distribution. None if the file has no
    feature statistics."""
    error: str | None = None
    """Why there is no prediction, mostly why the image could not be read."""
    embedding: NDArray[np.float32] | None = None
    """The pooled vector, (D,)."""
    logits: NDArray[np.float32] | None = None
    """Before any temperature, (K,)."""
    scale: Scores = field(default=Scores())

    @property
    def unsure(self) -> bool:
        """Whether the score is below the calibrated threshold; `top` still lists the classes."""
        return self.score is not None and self.label is None and not self.scale.multilabel

    @property
    def ood(self) -> bool | None:
        """Whether the image is unlike those the model was trained on; None if the file cannot tell."""
        return None if self.ood_score is None else self.ood_score > 1

    @property
    def labels(self) -> list[tuple[str, float]]:
        """The predicted classes with their scores, best first.

        Of a multi-label model, all that are above their thresholds, which may be none; otherwise the label.
        """
        if self.logits is None:
            return []
        scores = self.scale.compute(self.logits[None])[0]
        return [(self.scale.labels[k], float(scores[k])) for k in self.scale.predicted(scores)]

    def summary(self) -> dict[str, str]:
        """The image, and its predicted classes or the reason why there are none."""
        rows = {"image": self.name}
        if self.error is not None:
            return {**rows, "error": self.error}
        if self.logits is not None:
            guesses = ", ".join(f"{label} {score:.1%}" for label, score in self.labels[:_SHOWN])
            rows["label"] = guesses or ("don't know" if self.unsure else "none")
            rows["top"] = ", ".join(f"{label} {score:.1%}" for label, score in self.top(_SHOWN))
        if self.ood:
            rows["unlike the training images"] = "yes"
        if self.embedding is not None:
            rows["embedding"] = f"{len(self.embedding)} numbers"
        return rows

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
        scores = self.scale.compute(self.logits[None])[0]
        best = np.argsort(-scores, kind="stable")[:count]  # ties go to the first class
        return [(self.scale.labels[i], float(scores[i])) for i in best]
