"""The demo: train a small ViT on scikit-learn's handwritten digits and show its attention.

The 1,797 digits of 8 x 8 pixels are part of the scikit-learn package, so nothing is downloaded. It is an
ordinary run of the recipe `digits`; the figure of this module is added to the run directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitrail.base.errors import require_extra
from vitrail.images.formats.sources import Split
from vitrail.views import rollout
from vitrail.views.figure_images import from_pixels
from vitrail.weights.bundle.bundle import Bundle

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class DemoPredictions:
    """Predictions for some digits, and their attention rollout (Fig. 6 of the paper)."""

    pixels: NDArray[np.float64]
    """Pixel values (B, 8, 8), from 0 to 1."""
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float64]
    """Confidence (B,): the probability of the predicted class."""
    attention: NDArray[np.float64]
    """Attention rollout (B, h, w); each map sums to 1."""

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Which predictions are correct (B,)."""
        return self.predicted == self.labels


def check_extras() -> None:
    """Fail before training if an optional package is missing."""
    with require_extra("train"):
        import sklearn  # noqa: F401
    with require_extra("inspect"):
        import matplotlib  # noqa: F401


def predict_digits(bundle: Bundle, digits: Split) -> DemoPredictions:
    """Classify digits, and follow the attention of the class token through all blocks."""
    assert bundle.preprocess is not None
    assert digits.images is not None
    images = from_pixels(digits.images, bundle.preprocess, digits.names)
    with torch.inference_mode():
        logits = bundle.model(images.images)
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    maps = rollout.compute(bundle.model, images.images).maps[0]
    pixels = digits.images[..., 0] / 255
    return DemoPredictions(pixels, digits.labels, predicted.numpy(), confidence.numpy(), maps)


def select_examples(predictions: DemoPredictions, most: int = 12) -> tuple[list[int], list[int]]:
    """Indices of digits to show: correct ones of different classes, and wrong ones by confidence."""
    wrong = np.flatnonzero(~predictions.correct)
    wrong = wrong[np.argsort(-predictions.confidence[wrong], kind="stable")][: most // 2]
    correct: list[int] = []
    for label in range(10):
        correct += np.flatnonzero(predictions.correct & (predictions.labels == label))[:1].tolist()
    return correct[: most - len(wrong)], wrong.tolist()


def attention_brightness(predictions: DemoPredictions, index: int) -> NDArray[np.float64]:
    """The attention to each pixel of a digit, relative to the largest: (8, 8)."""
    attention = predictions.attention[index] / predictions.attention[index].max()
    (H, W), (h, w) = predictions.pixels[index].shape, attention.shape
    return attention.repeat(H // h, axis=0).repeat(W // w, axis=1)


def save_figure(predictions: DemoPredictions, path: Path) -> None:
    """Save a PNG of correct and wrong digits, each above the same digit shaded by its attention."""
    with require_extra("inspect"):
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    tight = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    heat = matplotlib.colormaps["inferno"]
    correct, wrong = select_examples(predictions)
    columns = [*correct, None, *wrong] if correct and wrong else [*correct, *wrong]  # None: a gap
    figure = Figure(figsize=(len(columns), 2.6), dpi=120, facecolor="#17131f", layout=tight)
    count, total = int(predictions.correct.sum()), len(predictions.correct)
    title = f"{count} of {total} correct, {total - count} wrong. Top: the digit. Bottom: attention rollout"
    figure.suptitle(title, color="white", fontsize=11)
    for column, axes in zip(columns, figure.subplots(2, len(columns), squeeze=False).T, strict=True):
        for axis in axes:
            axis.axis("off")
        if column is not None:
            pixels = predictions.pixels[column]
            shaded = (
                heat(attention_brightness(predictions, column))[..., :3] * (0.3 + 0.7 * pixels)[..., None]
            )
            axes[0].imshow(pixels, cmap="gray", vmin=0, vmax=1)
            axes[1].imshow(shaded)
            color = "white" if column in correct else "#ff8a70"
            axes[0].set_title(caption(predictions, column), color=color, fontsize=9)
    figure.savefig(path)


def caption(predictions: DemoPredictions, index: int) -> str:
    """The prediction for one digit, with its confidence or, if it is wrong, the label."""
    predicted, label = int(predictions.predicted[index]), int(predictions.labels[index])
    return (
        f"{predicted} ({predictions.confidence[index]:.0%})"
        if predicted == label
        else f"{predicted}, is {label}"
    )
