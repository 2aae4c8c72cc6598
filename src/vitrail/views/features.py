"""Patch features: principal components as colors, foreground, token norms, and similarity to one patch.

The components are computed over all patches of all images together, so a color means the same in every image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT, record
from vitrail.model.device import eval_mode
from vitrail.views.canvas import DIVERGING, LINES, new_figure, show_image, show_map, styled
from vitrail.views.components import principal
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.figure_images import ImageBatch, check_finite, check_images, check_index, tell_apart
from vitrail.views.sample import sample_images, sample_model, show_sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Mask = NDArray[np.bool_]

_MAX_IMAGES = 8
_MAD_TO_STD = 1.4826  # from median absolute deviation to standard deviation, for a normal distribution
_ARTIFACT_DEVIATIONS = 5  # a norm this far above the median is an artifact (compare Darcet et al. 2023)


@dataclass(frozen=True, eq=False)
class Features:
    """Statistics of the patch tokens of B images."""

    layer: int | None
    """The block of the tokens, counted from 0; None for the output of the encoder."""
    colors: NDArray[np.float32]
    """(B, h, w, 3) in [0, 1]: the first three components, each scaled from its 1 % to its 99 % quantile."""
    explained_variance: Floats
    """(up to 3,): fraction of the variance that each component explains."""
    foreground: Mask
    """(B, h, w): the side of the first component with fewer patches on the image border."""
    foreground_border: float
    """Fraction of the foreground patches that lie on the border."""
    background_border: float
    """Fraction of the background patches that lie on the border."""
    between_images: float
    """Fraction of the variance of the first component that is between images rather than within them."""
    patch: tuple[int, int]
    """Row and column of the reference patch."""
    cosine: Floats
    """(B, h, w): cosine similarity of each patch with the reference patch of the same image."""
    norms: Floats
    """(L, B, h, w): L2 norm of each token after each block, before the final norm."""
    limits: Floats
    """(L,): norms above this are artifacts: the median plus five robust standard deviations."""
    block: int
    """The block whose norms are drawn."""

    @property
    def artifacts(self) -> Mask:
        """(L, B, h, w): tokens with an unusually large norm."""
        return self.norms > self.limits[:, None, None, None]


def compute(
    model: ViT, images: Tensor, layer: int | None = None, patch: tuple[int, int] | None = None
) -> Features:
    """Analyze the tokens that `model.encode` returns, or would return if block `layer` were the last.

    Args:
        patch: row and column of the reference patch; by default the central one.
    """
    check_images(model, images)
    config = model.config
    block = config.depth - 1 if layer is None else check_index("layer", layer, config.depth)
    row, column = _check_patch(patch, config.grid)
    with eval_mode(model), record(model, "blocks.*.out") as tape:
        last = model.encode(images.to(model.tokens.proj.weight.device), layers=[block])
        block_norms = [z[:, config.prefix :].double().norm(dim=2).cpu().numpy() for z in tape.values()]
        tokens = last.layers[block].patches.double().cpu().numpy()  # (B, h, w, D)
    check_finite("The tokens", tokens)
    norms = np.stack(block_norms).reshape(config.depth, *tokens.shape[:3])
    components, explained = principal(tokens.reshape(-1, tokens.shape[3]))
    values = (tokens - tokens.mean(axis=(0, 1, 2))) @ components[:3].T  # (B, h, w, up to 3)
    first = values[..., 0] if len(explained) else np.zeros(tokens.shape[:3])
    foreground, foreground_border, background_border = _split_foreground(first)
    return Features(
        layer=None if layer is None else block,
        colors=_as_colors(values),
        explained_variance=explained[:3],
        foreground=foreground,
        foreground_border=foreground_border,
        background_border=background_border,
        between_images=float(first.mean(axis=(1, 2)).var() / first.var()) if len(explained) else 0.0,
        patch=(row, column),
        cosine=_cosines(tokens, row, column),
        norms=norms,
        limits=np.array([_artifact_limit(values) for values in norms]),
        block=block,
    )


def _check_patch(patch: tuple[int, int] | None, grid: tuple[int, ...]) -> tuple[int, int]:
    h, w = grid
    if patch is None:
        return h // 2, w // 2
    if not isinstance(patch, tuple | list) or len(patch) != 2:
        raise InputError(
            f"patch must be a row and a column of the {h} x {w} patch grid, not {printable(patch)}."
        )
    return check_index("patch row", patch[0], h), check_index("patch column", patch[1], w)


def _as_colors(values: Floats) -> NDArray[np.float32]:
    """Components as red, green and blue; a missing component is 0.5 everywhere."""
    colors = np.full((*values.shape[:3], 3), 0.5, dtype=np.float32)
    for n in range(values.shape[3]):
        low, high = np.quantile(values[..., n], [0.01, 0.99])
        if high > low:
            colors[..., n] = ((values[..., n] - low) / (high - low)).clip(0, 1)
    return colors


def _split_foreground(first: Floats) -> tuple[Mask, float, float]:
    """The foreground mask, and the fraction of border patches in foreground and background.

    The first component is thresholded by Otsu's method. Objects are rarely along the image border, so the
    side with the smaller fraction of border patches is the foreground; at a tie, the smaller side.
    """
    side = first > _otsu_threshold(first.ravel())
    edge = np.ones(first.shape[1:], dtype=bool)
    edge[1:-1, 1:-1] = False
    border = [float(edge[np.nonzero(half)[1:]].mean()) if half.any() else 1.0 for half in (side, ~side)]
    sizes = [int(side.sum()), int((~side).sum())]
    if not all(sizes):  # all values are equal
        return np.zeros_like(side), float("nan"), border[sizes.index(max(sizes))]
    if (border[0], sizes[0]) <= (border[1], sizes[1]):
        return side, border[0], border[1]
    return ~side, border[1], border[0]


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


def _cosines(tokens: Floats, row: int, column: int) -> Floats:
    """Cosine similarity of every patch with one patch of the same image: (B, h, w)."""
    unit = tokens / np.linalg.norm(tokens, axis=3, keepdims=True).clip(min=1e-300)
    return np.einsum("bhwd,bd->bhw", unit, unit[:, row, column])


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
    """One column for each of the first eight images, and the norms of all blocks below."""
    count = min(len(images), _MAX_IMAGES)
    height = features.foreground.shape[1] / features.foreground.shape[2]
    tall = min(max(height, 0.5), 2.0)
    part = f", the first {count} of {len(images)} images" if count < len(images) else ""
    where = "the last layer" if features.layer is None else f"block {features.layer}"
    figure = new_figure(max(4.8, 2.6 + 0.95 * count), 2.6 + 4.9 * tall, f"Patch tokens of {where}{part}")
    parts: Any = figure.subfigures(2, 1, height_ratios=[4.9 * tall, 2.0])
    upper, lower = parts
    axes = upper.subplots(5, count + 1, squeeze=False, width_ratios=[1] * count + [0.09])  # last: color bars
    for axis in axes[:3, -1]:
        axis.axis("off")
    for n, name in enumerate(tell_apart(images.names[:count], 11)):
        _draw_column(axes[:, n], features, images, n, name)
    rows = [
        "image",
        "components\n1, 2, 3 as\nred, green, blue",
        "foreground",
        "norm",
        "cosine with\nmarked patch",
    ]
    for axis, label in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    for row, label in ((3, f"norm,\nblock {features.block}"), (4, "cosine")):
        colorbar = upper.colorbar(axes[row, 0].images[0], cax=axes[row, -1], label=label)
        colorbar.outline.set_visible(False)
    _draw_norms(lower.subplots(), features)
    return figure


def _draw_column(axes: Any, features: Features, images: ImageBatch, n: int, name: str) -> None:
    """The rows of one image, from top to bottom."""
    largest = float(features.norms[features.block].max())
    show_image(axes[0], images.pixels[n])
    axes[0].set_title(name, fontsize=7.5, parse_math=False)
    axes[1].imshow(features.colors[n])
    axes[2].imshow(np.where(features.foreground[n], 0.85, 0.15), cmap="gray", vmin=0, vmax=1)
    show_map(axes[3], features.norms[features.block, n], vmax=largest)
    for row, column in np.argwhere(features.artifacts[features.block, n]):
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
    axis.set(xlabel="block", ylabel="token norm", ylim=(0, None))
    axis.set_xlim(-0.5, len(flat) - 0.5)
    axis.set_xticks(blocks[:: -(-len(flat) // 16)])
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def caption(features: Features) -> str:
    if not len(features.explained_variance):
        return "All patch tokens are equal, so there are no components to show."
    variance = ", ".join(f"{fraction:.0%}" for fraction in features.explained_variance)
    return (
        "Red, green and blue are the first principal components of all patch tokens together "
        f"({variance} of the variance), so a color means the same in every image. The last row shows the "
        "cosine similarity of each patch with the circled one. "
        f"{_describe_foreground(features)} {_describe_norms(features)}"
    )


def _describe_foreground(features: Features) -> str:
    text = (
        f"Thresholding the first component gives a foreground of {features.foreground.mean():.0%} of the "
        f"patches; {features.foreground_border:.0%} of the foreground and {features.background_border:.0%} "
        "of the background lie on the image border."
    )
    if len(features.foreground) == 1:
        return text
    what = "images" if features.between_images > 0.5 else "patches within an image"
    return (
        f"{text} {features.between_images:.0%} of the variance of this component is between images, so it "
        f"mainly separates {what}."
    )


def _describe_norms(features: Features) -> str:
    norms, count = features.norms[features.block], int(features.artifacts[features.block].sum())
    artifacts = (
        f"{count} of {norms.size} tokens are high-norm artifacts (crosses)" if count else "no token is"
    )
    artifacts += "" if count else " a high-norm artifact"
    return (
        f"In block {features.block}, {artifacts}: the median norm is {np.median(norms):.1f}, the limit (five "
        f"robust standard deviations above it) is {features.limits[features.block]:.1f}, and the largest "
        f"norm is {norms.max():.1f}."
    )


def table(features: Features) -> tuple[list[str], list[list[object]]]:
    """One row per block with the norms; artifacts are counted over all images."""
    flat = features.norms.reshape(len(features.norms), -1)
    counts = features.artifacts.reshape(len(flat), -1).sum(axis=1)
    columns = (np.median(flat, axis=1), flat.max(axis=1), features.limits)
    rows: list[list[object]] = [
        [block, *map(float, values), int(counts[block])]
        for block, values in enumerate(zip(*columns, strict=True))
    ]
    return ["block", "median_norm", "max_norm", "limit", "artifacts"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    images = request.drawn()
    features = compute(request.model, images.images)
    return features, draw(features, images)


FIGURE = FigureSpec("features", "Patch features", _make, caption, table)


if __name__ == "__main__":
    images = sample_images()
    features = compute(sample_model().model, images.images)
    show_sample("features", lambda: (draw(features, images), caption(features)))
