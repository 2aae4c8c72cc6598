"""How many of the evaluated images the model was trained on, and its scores on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.evaluation.metrics import compute_metrics
from vitrail.images.content import Progress, content_keys
from vitrail.images.fingerprint import Fingerprint
from vitrail.images.formats.sources import Split

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainedOn:
    """The evaluated images that are in the model's training set, and scores on the others."""

    images: int
    """Images that the model was trained on."""
    others: int
    """Images that it was not trained on; the scores are of these, and None if there are none."""
    loss: float | None = None
    top1: float | None = None
    mean_ap: float | None = None
    """For multi-label data."""
    is_exact: bool = True
    """False if one of a thousand others may be counted as a training image (a Bloom filter)."""

    def sentence(self) -> str:
        """What it means for the result."""
        about = "" if self.is_exact else "about "
        if not self.images:
            return "The model was trained on none of them."
        if not self.others:
            return "The model was trained on all of them: this is no estimate for new images."
        seen = f"The model was trained on {about}{self.images:,} of them"
        name, score = ("accuracy", self.top1) if self.mean_ap is None else ("mean AP", self.mean_ap)
        if score is None:
            return f"{seen}."
        return f"{seen}; on the other {self.others:,}, its {name} is {100 * score:.2f} %."


def find_trained(
    fingerprint: Fingerprint | None, images: Split, source: str | None, progress: Progress
) -> NDArray[np.bool_] | None:
    """(N,) which images the model was trained on; None if the model does not say.

    Args:
        source: the path of the data, for the cache of keys.
    """
    return None if fingerprint is None else fingerprint.contains(content_keys(images, source, progress))


def score_others(
    trained: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    logits: NDArray[Any] | None,
    labels: NDArray[np.int64],
    classes: Sequence[str],
    is_exact: bool,
) -> TrainedOn:
    """Count the training images among the valid ones, and evaluate the others.

    Args:
        logits: (N, K), in the order of the classes; None for a model without a head.
    """
    seen, others = valid & trained, valid & ~trained
    found = TrainedOn(int(seen.sum()), int(others.sum()), is_exact=is_exact)
    if logits is None or not found.others:
        return found
    scores = compute_metrics(logits, labels, classes, others, worst=0)
    return replace(found, loss=scores.loss, top1=scores.top1, mean_ap=scores.mean_ap)
