"""Similarity of the representations in all layers: linear CKA (Kornblith et al. 2019).

    CKA(X, Y) = |Y^T X|^2 / (|X^T X| |Y^T Y|)

with Frobenius norms, where X and Y (n, D) have one row per token of each image and centered columns. It is 1
if Y is a rotated and isotropically scaled X. Nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model import ViT, record
from vitrail.model.device import eval_mode
from vitrail.views.canvas import ON_DATA, SEQUENTIAL, Figure, add_colorbar, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import check_finite, check_images, device_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Similarity:
    """CKA between all pairs of layers."""

    names: list[str]
    """embed, then the blocks numbered from 0, then final: the tokens after the final norm."""
    cka: Floats
    """(layers, layers), from 0 to 1; NaN for a layer whose vectors are all equal."""
    rows: int
    """n, the number of vectors per layer."""
    width: int
    """D, the dimension of the vectors."""


def compute(model: ViT, images: Tensor) -> Similarity:
    """Compare layers by the patch tokens of all images."""
    check_images(model, images)
    names = ["embed", *map(str, range(model.config.depth)), "final"]
    with eval_mode(model), record(model, "embed", "blocks.*.out") as tape:
        last = model.encode(images.to(device_of(model)))
    features = []
    for name, tokens in zip(names, [*tape.values(), last.tokens], strict=True):
        rows = tokens[:, last.prefix_count :].flatten(0, 1).double().cpu().numpy()
        check_finite(f"The vectors of {name}", rows)
        features.append(rows - rows.mean(axis=0))
    count, width = features[0].shape
    if count < 2:
        raise InputError("CKA needs at least two vectors, but there is only 1 patch; pass more images.")
    return Similarity(names, linear_cka(features), count, width)


def linear_cka(features: list[Floats]) -> Floats:
    """Linear CKA between all pairs of centered arrays (n, D)."""
    count = len(features)
    products = np.empty((count, count))
    for i, x in enumerate(features):
        for j, y in enumerate(features[: i + 1]):
            products[i, j] = products[j, i] = np.square(y.T @ x).sum()
    norms = np.sqrt(np.diagonal(products))
    largest = np.array([np.square(x).max() for x in features])
    norms = np.where(norms > 1e-20 * max(largest.max(), 1e-300), norms, np.nan)  # below: rounding errors only
    return (products / norms[:, None] / norms).clip(0, 1)


@styled
def draw(similarity: Similarity) -> Figure:
    """Draw the matrix of CKA between layers."""
    count = len(similarity.names)
    side = min(7.0, max(3.4, 1.6 + 0.32 * count))
    figure = new_figure(side + 1.2, side + 0.4, f"Linear CKA between layers, {similarity.rows} patch tokens")
    axis = figure.subplots()
    axis.set_facecolor("#bbbbbb")  # shows where the value is NaN
    image = axis.imshow(similarity.cka, cmap=SEQUENTIAL, vmin=0, vmax=1)
    step = -(-count // 20)
    ticks = [n for n in range(count) if n in (0, count - 1) or ((n - 1) % step == 0 and n < count - step)]
    labels = [similarity.names[n] for n in ticks]
    axis.set_xticks(ticks, labels, rotation=90 if count > 5 else 0)
    axis.set_yticks(ticks, labels)
    axis.set(xlabel="layer", ylabel="layer")
    axis.spines[:].set_visible(False)
    if count <= 8:
        for (i, j), value in np.ndenumerate(similarity.cka):
            shade = ON_DATA[int(value <= 0.6)]
            axis.text(j, i, "-" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", color=shade)
    add_colorbar(figure, image, axis, "CKA")
    return figure


def caption(similarity: Similarity) -> str:
    """Explain the matrix, and where representations change most."""
    cka, noise = similarity.cka, similarity.width / (similarity.width + similarity.rows)
    names = [f"block {name}" if name.isdigit() else name for name in similarity.names]
    text = (
        f"Linear CKA between every two layers, over {similarity.rows} patch tokens of dimension "
        f"{similarity.width}: 1 means equal up to rotation and scaling; independent noise of this size would "
        f"have {noise:.2f}."
    )
    if constant := [name for name, value in zip(names, np.diagonal(cka), strict=True) if np.isnan(value)]:
        text += f" In {', '.join(constant)} all vectors are equal, so CKA is undefined."
    steps = np.diagonal(cka, offset=1)
    if np.isnan(steps).all():
        return text
    largest = int(np.nanargmin(steps))
    i, j = sorted(np.unravel_index(np.nanargmin(cka), cka.shape))
    return (
        f"{text} Consecutive layers have a CKA of {np.nanmean(steps):.2f} on average; the largest change is "
        f"from {names[largest]} to {names[largest + 1]} ({steps[largest]:.2f}), and the least similar layers "
        f"are {names[i]} and {names[j]} ({cka[i, j]:.2f})."
    )


def table(similarity: Similarity) -> Rows:
    """List the matrix, one row per layer."""
    rows = zip(similarity.names, similarity.cka, strict=True)
    return ["layer", *similarity.names], [[name, *map(float, values)] for name, values in rows]


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    similarity = compute(request.model, request.drawn.images)
    return similarity, draw(similarity)


FIGURE = FigureSpec("similarity", "Similarity of the blocks (CKA)", _make, caption, table)
