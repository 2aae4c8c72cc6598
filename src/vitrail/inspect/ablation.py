"""What is each head good for? The model without it.

One head of one block after the other has its output put to zero, and the pictures go through again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError
from vitrail.inspect.answers import BATCH, check_answers, check_classes, log_probabilities, on_device
from vitrail.inspect.canvas import INK, SIGNED, bar, canvas, in_our_style
from vitrail.inspect.sample import sample_model, sample_pictures, show
from vitrail.model import ViT, edit
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MOST_WRITTEN = 12  # rows or columns of numbers that can still be read
NOTHING = 0.001  # what changes less than 0.1 % of the answers changes nothing


@dataclass(frozen=True, eq=False)
class Ablation:
    """The model without each of its k heads in each of its L blocks."""

    drop: NDArray[np.float64]
    """How much the log-probability of the model's own answer falls, the mean over pictures: (L, k)."""
    changed: NDArray[np.float64]
    """The share of pictures that get another answer: (L, k)."""
    accuracy: NDArray[np.float64] | None
    """The share of right answers without the head, (L, k), where labels were given."""
    whole: float | None
    """The share of right answers with all heads."""
    pictures: int

    @property
    def effect(self) -> NDArray[np.float64]:
        """The change of accuracy where labels were given, otherwise the drop: (L, k)."""
        return self.drop if self.accuracy is None or self.whole is None else self.accuracy - self.whole

    @property
    def harm(self) -> NDArray[np.float64]:
        """The effect, positive where the model is worse off without the head: (L, k)."""
        return self.drop if self.accuracy is None else -self.effect

    @property
    def idle(self) -> NDArray[np.bool_]:
        """Heads whose absence changes less than 0.1 %, of the accuracy or of the answers: (L, k)."""
        return (self.changed if self.accuracy is None else np.abs(self.effect)) < NOTHING


def compute(
    model: ViT, images: Tensor | Iterable[Tensor], labels: Sequence[int] | Tensor | None = None
) -> Ablation:
    """Leave out each head in turn; a batch is read once and goes through L k + 1 times.

    Args:
        images: a batch (B, C, H, W), or batches of any size, one after the other.
        labels: the true classes of all pictures, in their order.
    """
    check_answers(model)
    L, k = model.config.depth, model.config.heads
    drop, changed, right = np.zeros((L, k)), np.zeros((L, k)), np.zeros((L, k))
    count, whole = 0, 0
    true = None if labels is None else _as_classes(labels, model.config.classes)
    with evaluating(model):
        for batch in _batches(model, images):
            answers = log_probabilities(model, batch)
            own = answers.max(dim=1)
            wanted = None if true is None else true[count : count + len(batch)].to(batch.device)
            count += len(batch)
            _check_count(count, true)
            whole += 0 if wanted is None else int((own.indices == wanted).sum())
            for place in np.ndindex(L, k):
                without = _without(model, batch, *place)
                kept = without.gather(1, own.indices[:, None])[:, 0]
                choice = without.argmax(dim=1)
                drop[place] += float((own.values - kept).sum())
                changed[place] += int((choice != own.indices).sum())
                right[place] += 0 if wanted is None else int((choice == wanted).sum())
    _check_count(count, true, done=True)
    known = true is not None
    return Ablation(
        drop / count,
        changed / count,
        right / count if known else None,
        whole / count if known else None,
        count,
    )


def _without(model: ViT, images: Tensor, block: int, head: int) -> Tensor:
    """Log-probabilities with one head silent: (B, K)."""

    def silence(heads: Tensor) -> Tensor:  # (B, k, T, d)
        kept = torch.ones(heads.shape[1], 1, 1, dtype=heads.dtype, device=heads.device)
        kept[head] = 0
        return heads * kept

    with edit(model, {f"blocks.{block}.attention.heads": silence}):
        return log_probabilities(model, images)


