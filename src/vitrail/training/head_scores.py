"""What the file of a trained model says about its scores, and about images unlike those it was trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitrail.evaluation.forward import run_model
from vitrail.evaluation.trained_images import fit_statistics
from vitrail.images.formats.sources import Dataset, Split
from vitrail.images.loader import CorruptFiles
from vitrail.model.device import ComputeDevice
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.own_shape import reading_preprocess
from vitrail.weights.bundle.scores import DEFAULT_THRESHOLD, Scores, choose_thresholds

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_IMAGES = 5000  # of the training set, whose features are computed
MAX_FRACTION = 0.05  # of the bytes of the weights, for the feature statistics


def initial_scores(data: Dataset, settings: TrainConfig) -> Scores:
    """Softmax, or sigmoid with binary cross-entropy; multi-label models start with thresholds of 0.5."""
    if settings.loss != "bce":
        return Scores()
    thresholds = (DEFAULT_THRESHOLD,) * len(data.classes) if data.multilabel else None
    return Scores(activation="sigmoid", thresholds=thresholds)


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model computes for the images of a split that could be read."""

    features: NDArray[np.float32]
    """Pooled vectors, (N, D)."""
    logits: NDArray[np.float32]
    """(N, K)"""
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class FinishedModel:
    """What is measured on the images when a run has ended, and goes into the model's file.

    Args:
        compute: in whose precision the model runs, as in the evaluation of an epoch.
        on_batch: called with the number of images done; it may raise to stop.
    """

    data: Dataset
    settings: TrainConfig
    compute: ComputeDevice
    ranks: ProcessGroup
    on_batch: Callable[[int], None] = lambda done: None

    def complete(self, bundle: Bundle) -> Bundle:
        """The bundle with thresholds of multi-label scores, and with statistics of its features.

        Both need a validation set: the test set must not choose anything.
        """
        if self.data.val is None:
            return bundle
        train, val = self._run(bundle, _sample(self.data.train)), self._run(bundle, self.data.val)
        scores = bundle.scores
        if scores.thresholds is not None:
            scores = replace(scores, thresholds=choose_thresholds(val.logits, val.labels))
        size = sum(tensor.nbytes for tensor in bundle.model.state_dict().values())
        statistics = fit_statistics(train.features, train.labels, val.features, int(MAX_FRACTION * size))
        return replace(bundle, scores=scores, statistics=statistics)

    def _run(self, bundle: Bundle, split: Split) -> Outputs:
        """Equal in all processes, whatever their number."""
        model = copy.deepcopy(bundle.model).to(self.compute.device)
        width, classes = model.config.pooled_width, model.config.classes

        def compute(images: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
            with self.compute.autocast():
                pooled = model.pool_images(images)
                return torch.cat([pooled, model.head(pooled)], dim=1).float()

        rows, valid = run_model(
            model,
            split,
            reading_preprocess(bundle, model),
            compute=compute,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
            workers=self.settings.workers,
            corrupt=CorruptFiles("skip"),
            progress=self.on_batch,
        )
        if rows.shape[1] != width + classes:  # there was no batch for this process
            rows = torch.zeros(len(split), width + classes)
        rows, valid = (self.ranks.sum(part.to(self.compute.device)).cpu() for part in (rows, valid))
        kept = valid.numpy() > 0
        features, logits = rows.numpy()[kept, :width], rows.numpy()[kept, width:]
        return Outputs(features, logits, split.labels[kept])


def _sample(split: Split) -> Split:
    """At most `MAX_IMAGES` images, evenly spaced, so that sorted classes keep their fractions."""
    if len(split) <= MAX_IMAGES:
        return split
    return split.take(np.linspace(0, len(split) - 1, MAX_IMAGES).astype(np.int64))
