"""What the file of a trained model says about its scores: the activation, and thresholds by validation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vitrail.data.loader import CorruptFiles
from vitrail.data.sources import Dataset, Split
from vitrail.evaluation.forward import run_model
from vitrail.evaluation.thresholds import DEFAULT, choose_thresholds
from vitrail.recipes.settings import TrainConfig
from vitrail.training.parallel import ProcessGroup
from vitrail.weights.bundle import Bundle
from vitrail.weights.scores import Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def initial_scores(data: Dataset, settings: TrainConfig) -> Scores:
    """Softmax, or sigmoid with binary cross-entropy; multi-label models start with thresholds of 0.5."""
    if settings.loss != "bce":
        return Scores()
    thresholds = (DEFAULT,) * len(data.classes) if data.multilabel else None
    return Scores(activation="sigmoid", thresholds=thresholds)


@dataclass(frozen=True)
class FinishedModel:
    """What is measured on the images when a run has ended, and goes into the model's file.

    Args:
        on_batch: called with the number of images done; it may raise to stop.
    """

    data: Dataset
    settings: TrainConfig
    device: torch.device
    ranks: ProcessGroup
    on_batch: Callable[[int], None] = lambda done: None

    def complete(self, bundle: Bundle) -> Bundle:
        """The bundle with thresholds that were chosen on the validation set."""
        if bundle.scores.thresholds is None or self.data.val is None:
            return bundle  # the test set must not choose thresholds
        logits, valid = self._run(bundle, self.data.val)
        thresholds = choose_thresholds(logits[valid], self.data.val.labels[valid])
        return replace(bundle, scores=replace(bundle.scores, thresholds=thresholds))

    def _run(self, bundle: Bundle, split: Split) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Logits (N, K), and which images could be read; equal in all processes."""
        assert bundle.preprocess is not None  # training is on images
        model = copy.deepcopy(bundle.model).to(self.device)
        width = model.config.classes
        rows, valid = run_model(
            model,
            split,
            bundle.preprocess,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
            workers=self.settings.workers,
            corrupt=CorruptFiles("skip"),
            progress=self.on_batch,
        )
        if rows.shape[1] != width:  # there was no batch for this process
            rows = torch.zeros(len(split), width)
        rows, valid = (self.ranks.sum(part.to(self.device)).cpu() for part in (rows, valid))
        return rows.numpy(), valid.numpy() > 0
