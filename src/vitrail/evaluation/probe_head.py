"""A classifier without training: logistic regression on frozen features becomes the head of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.evaluation.forward import BATCH, run_model
from vitrail.evaluation.probes import fit_head, select_l2
from vitrail.evaluation.selection import Progress
from vitrail.images.formats.sources import Dataset, Split
from vitrail.images.loader import CorruptFiles
from vitrail.model import ViT, surgery
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.own_shape import reading_preprocess
from vitrail.weights.bundle.scores import Scores

if TYPE_CHECKING:
    from vitrail.images.preprocess import Preprocess


@dataclass(frozen=True, eq=False)
class ProbedModel:
    """A model with a new head, and how good it is."""

    bundle: Bundle
    images: int
    """Training images that could be read."""
    l2: float
    """Selected on a fifth of them."""
    accuracy: float | None
    """On the validation set, or else the test set; None without one."""
    evaluated: int


def probe_head(
    bundle: Bundle,
    data: Dataset,
    *,
    batch: int = BATCH,
    workers: Any = "auto",
    progress: Progress = lambda split, done, total: None,
) -> ProbedModel:
    """Fit a linear head for the classes of a data set on the frozen features of a model."""
    if bundle.preprocess is None:
        raise InputError(f"A probe needs a model of images, and this one takes {bundle.model.config.input}.")
    if data.multilabel:
        raise InputError(
            "A probe needs one label per image, and this data has several; train a head instead."
        )
    if len(data.classes) < 2 or not len(data.train):
        raise InputError("A probe needs training images of at least two classes.")
    frozen = surgery.reclass(bundle.model, 0)
    reading = reading_preprocess(bundle, frozen)

    def features(name: str, split: Split) -> tuple[Tensor, Tensor]:
        return _features(
            frozen, split, reading, batch, workers, lambda done: progress(name, done, len(split))
        )

    x, y = features("train", data.train)
    l2 = select_l2(x, y, len(data.classes))
    weight, bias = fit_head(x, y, len(data.classes), l2)
    accuracy, evaluated = None, 0
    if held_out := data.val or data.test:
        x_test, y_test = features("val", held_out)
        evaluated = len(y_test)
        predicted = (x_test.double() @ weight.T + bias).argmax(dim=1)
        accuracy = (predicted == y_test).double().mean().item() if evaluated else None
    new = replace(
        bundle,
        model=_with_head(frozen, weight, bias),
        labels=list(data.classes),
        scores=Scores(),
        statistics=None,
        source=None,
        extras={},
        text_files={},
        fingerprint=None,
    )
    return ProbedModel(new, len(y), l2, accuracy, evaluated)


def _features(
    model: ViT,
    split: Split,
    preprocess: Preprocess,
    batch: int,
    workers: Any,
    progress: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """The pooled vectors (N, D) of the images that can be read, and their labels."""
    corrupt = CorruptFiles("skip")
    rows, valid = run_model(
        model, split, preprocess, batch=batch, workers=workers, corrupt=corrupt, progress=progress
    )
    readable = valid > 0
    return rows[readable], torch.from_numpy(split.labels).long()[readable]


def _with_head(model: ViT, weight: Tensor, bias: Tensor) -> ViT:
    """The model with this linear head."""
    config = replace(model.config, classes=len(bias), head="linear", head_bias=True, head_hidden=None)
    new = ViT(config)
    new.load_state_dict({**model.state_dict(), "head.weight": weight.float(), "head.bias": bias.float()})
    return new.to(next(model.parameters()).device).eval()
