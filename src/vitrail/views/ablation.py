"""Head ablation: how the predictions change when the output of a single head is set to zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model import ViT, edit
from vitrail.model.device import eval_mode
from vitrail.views.canvas import DIVERGING, ON_DATA, Figure, add_colorbar, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import (
    BATCH,
    check_classes,
    check_classifier,
    device_of,
    log_probabilities,
)
from vitrail.weights.bundle.scores import Activation

_MAX_LABELED = 12  # with more rows or columns the numbers in the cells would be too small to read
_NEGLIGIBLE = 0.001  # a head that changes less than 0.1 % counts as having no effect


@dataclass(frozen=True, eq=False)
class Ablation:
    """The effect of removing each of the k heads in each of the L blocks."""

    drop: NDArray[np.float64]
    """Drop in the log-probability of the class that the full model predicts, mean over images: (L, k)."""
    changed: NDArray[np.float64]
    """Fraction of images whose predicted class changes: (L, k)."""
    accuracy: NDArray[np.float64] | None
    """Accuracy without the head, (L, k); None without labels."""
    full_accuracy: float | None
    """Accuracy with all heads; None without labels."""
    images: int

    @property
    def effect(self) -> NDArray[np.float64]:
        """The change in accuracy if labels were given, otherwise `drop`: (L, k)."""
        if self.accuracy is None or self.full_accuracy is None:
            return self.drop
        return self.accuracy - self.full_accuracy

    @property
    def harm(self) -> NDArray[np.float64]:
        """The effect as a loss, positive if the model is worse without the head: (L, k)."""
        return self.drop if self.accuracy is None else -self.effect

    @property
    def idle(self) -> NDArray[np.bool_]:
        """Heads whose removal changes the accuracy, or the predictions, by less than 0.1 %: (L, k)."""
        return (self.changed if self.accuracy is None else np.abs(self.effect)) < _NEGLIGIBLE


def compute(
    model: ViT,
    images: Tensor | Iterable[Tensor],
    labels: Sequence[int] | Tensor | None = None,
    *,
    activation: Activation = "softmax",
) -> Ablation:
    """Remove each head in turn. Every batch is read once and takes L k + 1 forward passes.

    Args:
        images: one batch (B, C, H, W), or an iterable of batches of any size.
        labels: the true classes of all images, in the same order.
        activation: how logits become probabilities (`bundle.scores.activation`).
    """
    L, k, classes = model.config.depth, model.config.heads, model.config.classes
    sums = np.zeros((3, L, k))  # of the drop, changed predictions, correct predictions
    count, correct_in_full = 0, 0
    true = None if labels is None else check_classes("labels", labels, len(labels), classes)
    with eval_mode(model):
        for batch in _batches(model, images):
            log_p, predicted = log_probabilities(model, batch, activation).max(dim=1)
            batch_labels = None if true is None else true[count : count + len(batch)].to(batch.device)
            count += len(batch)
            _check_count(count, true)
            if batch_labels is not None:
                correct_in_full += int((predicted == batch_labels).sum())
            for block, head in np.ndindex(L, k):
                ablated = _ablated_log_probabilities(model, batch, block, head, activation)
                prediction = ablated.argmax(dim=1)
                drop = log_p - ablated.gather(1, predicted[:, None])[:, 0]
                correct = 0 if batch_labels is None else int((prediction == batch_labels).sum())
                changed = int((prediction != predicted).sum())
                sums[:, block, head] += float(drop.sum()), changed, correct
    _check_count(count, true, done=True)
    drop_mean, changed_mean, accuracy = sums / count
    if true is None:
        return Ablation(drop_mean, changed_mean, None, None, count)
    return Ablation(drop_mean, changed_mean, accuracy, correct_in_full / count, count)


def _ablated_log_probabilities(
    model: ViT, images: Tensor, block: int, head: int, activation: Activation
) -> Tensor:
    """Log-probabilities with the output of one head set to zero: (B, K)."""

    def zero_head(heads: Tensor) -> Tensor:  # (B, k, T, d)
        mask = torch.ones(heads.shape[1], 1, 1, dtype=heads.dtype, device=heads.device)
        mask[head] = 0
        return heads * mask

    with edit(model, {f"blocks.{block}.attention.heads": zero_head}):
        return log_probabilities(model, images, activation)


def _batches(model: ViT, images: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    if isinstance(images, Tensor):
        check_classifier(model, images)
        images = images.split(BATCH)
    for batch in images:
        if not isinstance(batch, Tensor):
            raise InputError(
                f"Every batch must be a tensor of images (B, C, H, W), not a {type(batch).__name__}; "
                "pass the labels separately."
            )
        check_classifier(model, batch)
        yield batch.detach().to(device_of(model))


def _check_count(count: int, labels: Tensor | None, *, done: bool = False) -> None:
    """Check that there are as many labels as images, and at least one image."""
    if done and not count:
        raise InputError("Head ablation needs images, but there are no batches; pass at least one.")
    if labels is not None and (count > len(labels) or (done and count < len(labels))):
        images = f"{count} images" if done else f"{count} or more images"
        raise InputError(
            f"{len(labels)} labels do not match {images}; pass one label per image, in the same order."
        )


# ---- the figure -----------------------------------------------------------------------------


@styled
def draw(ablation: Ablation) -> Figure:
    """Draw a matrix of blocks by heads; red cells are heads without which the model is worse."""
    L, k = ablation.drop.shape
    has_labels = ablation.accuracy is not None
    values = ablation.effect * (100 if has_labels else 1)
    limit = float(np.abs(values).max()) or 1.0
    labeled = max(L, k) <= _MAX_LABELED
    cell = (0.62, 0.36) if labeled else (0.3, 0.22)
    title = f"Effect of removing one head ({ablation.images} image{'s' * (ablation.images > 1)})"
    figure = new_figure(max(4.6, cell[0] * k + 2.2), max(2.8, cell[1] * L + 1.2), title)
    axis = figure.subplots()
    # Red means worse in both cases: a change in accuracy below 0, or a drop above 0.
    colors = DIVERGING.removesuffix("_r") if has_labels else DIVERGING
    image = axis.imshow(values, cmap=colors, vmin=-limit, vmax=limit, aspect="auto")
    if labeled:
        digits = min(4, max(1, 2 - math.floor(math.log10(limit))))
        for (block, head), value in np.ndenumerate(values):
            dark = abs(value) > 0.6 * limit
            text = f"{round(float(value), digits) + 0.0:+.{digits}f}"  # + 0.0 turns -0 into 0
            axis.text(head, block, text, ha="center", va="center", fontsize=8, color=ON_DATA[int(dark)])
    axis.set(xlabel="head", ylabel="block", xticks=range(k), yticks=range(L))
    axis.tick_params(length=0, labelsize=8 if labeled else 7)
    unit = (
        "change in accuracy,\npercentage points"
        if has_labels
        else "drop in log-probability\nof the prediction, nats"
    )
    add_colorbar(figure, image, axis, f"{unit}\n(red: worse without it)")
    return figure


def caption(ablation: Ablation) -> str:
    """Name the head that matters most, and count the heads that do not matter."""
    L, k = ablation.drop.shape
    block, head = divmod(int(np.lexsort((-ablation.drop.ravel(), -ablation.harm.ravel()))[0]), k)
    harm, changed = ablation.harm[block, head], ablation.changed[block, head]
    without = f"the log-probability of the predicted class drops by {harm:.3g} nats"
    little = "less than 0.1% of the predictions"
    if ablation.full_accuracy is not None:
        full = ablation.full_accuracy
        without, little = (
            f"accuracy goes from {full:.1%} to {full - harm:.1%}",
            "the accuracy by less than 0.1%",
        )
    text = (
        "Each cell shows the effect of setting the output of one head to zero; red means the model gets "
        f"worse (n = {ablation.images}). Head {head} of block {block} matters most: without it, {without} "
        f"and {changed:.1%} of the predictions change. Removing any one of {ablation.idle.sum()} of the "
        f"{L * k} heads changes {little}."
    )
    if 1 < ablation.images < 1 / _NEGLIGIBLE:
        text += f" One image is {1 / ablation.images:.1%} of the sample, so smaller effects do not show."
    return text


def table(ablation: Ablation) -> Rows:
    """List the effects of each head."""
    columns = {"drop": ablation.drop, "changed": ablation.changed}
    columns |= {} if ablation.accuracy is None else {"accuracy": ablation.accuracy}
    indices = np.ndindex(ablation.drop.shape)
    return ["block", "head", *columns], [
        [*index, *(float(column[index]) for column in columns.values())] for index in indices
    ]


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    ablation = compute(request.model, request.drawn.images, activation=request.bundle.scores.activation)
    return ablation, draw(ablation)


FIGURE = FigureSpec(
    "ablation", "Head ablation", _make, caption, table, passes=lambda config: config.depth * config.heads
)