def _batches(model: ViT, images: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    if isinstance(images, Tensor):
        check_answers(model, images)
        images = images.split(BATCH)
    for batch in images:
        if not isinstance(batch, Tensor):
            got = f"a {type(batch).__name__} among the batches"
            raise InputError("Pictures must come as tensors (B, C, H, W).", got, "Give labels on their own.")
        check_answers(model, batch)
        yield on_device(model, batch)


def _as_classes(labels: Sequence[int] | Tensor, classes: int) -> Tensor:
    return check_classes("labels", labels, len(labels), classes)


def _check_count(count: int, labels: Tensor | None, *, done: bool = False) -> None:
    """As many labels as pictures, and at least one of both."""
    if done and not count:
        raise InputError("There must be pictures to look at.", "no batch", "Give at least one.")
    if labels is not None and (count > len(labels) or (done and count < len(labels))):
        got = f"{len(labels)} labels for {count} pictures" + ("" if done else " and more")
        raise InputError("There must be a label for each picture.", got, "Give as many, in the same order.")


# ---- the figure -----------------------------------------------------------------------------


@in_our_style
def draw(found: Ablation) -> Figure:
    """Blocks down, heads across; red where the model is worse off without the head."""
    L, k = found.drop.shape
    known, percent = found.accuracy is not None, 100 if found.accuracy is not None else 1
    values = found.effect * percent
    most = float(np.abs(values).max()) or 1.0
    written = max(L, k) <= MOST_WRITTEN
    cell = (0.62, 0.36) if written else (0.3, 0.22)
    title = f"The model without one head ({found.pictures} picture{'s' * (found.pictures > 1)})"
    figure = canvas(max(4.6, cell[0] * k + 2.2), max(2.8, cell[1] * L + 1.2), title)
    axis = figure.subplots()
    # Worse is red in both: less accuracy is below 0, a drop above it.
    image = axis.imshow(
        values, cmap=SIGNED.removesuffix("_r") if known else SIGNED, vmin=-most, vmax=most, aspect="auto"
    )
    if written:
        digits = min(4, max(1, 2 - math.floor(math.log10(most))))
        for (block, head), value in np.ndenumerate(values):
            dark = abs(value) > 0.6 * most
            text = f"{round(float(value), digits) + 0.0:+.{digits}f}"  # + 0.0: there is no -0
            axis.text(head, block, text, ha="center", va="center", fontsize=8, color="white" if dark else INK)
    axis.set(xlabel="head", ylabel="block")
    axis.set_xticks(range(k))
    axis.set_yticks(range(L))
    axis.tick_params(length=0, labelsize=8 if written else 7)
    bar(figure, image, axis, _unit(found))
    return figure


def _unit(found: Ablation) -> str:
    if found.accuracy is not None:
        return "change of accuracy, in points\n(red: worse without it)"
    return "drop of the answer's\nlog-probability, in nats\n(red: worse without it)"


def caption(found: Ablation) -> str:
    """Which head matters most, and how many do not matter."""
    L, k = found.drop.shape
    block, head = divmod(int(np.lexsort((-found.drop.ravel(), -found.harm.ravel()))[0]), k)
    harm, changed, idle = found.harm[block, head], found.changed[block, head], int(found.idle.sum())
    text = [
        "Each cell is the model with the output of one head put to zero; red means that it is worse off "
        f"(n = {found.pictures})."
    ]
    if found.whole is None:
        text.append(
            f"Head {head} of block {block} matters most: without it the log-probability of the model's own "
            f"answers falls by {harm:.3g} nats and {changed:.1%} of them change."
        )
        text.append(f"{idle} of {L * k} heads change less than 0.1 % of the answers.")
    else:
        text.append(
            f"Head {head} of block {block} matters most: without it the accuracy goes from "
            f"{found.whole:.1%} to {found.whole - harm:.1%}, and {changed:.1%} of the answers change."
        )
        text.append(f"{idle} of {L * k} heads change the accuracy by less than 0.1 %.")
    if found.pictures * NOTHING < 1:
        text.append(f"One picture is {1 / found.pictures:.1%} here, so smaller effects cannot be seen.")
    return " ".join(text)


def table(found: Ablation) -> tuple[list[str], list[list[object]]]:
    """A row for each head."""
    header = ["block", "head", "drop", "changed"] + (["accuracy"] if found.accuracy is not None else [])
    columns = [found.drop, found.changed] + ([found.accuracy] if found.accuracy is not None else [])
    places = np.ndindex(found.drop.shape)
    return header, [[*place, *(float(column[place]) for column in columns)] for place in places]


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        pictures = sample_pictures(200)
        labels = [int(name.removeprefix("digit ")) for name in pictures.names]
        found = compute(sample_model().model, pictures.images, labels)
        return draw(found), caption(found)

    show("ablation", sample)
