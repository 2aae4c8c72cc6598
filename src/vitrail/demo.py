"""The demo: a small ViT learns scikit-learn's handwritten digits, and we see where it looks.

1,797 real digits of 8 x 8 pixels come inside the scikit-learn package, so nothing is downloaded. The run
is an ordinary one, by the recipe `digits`; its folder gets a report and this file's picture besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.data.sources import Dataset, Split, open_data
from vitrail.errors import needs
from vitrail.evaluation.forward import outputs_of
from vitrail.inspect import rollout
from vitrail.inspect.pictures import from_pixels
from vitrail.recipes.start import train as run
from vitrail.training.listen import Listener
from vitrail.training.run import Run
from vitrail.weights.bundle import Bundle

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Looked:
    """What the model said of some digits, and where it looked (rollout, Fig. 6 of the paper)."""

    ink: NDArray[np.float64]
    """(B, 8, 8), from 0 to 1."""
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    score: NDArray[np.float64]
    """(B,) the probability of what it said."""
    attention: NDArray[np.float64]
    """(B, h, w), each map sums to 1."""

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.predicted == self.labels


def check_extras() -> None:
    """Say what is missing before anything is trained, not after."""
    with needs("train"):
        import sklearn  # noqa: F401
    with needs("inspect"):
        import matplotlib  # noqa: F401


def load() -> Dataset:
    return open_data("digits")


def train(digits: Dataset, out: Path, *, epochs: int, seed: int, listener: Listener) -> Run:
    """A run by the recipe `digits`."""
    return run(digits, out=out, recipe="digits", epochs=epochs, seed=seed, listener=listener)


def look(bundle: Bundle, digits: Split) -> Looked:
    """Classify, and follow the class token's attention through all blocks."""
    assert bundle.preprocess is not None
    assert digits.images is not None
    pictures = from_pixels(digits.images, bundle.preprocess, digits.names)
    logits, _ = outputs_of(bundle.model, digits, bundle.preprocess)
    score, predicted = logits.double().softmax(dim=1).max(dim=1)
    maps = rollout.compute(bundle.model, pictures.images).maps[0]
    return Looked(digits.images[..., 0] / 255, digits.labels, predicted.numpy(), score.numpy(), maps)


def choose(looked: Looked, most: int = 12) -> tuple[list[int], list[int]]:
    """Which digits to show: wrong ones, surest first, and right ones of different kinds, from 0 on."""
    wrong = np.flatnonzero(~looked.right)
    wrong = wrong[np.argsort(-looked.score[wrong], kind="stable")][: most // 2]
    right: list[int] = []
    for kind in range(10):
        right += np.flatnonzero(looked.right & (looked.labels == kind))[:1].tolist()
    return right[: most - len(wrong)], wrong.tolist()


def light(looked: Looked, index: int) -> NDArray[np.float64]:
    """The attention on one digit as brightness for each of its pixels: (8, 8), at most 1."""
    attention = looked.attention[index] / looked.attention[index].max()
    (H, W), (h, w) = looked.ink[index].shape, attention.shape
    return attention.repeat(H // h, axis=0).repeat(W // w, axis=1)


def draw(looked: Looked, path: Path) -> None:
    """A PNG of right and wrong digits, each above the same digit lit by the attention on it."""
    with needs("inspect"):
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    tight = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    heat = matplotlib.colormaps["inferno"]
    right, wrong = choose(looked)
    columns = [*right, None, *wrong] if right and wrong else [*right, *wrong]  # None: a gap
    figure = Figure(figsize=(len(columns), 2.6), dpi=120, facecolor="#17131f", layout=tight)
    count, total = int(looked.right.sum()), len(looked.right)
    title = f"{count} of {total} right, {total - count} wrong. Above the digit, below where the model looked"
    figure.suptitle(title, color="white", fontsize=11)
    for column, axes in zip(columns, figure.subplots(2, len(columns), squeeze=False).T, strict=True):
        for axis in axes:
            axis.axis("off")
        if column is not None:
            ink = looked.ink[column]
            lit = heat(light(looked, column))[..., :3] * (0.3 + 0.7 * ink)[..., None]
            axes[0].imshow(ink, cmap="gray", vmin=0, vmax=1)
            axes[1].imshow(lit)
            colour = "white" if column in right else "#ff8a70"
            axes[0].set_title(caption(looked, column), color=colour, fontsize=9)
    figure.savefig(path)


def caption(looked: Looked, index: int) -> str:
    """What the model said of one digit: how sure it was, or what would have been right."""
    said, truth = int(looked.predicted[index]), int(looked.labels[index])
    return f"{said} ({looked.score[index]:.0%})" if said == truth else f"{said}, is {truth}"
