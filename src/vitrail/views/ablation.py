"""Head ablation: how the predictions change when the output of a single head is set to zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model import ViT, edit
from vitrail.model.device import eval_mode
from vitrail.views.canvas import DIVERGING, ON_DATA, add_colorbar, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.sample import sample_images, sample_model, show_sample
from vitrail.views.targets import BATCH, check_classes, check_classifier, log_probabilities, on_device
from vitrail.weights.bundle.scores import Activation

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

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
    check_classifier(model)
    L, k = model.config.depth, model.config.heads
    drop, changed, correct = np.zeros((L, k)), np.zeros((L, k)), np.zeros((L, k))
    count, correct_in_full = 0, 0
    classes = model.config.classes
    true = None if labels is None else check_classes("labels", labels, len(labels), classes)
    with eval_mode(model):
        for batch in _batches(model, images):
            predicted = log_probabilities(model, batch, activation).max(dim=1)
            batch_labels = None if true is None else true[count : count + len(batch)].to(batch.device)
            count += len(batch)
            _check_count(count, true)
            if batch_labels is not None:
                correct_in_full += int((predicted.indices == batch_labels).sum())
            for index in np.ndindex(L, k):
                ablated = _ablated_log_probabilities(model, batch, index, activation)
                remaining = ablated.gather(1, predicted.indices[:, None])[:, 0]
                prediction = ablated.argmax(dim=1)
                drop[index] += float((predicted.values - remaining).sum())
                changed[index] += int((prediction != predicted.indices).sum())
                correct[index] += 0 if batch_labels is None else int((prediction == batch_labels).sum())
    _check_count(count, true, done=True)
    has_labels = true is not None
    return Ablation(
        drop / count,
        changed / count,
        correct / count if has_labels else None,
        correct_in_full / count if has_labels else None,
        count,
    )


def _ablated_log_probabilities(
    model: ViT, images: Tensor, index: tuple[int, ...], activation: Activation
) -> Tensor:
    """Log-probabilities with the output of one head, index (block, head), set to zero: (B, K)."""
    block, head = index

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
        yield on_device(model, batch)


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
    """A matrix of blocks by heads; red cells are heads without which the model is worse."""
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
    image = axis.imshow(
        values,
        cmap=DIVERGING.removesuffix("_r") if has_labels else DIVERGING,
        vmin=-limit,
        vmax=limit,
        aspect="auto",
    )
    if labeled:
        digits = min(4, max(1, 2 - math.floor(math.log10(limit))))
        for (block, head), value in np.ndenumerate(values):
            dark = abs(value) > 0.6 * limit
            text = f"{round(float(value), digits) + 0.0:+.{digits}f}"  # + 0.0 turns -0 into 0
            axis.text(head, block, text, ha="center", va="center", fontsize=8, color=ON_DATA[int(dark)])
    axis.set(xlabel="head", ylabel="block")
    axis.set_xticks(range(k))
    axis.set_yticks(range(L))
    axis.tick_params(length=0, labelsize=8 if labeled else 7)
    add_colorbar(figure, image, axis, _unit(ablation))
    return figure


def _unit(ablation: Ablation) -> str:
    if ablation.accuracy is not None:
        return "change in accuracy,\npercentage points\n(red: worse without it)"
    return "drop in log-probability\nof the prediction, nats\n(red: worse without it)"


def caption(ablation: Ablation) -> str:
    """The head that matters most, and the number of heads that do not matter."""
    L, k = ablation.drop.shape
    block, head = divmod(int(np.lexsort((-ablation.drop.ravel(), -ablation.harm.ravel()))[0]), k)
    harm, changed, idle = ablation.harm[block, head], ablation.changed[block, head], int(ablation.idle.sum())
    text = [
        "Each cell shows the effect of setting the output of one head to zero; red means the model gets "
        f"worse (n = {ablation.images})."
    ]
    if ablation.full_accuracy is None:
        text.append(
            f"Head {head} of block {block} matters most: without it, the log-probability of the predicted "
            f"class drops by {harm:.3g} nats and {changed:.1%} of the predictions change."
        )
        text.append(
            f"Removing any one of {idle} of the {L * k} heads changes less than 0.1% of the predictions."
        )
    else:
        text.append(
            f"Head {head} of block {block} matters most: without it, accuracy goes from "
            f"{ablation.full_accuracy:.1%} to {ablation.full_accuracy - harm:.1%} and {changed:.1%} of the "
            "predictions change."
        )
        text.append(
            f"Removing any one of {idle} of the {L * k} heads changes the accuracy by less than 0.1%."
        )
    if ablation.images * _NEGLIGIBLE < 1:
        text.append(f"One image is {1 / ablation.images:.1%} of the sample, so smaller effects do not show.")
    return " ".join(text)


def table(ablation: Ablation) -> tuple[list[str], list[list[object]]]:
    """One row per head."""
    header = ["block", "head", "drop", "changed"] + (["accuracy"] if ablation.accuracy is not None else [])
    columns = [ablation.drop, ablation.changed] + (
        [ablation.accuracy] if ablation.accuracy is not None else []
    )
    indices = np.ndindex(ablation.drop.shape)
    return header, [[*index, *(float(column[index]) for column in columns)] for index in indices]


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    activation = request.bundle.scores.activation
    ablation = compute(request.model, request.drawn().images, activation=activation)
    return ablation, draw(ablation)


FIGURE = FigureSpec("ablation", "Head ablation", _make, caption, table)


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        images = sample_images(200)
        labels = [int(name.removeprefix("digit ")) for name in images.names]
        ablation = compute(sample_model().model, images.images, labels)
        return draw(ablation), caption(ablation)

    show_sample("ablation", sample)
