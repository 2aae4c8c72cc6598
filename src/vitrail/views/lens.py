"""Logit lens: the prediction after every block, as if that block were the last (nostalgebraist 2020).

After block i the tokens go through the model's final norm, pool and head. The head was trained on the output
of the last block only: a poor prediction after an early block may mean that the information is not there yet,
or that it is encoded in a form the head cannot read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.views.canvas import (
    INK,
    LINES,
    ON_DATA,
    SEQUENTIAL,
    Axes,
    Figure,
    add_colorbar,
    new_figure,
    styled,
)
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import (
    BATCH,
    Target,
    activate,
    check_classifier,
    choose_target,
    device_of,
    tell_apart,
)
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

    @property
    def agreement(self) -> NDArray[np.float64]:
        """Fraction of images for which a block predicts the same class as the last block: (L,)."""
        return (self.top == self.top[-1]).mean(axis=1)

    @property
    def settled(self) -> NDArray[np.int64]:
        """The block after which the prediction of each image no longer changes: (B,)."""
        changes = self.top != self.top[-1]  # (L, B)
        depth = len(changes)
        return np.where(changes.any(axis=0), depth - np.argmax(changes[::-1], axis=0), 0)


def compute(model: ViT, images: Tensor, *, target: Target = None, activation: Activation = "softmax") -> Lens:
    """Apply the head after every block.

    Args:
        target: the class to track.
        activation: how logits become probabilities (`bundle.scores.activation`).
    """
    check_classifier(model, images)
    depth, parts = model.config.depth, []
    with eval_mode(model):
        for part in images.to(device_of(model)).split(BATCH):
            layers = model.encode(part, layers=range(depth)).layers
            logits = torch.stack([model.head(layers[block].pooled) for block in range(depth)])
            parts.append(activate(logits, activation))
    outputs = torch.cat(parts, dim=1)  # (L, B, K)
    tracked = choose_target(outputs[-1], target)
    log_p = outputs.gather(2, tracked.expand(depth, -1)[..., None])[..., 0]
    best = outputs.max(dim=2)
    return Lens(
        target=tracked.cpu().numpy(),
        probability=log_p.exp().cpu().numpy(),
        top=best.indices.cpu().numpy(),
        top_probability=best.values.exp().cpu().numpy(),
    )


# ---- the figure -----------------------------------------------------------------------------


@styled
def draw(lens: Lens, classes: Sequence[str] | None = None, names: Sequence[str] | None = None) -> Figure:
    """Draw the probability by depth, agreement with the last block, and predictions for up to 8 images."""
    L, B = lens.top.shape
    if names is not None and len(names) != B:
        raise InputError(f"{len(names)} names do not match {B} images; pass one name per image.")
    shown = min(B, _MAX_IMAGES)
    rows = max(1.3, 0.21 * L)
    figure = new_figure(max(8.0, 1.0 + 1.0 * shown), 3.6 + rows + 0.9)
    grid: Any = figure.add_gridspec(2, 2, height_ratios=[3.0, rows + 0.5])
    left, right = (figure.add_subplot(grid[0, column]) for column in (0, 1))
    blocks, marker = range(L), "o" if L == 1 else ""  # a single block has no line to draw
    faint = max(0.08, min(0.7, 6 / B))
    left.plot(blocks, lens.probability, color=LINES[0], linewidth=0.7, alpha=faint, marker=marker)
    left.plot(blocks, lens.probability.mean(axis=1), color=INK, linewidth=2.2, marker=marker, label="mean")
    left.plot([], [], color=LINES[0], linewidth=0.7, label="one image")
    tracked = "predicted" if np.array_equal(lens.target, lens.top[-1]) else "target"
    _finish_axis(left, f"Probability of the {tracked} class", "probability")
    right.plot(blocks, lens.agreement, color=LINES[1], marker=marker, label="same as after the last block")
    title = f"Prediction after each block, {B} image{'s' * (B > 1)}"
    _finish_axis(right, title, "fraction of images")
    below = figure.add_subplot(grid[1, :])
    image = _draw_predictions(below, lens, shown, names, classes)
    add_colorbar(figure, image, below, "probability of\nthe prediction")
    return figure


def _finish_axis(axis: Axes, title: str, label: str) -> None:
    axis.set(title=title, xlabel="after block", ylabel=label, ylim=(-0.03, 1.03))
    locator: Any = axis.xaxis.get_major_locator()
    locator.set_params(integer=True)  # blocks are integers
    axis.legend(fontsize=8, loc="best")


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
    """Name the block at which predictions settle, and compare the first block with the last."""
    L, B = lens.top.shape
    settled = lens.settled
    first, last = lens.probability[0].mean(), lens.probability[-1].mean()
    where = f"stops changing after block {settled[0]}"
    if B > 1:
        where = f"stops changing after block {settled.mean():.1f} on average over {B} images (earliest "
        where += f"{settled.min()}, latest {settled.max()})"
    return (
        "The model's head is applied after every block, as if that block were the last. The prediction "
        f"{where}; blocks are numbered 0 to {L - 1}. After the first block, {lens.agreement[0]:.0%} of the "
        f"predictions are already those of the last, and the mean probability of the target class is "
        f"{first:.2f}; after the last block it is {last:.2f}."
    )


def table(lens: Lens) -> Rows:
    """List the means over images after each block."""
    columns = zip(lens.probability.mean(axis=1), lens.agreement, strict=True)
    return ["block", "probability", "agreement"], [[n, *map(float, row)] for n, row in enumerate(columns)]


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    images, activation = request.drawn, request.bundle.scores.activation
    lens = compute(request.model, images.images, target=request.target, activation=activation)
    return lens, draw(lens, request.bundle.labels, images.names)


FIGURE = FigureSpec("lens", "Logit lens", _make, caption, table)
