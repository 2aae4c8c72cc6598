"""When does the answer come about? The head asked after every block, as if it were the last.

After block i the tokens go through the model's own last norm, pool and head (the logit lens,
nostalgebraist 2020). The head was trained on the last block alone: an early answer that is poor may
mean that the block does not know yet, or that it says it in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError, printable
from vitrail.inspect.answers import BATCH, check_answers, check_classes, choose_target, on_device
from vitrail.inspect.canvas import AMOUNT, INK, LINES, bar, canvas, in_our_style
from vitrail.inspect.sample import sample_model, sample_pictures, show
from vitrail.model import ViT
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MOST_COLUMNS = 8


@dataclass(frozen=True, eq=False)
class Lens:
    """What the head says after each of L blocks about B pictures."""

    target: NDArray[np.int64]
    """The class that is followed: (B,)."""
    probability: NDArray[np.float32]
    """Of that class: (L, B)."""
    top: NDArray[np.int64]
    """The class with the highest probability: (L, B)."""
    top_probability: NDArray[np.float32]
    """And that probability: (L, B)."""
    labels: NDArray[np.int64] | None
    """The true classes, (B,), where they were given."""

    @property
    def agreement(self) -> NDArray[np.float64]:
        """The share of pictures for which the block's answer is the model's: (L,)."""
        return (self.top == self.top[-1]).mean(axis=1)

    @property
    def accuracy(self) -> NDArray[np.float64] | None:
        """The share of pictures that the block's answer gets right: (L,)."""
        return None if self.labels is None else (self.top == self.labels).mean(axis=1)

    @property
    def settled(self) -> NDArray[np.int64]:
        """For each picture the first block after which the answer does not change any more: (B,)."""
        changes = self.top != self.top[-1]  # (L, B)
        depth = len(changes)
        return np.where(changes.any(axis=0), depth - np.argmax(changes[::-1], axis=0), 0)


def compute(
    model: ViT,
    images: Tensor,
    *,
    target: int | Sequence[int] | Tensor | None = None,
    labels: Sequence[int] | Tensor | None = None,
) -> Lens:
    """Ask the head after every block.

    Args:
        target: the class to follow, one for all pictures or one each; without it the model's answer.
        labels: the true classes, to see how often each block would be right.
    """
    check_answers(model, images)
    config = model.config
    true = None if labels is None else check_classes("labels", labels, len(images), config.classes).numpy()
    with evaluating(model):
        parts = [_by_block(model, part) for part in on_device(model, images).split(BATCH)]
    answers = torch.cat(parts, dim=1)  # (L, B, K)
    chosen = choose_target(answers[-1], target)
    followed = answers.gather(2, chosen.expand(config.depth, -1)[..., None])[..., 0]
    best = answers.max(dim=2)
    return Lens(
        target=chosen.cpu().numpy(),
        probability=followed.exp().cpu().numpy(),
        top=best.indices.cpu().numpy(),
        top_probability=best.values.exp().cpu().numpy(),
        labels=true,
    )


def _by_block(model: ViT, images: Tensor) -> Tensor:
    """Log-probabilities after each block: (L, B, K)."""
    layers = model.encode(images, layers=range(model.config.depth)).layers
    return torch.stack([model.head(layers[i].pooled).float().log_softmax(dim=1) for i in range(len(layers))])


# ---- the figure -----------------------------------------------------------------------------


@in_our_style
def draw(found: Lens, classes: Sequence[str] | None = None, names: Sequence[str] | None = None) -> Figure:
    """The probability by depth, how often a block agrees, and the answers of up to eight pictures.

    Args:
        classes: their names.
        names: of the pictures.
    """
    L, B = found.top.shape
    if names is not None and len(names) != B:
        raise InputError(f"There must be a name for each of {B} pictures.", f"{len(names)}", "Give as many.")
    shown = min(B, MOST_COLUMNS)
    rows = max(1.3, 0.21 * L)
    figure = canvas(max(8.0, 1.0 + 1.0 * shown), 3.6 + rows + 0.9)
    grid: Any = figure.add_gridspec(2, 2, height_ratios=[3.0, rows + 0.5])
    _draw_probability(figure.add_subplot(grid[0, 0]), found)
    _draw_shares(figure.add_subplot(grid[0, 1]), found)
    below = figure.add_subplot(grid[1, :])
    image = _draw_answers(below, found, shown, names, classes)
    bar(figure, image, below, "probability of\nthe block's answer")
    return figure


