"""Patch features: principal components as colors, foreground, token norms, and similarity to one patch.

The components are computed over all patches of all images together, so a color means the same in every image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT, record
from vitrail.model.device import eval_mode
from vitrail.views.canvas import DIVERGING, LINES, Figure, new_figure, show_image, show_map, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import (
    ImageBatch,
    check_finite,
    check_images,
    check_index,
    device_of,
    tell_apart,
)
from vitrail.views.filters import principal

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_MAX_IMAGES = 8
_MAD_TO_STD = 1.4826  # from median absolute deviation to standard deviation, for a normal distribution
_ARTIFACT_DEVIATIONS = 5  # a norm this far above the median is an artifact (compare Darcet et al. 2023)
_ROWS = (
    "image",
    "components\n1, 2, 3 as\nred, green, blue",
    "foreground",
    "norm",
    "cosine with\nmarked patch",
)


@dataclass(frozen=True, eq=False)
class Features:
    """Statistics of the patch tokens of B images."""

    colors: NDArray[np.float32]
    """(B, h, w, 3) in [0, 1]: the first three components, each scaled from its 1 % to its 99 % quantile."""
    explained_variance: Floats
    """(up to 3,): fraction of the variance that each component explains."""
    foreground: Mask
    """(B, h, w): the side of the first component with fewer patches on the image border."""
    patch: tuple[int, int]
    """Row and column of the reference patch."""
    cosine: Floats
    """(B, h, w): cosine similarity of each patch with the reference patch of the same image."""
    norms: Floats
    """(L, B, h, w): L2 norm of each token after each block, before the final norm."""
    limits: Floats
    """(L,): norms above this are artifacts: the median plus five robust standard deviations."""

    @property
    def artifacts(self) -> Mask:
        """(L, B, h, w): tokens with an unusually large norm."""
        return self.norms > self.limits[:, None, None, None]


def compute(model: ViT, images: Tensor, patch: tuple[int, int] | None = None) -> Features:
    """Analyze the patch tokens that `model.encode` returns.

    Args:
        patch: row and column of the reference patch; by default the central one.
    """
    check_images(model, images)
    config = model.config
    h, w = config.grid
    if patch is None:
        patch = h // 2, w // 2
    elif not isinstance(patch, tuple | list) or len(patch) != 2:
        raise InputError(
            f"patch must be a row and a column of the {h} x {w} patch grid, not {printable(patch)}."
        )
    row, column = check_index("patch row", patch[0], h), check_index("patch column", patch[1], w)
    with eval_mode(model), record(model, "blocks.*.out") as tape:
        last = model.encode(images.to(device_of(model)))
        block_norms = [z[:, config.prefix :].double().norm(dim=2).cpu().numpy() for z in tape.values()]
        tokens = last.patches.double().cpu().numpy()  # (B, h, w, D)
    check_finite("The tokens", tokens)
    norms = np.stack(block_norms).reshape(config.depth, *tokens.shape[:3])
    components, explained = principal(tokens.reshape(-1, tokens.shape[3]))
    values = (tokens - tokens.mean(axis=(0, 1, 2))) @ components[:3].T  # (B, h, w, up to 3)
    unit = tokens / np.linalg.norm(tokens, axis=3, keepdims=True).clip(min=1e-300)
    first = values[..., 0] if len(explained) else np.zeros(tokens.shape[:3])
    return Features(
        colors=_as_colors(values),
        explained_variance=explained[:3],
        foreground=_find_foreground(first),
        patch=(row, column),
        cosine=np.einsum("bhwd,bd->bhw", unit, unit[:, row, column]),
        norms=norms,
        limits=np.array([_artifact_limit(values) for values in norms]),
    )


def _as_colors(values: Floats) -> NDArray[np.float32]:
    """Components as red, green and blue; a missing component is 0.5 everywhere."""
    colors = np.full((*values.shape[:3], 3), 0.5, dtype=np.float32)
    for n in range(values.shape[3]):
        low, high = np.quantile(values[..., n], [0.01, 0.99])
        if high > low:
            colors[..., n] = ((values[..., n] - low) / (high - low)).clip(0, 1)
    return colors


def _find_foreground(first: Floats) -> Mask:
    """The foreground, by the first component: one side of Otsu's threshold.

    Objects are rarely along the image border, so the side with the smaller fraction of border patches is the
    foreground; at a tie, the smaller side.
    """
    side = first > _otsu_threshold(first.ravel())
    if not side.any():  # all values are equal
        return side
    edge = np.ones(first.shape[1:], dtype=bool)
    edge[1:-1, 1:-1] = False
    return min(side, ~side, key=lambda half: (edge[np.nonzero(half)[1:]].mean(), half.sum()))


def _otsu_threshold(values: Floats) -> float:
    """The threshold with the largest variance between the two classes (Otsu 1979)."""
    ordered = np.sort(values)
    if len(ordered) == 1:
        return float(ordered[0])
    count = np.arange(1, len(ordered))
    below = ordered.cumsum()[:-1]
    above = ordered.sum() - below
    between = count * count[::-1] * (above / count[::-1] - below / count) ** 2
    index = int(between.argmax())
    return float(ordered[index] + ordered[index + 1]) / 2


def _artifact_limit(norms: Floats) -> float:
    """The norm above which a token is an artifact.

    The deviation is at least a hundredth of the median: where a normalization makes all norms nearly equal,
    rounding errors must not count as outliers.
    """
    median = float(np.median(norms))
    deviation = _MAD_TO_STD * float(np.median(np.abs(norms - median)))
    return median + _ARTIFACT_DEVIATIONS * max(deviation, 0.01 * median)


@styled
def draw(features: Features, images: ImageBatch) -> Figure:
    """Draw one column for each of the first eight images, and the norms of all blocks below."""
    total, h, w = features.foreground.shape
    count, tall = min(total, _MAX_IMAGES), min(max(h / w, 0.5), 2.0)
    part = f", the first {count} of {total} images" if count < total else ""
    title = f"Patch tokens of the last layer{part}"
    figure = new_figure(max(4.8, 2.6 + 0.95 * count), 2.6 + 4.9 * tall, title)
    parts: Any = figure.subfigures(2, 1, height_ratios=[4.9 * tall, 2.0])
    upper, lower = parts
    axes = upper.subplots(5, count + 1, squeeze=False, width_ratios=[1] * count + [0.09])  # last: color bars
    for axis in axes[:3, -1]:
        axis.axis("off")
    for n, name in enumerate(tell_apart(images.names[:count], 11)):
        _draw_column(axes[:, n], features, images.pixels[n], n)
        axes[0, n].set_title(name, fontsize=7.5, parse_math=False)
    for axis, label in zip(axes[:, 0], _ROWS, strict=True):
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    for row, label in ((3, f"norm,\nblock {len(features.norms) - 1}"), (4, "cosine")):
        colorbar = upper.colorbar(axes[row, 0].images[0], cax=axes[row, -1], label=label)
        colorbar.outline.set_visible(False)
    _draw_norms(lower.subplots(), features)
    return figure


def _draw_column(axes: Any, features: Features, pixels: NDArray[np.uint8], n: int) -> None:
    """Draw the rows of one image, from top to bottom."""
    show_image(axes[0], pixels)
    axes[1].imshow(features.colors[n])
    axes[2].imshow(np.where(features.foreground[n], 0.85, 0.15), cmap="gray", vmin=0, vmax=1)
    show_map(axes[3], features.norms[-1, n], vmax=float(features.norms[-1].max()))
    for row, column in np.argwhere(features.artifacts[-1, n]):
        axes[3].plot(column, row, marker="x", color=LINES[1], markersize=5)
    axes[4].imshow(features.cosine[n], cmap=DIVERGING, vmin=-1, vmax=1)
    axes[4].plot(*features.patch[::-1], marker="o", markersize=5, color="white", fillstyle="none")
    for axis in axes:
        axis.axis("on")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)


def _draw_norms(axis: Any, features: Features) -> None:
    flat = features.norms.reshape(len(features.norms), -1)
    blocks = np.arange(len(flat))
    for values, label, color in (
        (flat.max(axis=1), "maximum", LINES[1]),
        (features.limits, "artifact limit", LINES[2]),
        (np.median(flat, axis=1), "median", LINES[0]),
    ):
        axis.plot(blocks, values, marker=".", color=color, label=label)
    axis.set(xlabel="block", ylabel="token norm", ylim=(0, None), xlim=(-0.5, len(flat) - 0.5))
    axis.set_xticks(blocks[:: -(-len(flat) // 16)])
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def caption(features: Features) -> str:
    """Explain the rows, and count the artifacts."""
    if not len(features.explained_variance):
        return "All patch tokens are equal, so there are no components to show."
    variance = ", ".join(f"{fraction:.0%}" for fraction in features.explained_variance)
    norms, count = features.norms[-1], int(features.artifacts[-1].sum())
    artifacts = "no token is a high-norm artifact"
    if count:
        artifacts = f"{count} of {norms.size} tokens are high-norm artifacts (crosses)"
    return (
        "Red, green and blue are the first principal components of all patch tokens together "
        f"({variance} of the variance), so a color means the same in every image. Thresholding the first "
        f"component gives a foreground of {features.foreground.mean():.0%} of the patches. The last row "
        "shows the cosine similarity of each patch with the circled one. "
        f"In block {len(features.norms) - 1}, {artifacts}: the median norm is {np.median(norms):.1f}, the "
        f"limit (five robust standard deviations above it) is {features.limits[-1]:.1f}, and the largest "
        f"norm is {norms.max():.1f}."
    )


def table(features: Features) -> Rows:
    """List the norms after each block; artifacts are counted over all images."""
    flat = features.norms.reshape(len(features.norms), -1)
    counts = features.artifacts.reshape(len(flat), -1).sum(axis=1)
    columns = zip(np.median(flat, axis=1), flat.max(axis=1), features.limits, strict=True)
    rows: list[list[object]] = [
        [block, *map(float, values), int(counts[block])] for block, values in enumerate(columns)
    ]
    return ["block", "median_norm", "max_norm", "limit", "artifacts"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    features = compute(request.model, request.drawn.images)
    return features, draw(features, request.drawn)


FIGURE = FigureSpec("features", "Patch features", _make, caption, table)
