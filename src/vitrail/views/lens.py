"""Logit lens: the prediction after every block, as if that block were the last (nostalgebraist 2020).

After block i the tokens go through the model's final norm, pool and head. The head was trained on the output
of the last block only: a poor prediction after an early block may mean that the information is not there yet,
or that it is encoded in a form the head cannot read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.views.canvas import INK, LINES, ON_DATA, SEQUENTIAL, add_colorbar, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.figure_images import tell_apart
from vitrail.views.sample import sample_images, sample_model, show_sample
from vitrail.views.targets import BATCH, activate, check_classes, check_classifier, choose_target, on_device

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitrail.weights.bundle.scores import Activation

_MAX_IMAGES = 8


@dataclass(frozen=True, eq=False)
class Lens:
    """Predictions of the head after each of L blocks, for B images."""

    target: NDArray[np.int64]
    """The tracked class: (B,)."""
    probability: NDArray[np.float32]
    """The probability of the tracked class: (L, B)."""
    top: NDArray[np.int64]
    """The predicted class: (L, B)."""
    top_probability: NDArray[np.float32]
    """The probability of the predicted class: (L, B)."""
    labels: NDArray[np.int64] | None
    """The true classes, (B,), if they were given."""

    @property
    def agreement(self) -> NDArray[np.float64]:
        """Fraction of images for which a block predicts the same class as the last block: (L,)."""
        return (self.top == self.top[-1]).mean(axis=1)

    @property
    def accuracy(self) -> NDArray[np.float64] | None:
        """Accuracy after each block: (L,)."""
        return None if self.labels is None else (self.top == self.labels).mean(axis=1)

    @property
    def settled(self) -> NDArray[np.int64]:
        """The block after which the prediction of each image no longer changes: (B,)."""
        changes = self.top != self.top[-1]  # (L, B)
        depth = len(changes)
        return np.where(changes.any(axis=0), depth - np.argmax(changes[::-1], axis=0), 0)


def compute(
    model: ViT,
    images: Tensor,
    *,
    target: int | Sequence[int] | Tensor | None = None,
    labels: Sequence[int] | Tensor | None = None,
    activation: Activation = "softmax",
) -> Lens:
    """Apply the head after every block.

    Args:
        target: the class to track, one for all images or one each; by default the predicted class.
        labels: the true classes, for the accuracy after each block.
        activation: how logits become probabilities (`bundle.scores.activation`).
    """
    check_classifier(model, images)
    config = model.config
    true = None if labels is None else check_classes("labels", labels, len(images), config.classes).numpy()
    with eval_mode(model):
        parts = [
            _block_log_probabilities(model, part, activation)
            for part in on_device(model, images).split(BATCH)
        ]
    outputs = torch.cat(parts, dim=1)  # (L, B, K)
    tracked = choose_target(outputs[-1], target)
    log_p = outputs.gather(2, tracked.expand(config.depth, -1)[..., None])[..., 0]
    best = outputs.max(dim=2)
    return Lens(
        target=tracked.cpu().numpy(),
        probability=log_p.exp().cpu().numpy(),
        top=best.indices.cpu().numpy(),
        top_probability=best.values.exp().cpu().numpy(),
        labels=true,
    )


def _block_log_probabilities(model: ViT, images: Tensor, activation: Activation) -> Tensor:
    """Log-probabilities after each block: (L, B, K)."""
    layers = model.encode(images, layers=range(model.config.depth)).layers
    logits = torch.stack([model.head(layers[i].pooled) for i in range(len(layers))])
    return activate(logits, activation)


# ---- the figure -----------------------------------------------------------------------------


@styled
def draw(lens: Lens, classes: Sequence[str] | None = None, names: Sequence[str] | None = None) -> Figure:
    """Probability by depth, agreement with the last block, and the predictions for up to eight images.

    Args:
        classes: class names.
        names: image names.
    """
    L, B = lens.top.shape
    if names is not None and len(names) != B:
        raise InputError(f"{len(names)} names do not match {B} images; pass one name per image.")
    shown = min(B, _MAX_IMAGES)
    rows = max(1.3, 0.21 * L)
    figure = new_figure(max(8.0, 1.0 + 1.0 * shown), 3.6 + rows + 0.9)
    grid: Any = figure.add_gridspec(2, 2, height_ratios=[3.0, rows + 0.5])
    _draw_probability(figure.add_subplot(grid[0, 0]), lens)
    _draw_agreement(figure.add_subplot(grid[0, 1]), lens)
    below = figure.add_subplot(grid[1, :])
    image = _draw_predictions(below, lens, shown, names, classes)
    add_colorbar(figure, image, below, "probability of\nthe prediction")
    return figure


def _draw_probability(axis: Axes, lens: Lens) -> None:
    blocks = np.arange(len(lens.top))
    tracked = "the predicted class" if np.array_equal(lens.target, lens.top[-1]) else "the target class"
    axis.plot(
        blocks, lens.probability, color=LINES[0], linewidth=0.7, alpha=_line_alpha(lens), marker=_marker(lens)
    )
    axis.plot(
        blocks, lens.probability.mean(axis=1), color=INK, linewidth=2.2, marker=_marker(lens), label="mean"
    )
    axis.plot([], [], color=LINES[0], linewidth=0.7, label="one image")
    axis.set_title(f"Probability of {tracked}")
    _finish_axis(axis, "probability")


def _draw_agreement(axis: Axes, lens: Lens) -> None:
    blocks = np.arange(len(lens.top))
    axis.plot(
        blocks, lens.agreement, color=LINES[1], marker=_marker(lens), label="same as after the last block"
    )
    if lens.accuracy is not None:
        axis.plot(
            blocks, lens.accuracy, color=LINES[2], linestyle="--", marker=_marker(lens), label="accuracy"
        )
    B = len(lens.target)
    axis.set_title(f"Prediction after each block, {B} image{'s' * (B > 1)}")
    _finish_axis(axis, "fraction of images")


def _finish_axis(axis: Axes, label: str) -> None:
    axis.set(xlabel="after block", ylabel=label, ylim=(-0.03, 1.03))
    locator: Any = axis.xaxis.get_major_locator()
    locator.set_params(integer=True)  # blocks are integers
    axis.legend(fontsize=8, loc="best")


def _line_alpha(lens: Lens) -> float:
    """Opacity of the lines of single images: fainter the more there are."""
    return max(0.08, min(0.7, 6 / len(lens.target)))


def _marker(lens: Lens) -> str:
    """A dot for a model of one block, for which there is no line to draw."""
    return "o" if len(lens.top) == 1 else ""


def _draw_predictions(
    axis: Axes, lens: Lens, shown: int, names: Sequence[str] | None, classes: Sequence[str] | None
) -> Any:
    L, B = lens.top.shape
    drawn = axis.imshow(lens.top_probability[:, :shown], cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
    for (block, image), number in np.ndenumerate(lens.top[:, :shown]):
        text = printable(classes[int(number)], 14) if classes else str(number)
        dark = lens.top_probability[block, image] < 0.6
        settled = block >= lens.settled[image]
        weight = "bold" if settled else "normal"
        axis.text(
            image, block, text, ha="center", va="center", fontsize=7, fontweight=weight,
            color=ON_DATA[int(dark)], parse_math=False,
        )  # fmt: skip
    labels = [str(n) for n in range(shown)] if names is None else tell_apart(names[:shown], 13)
    axis.set_xticks(range(shown), labels, fontsize=7.5, parse_math=False)
    axis.set_yticks(range(L), [str(block) for block in range(L)], fontsize=7)
    axis.tick_params(length=0)
    axis.set_ylabel("after block")
    note = f" (the first {shown} of {B} images)" if shown < B else ""
    axis.set_title(f"Prediction after each block, in bold once it no longer changes{note}")
    return drawn


def caption(lens: Lens) -> str:
    """The block at which predictions settle, and how the first block compares with the last."""
    L, B = lens.top.shape
    settled = lens.settled
    text = [
        "The model's head is applied after every block, as if that block were the last.",
        f"On average over {B} image{'s' * (B > 1)}, the prediction stops changing after block "
        f"{settled.mean():.1f} (earliest {settled.min()}, latest {settled.max()}; blocks are numbered 0 to "
        f"{L - 1}).",
    ]
    first, last = lens.probability[0].mean(), lens.probability[-1].mean()
    text.append(
        f"After the first block, {lens.agreement[0]:.0%} of the predictions are already those of the last, "
        f"and the mean probability of the target class is {first:.2f}; after the last block it is {last:.2f}."
    )
    if lens.accuracy is not None:
        best, accuracy = int(np.argmax(lens.accuracy)), lens.accuracy
        text.append(
            f"Accuracy is {accuracy[0]:.0%} after the first block and {accuracy[-1]:.0%} after the last"
            + (f"; it is highest, {accuracy[best]:.0%}, after block {best}." if best < L - 1 else ".")
        )
    return " ".join(text)


def table(lens: Lens) -> tuple[list[str], list[list[object]]]:
    """One row per block, with means over images."""
    header = ["block", "probability", "agreement"] + (["accuracy"] if lens.accuracy is not None else [])
    columns = [lens.probability.mean(axis=1), lens.agreement]
    columns += [lens.accuracy] if lens.accuracy is not None else []
    return header, [[n, *(float(column[n]) for column in columns)] for n in range(len(lens.top))]


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    images = request.drawn()
    activation = request.bundle.scores.activation
    lens = compute(request.model, images.images, target=request.target, activation=activation)
    return lens, draw(lens, request.bundle.labels, images.names)


FIGURE = FigureSpec("lens", "Logit lens", _make, caption, table)


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        images = sample_images(40)
        labels = [int(name.removeprefix("digit ")) for name in images.names]
        lens = compute(sample_model().model, images.images, labels=labels)
        return draw(lens, names=images.names), caption(lens)

    show_sample("lens", sample)