def _draw_probability(axis: Axes, found: Lens) -> None:
    blocks = np.arange(len(found.top))
    own = np.array_equal(found.target, found.top[-1])
    asked = "the model's own answer" if own else "the class asked about"
    axis.plot(
        blocks, found.probability, color=LINES[0], linewidth=0.7, alpha=_thin(found), marker=_dot(found)
    )
    axis.plot(
        blocks, found.probability.mean(axis=1), color=INK, linewidth=2.2, marker=_dot(found), label="mean"
    )
    axis.plot([], [], color=LINES[0], linewidth=0.7, label="one picture")
    axis.set_title(f"Probability of {asked}")
    _finish_lines(axis, "probability")


def _draw_shares(axis: Axes, found: Lens) -> None:
    blocks = np.arange(len(found.top))
    axis.plot(blocks, found.agreement, color=LINES[1], marker=_dot(found), label="same as the last block's")
    if found.accuracy is not None:
        axis.plot(blocks, found.accuracy, color=LINES[2], linestyle="--", marker=_dot(found), label="right")
    B = len(found.target)
    axis.set_title(f"The block's answer, over {B} picture{'s' * (B > 1)}")
    _finish_lines(axis, "share of pictures")


def _finish_lines(axis: Axes, label: str) -> None:
    axis.set(xlabel="after block", ylabel=label, ylim=(-0.03, 1.03))
    locator: Any = axis.xaxis.get_major_locator()
    locator.set_params(integer=True)  # there is no half a block
    axis.legend(fontsize=8, loc="best")


def _thin(found: Lens) -> float:
    """Few lines are drawn clearly, many faintly."""
    return max(0.08, min(0.7, 6 / len(found.target)))


def _dot(found: Lens) -> str:
    """A model of one block has no line to draw."""
    return "o" if len(found.top) == 1 else ""


def _draw_answers(
    axis: Axes, found: Lens, shown: int, names: Sequence[str] | None, classes: Sequence[str] | None
) -> Any:
    L, B = found.top.shape
    image = axis.imshow(found.top_probability[:, :shown], cmap=AMOUNT, vmin=0, vmax=1, aspect="auto")
    for (block, picture), number in np.ndenumerate(found.top[:, :shown]):
        text = printable(classes[int(number)], 14) if classes else str(number)
        light = found.top_probability[block, picture] < 0.6
        settled = block >= found.settled[picture]
        weight = "bold" if settled else "normal"
        axis.text(
            picture, block, text, ha="center", va="center", fontsize=7, fontweight=weight,
            color="white" if light else INK,
        )  # fmt: skip
    heads = (
        [str(n) for n in range(shown)] if names is None else [printable(name, 14) for name in names[:shown]]
    )
    axis.set_xticks(range(shown), heads, fontsize=8)
    axis.set_yticks(range(L), [str(block) for block in range(L)], fontsize=7)
    axis.tick_params(length=0)
    axis.set_ylabel("after block")
    more = f" (the first {shown} of {B} pictures)" if shown < B else ""
    axis.set_title(f"The block's answer; bold once it does not change any more{more}")
    return image


def caption(found: Lens) -> str:
    """At which block the answers settle."""
    L, B = found.top.shape
    settled = found.settled
    text = [
        "The model's own head is asked after every block, as if that block were the last.",
        f"The answer stops changing after block {settled.mean():.1f} in the mean over {B} "
        f"picture{'s' * (B > 1)} (blocks count from 0 to {L - 1}; the earliest after block {settled.min()}, "
        f"the latest after block {settled.max()}).",
    ]
    first, last = found.probability[0].mean(), found.probability[-1].mean()
    text.append(
        f"The first block agrees with the last for {found.agreement[0]:.0%} of the pictures and gives the "
        f"class asked about a probability of {first:.2f}; in the end it has {last:.2f}."
    )
    if found.accuracy is not None:
        best, right = int(np.argmax(found.accuracy)), found.accuracy
        text.append(
            f"Right are {right[0]:.0%} after the first block and {right[-1]:.0%} after the last"
            + (f"; the most, {right[best]:.0%}, after block {best}." if best < L - 1 else ".")
        )
    return " ".join(text)


def table(found: Lens) -> tuple[list[str], list[list[object]]]:
    """A row for each block: means over pictures."""
    header = ["block", "probability", "agreement"] + (["accuracy"] if found.accuracy is not None else [])
    columns = [found.probability.mean(axis=1), found.agreement]
    columns += [found.accuracy] if found.accuracy is not None else []
    return header, [[n, *(float(column[n]) for column in columns)] for n in range(len(found.top))]


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        pictures = sample_pictures(40)
        labels = [int(name.removeprefix("digit ")) for name in pictures.names]
        found = compute(sample_model().model, pictures.images, labels=labels)
        return draw(found, names=pictures.names), caption(found)

    show("lens", sample)
