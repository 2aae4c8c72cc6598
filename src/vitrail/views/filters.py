"""Principal components of the patch embedding filters (ViT paper, Fig. 7 left).

Each of the D channels of a token is the dot product of the patch with one filter. The principal components
are the patterns in which the filters differ, sorted by the variance that they explain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import InputError
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.model.stem import standardize
from vitrail.views.canvas import DIVERGING, LINES, Figure, add_colorbar, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import check_finite, check_images

if TYPE_CHECKING:
    from torch import Tensor

_MAX_COMPONENTS = 28  # as in the ViT paper
_VARIANCE = 0.9  # fraction of the variance that `needed` components explain
_COLUMNS = 7
_SMOOTH, _VERY_SMOOTH = 0.2, 0.5  # correlations of neighboring pixels; about 0 for noise
_SMALLEST = 1e-12  # components with less than this fraction of the variance are rounding errors


@dataclass(frozen=True, eq=False)
class Filters:
    """Principal components of the filters."""

    components: NDArray[np.float32]
    """(n, C, P, P), each of norm 1, with the sign that makes the largest weight positive."""
    explained_variance: NDArray[np.float64]
    """(n,): fraction of the variance that each component explains."""
    smoothness: NDArray[np.float64]
    """(n,): correlation of neighboring pixels: 1 for a constant patch, about 0 for noise."""
    count: int
    """D, the number of filters."""
    needed: int
    """Number of components that explain 90 % of the variance."""
    needed_by_noise: int
    """The same for as many random filters."""
    source: str
    """The layer of the filters, in words."""


def compute(model: ViT) -> Filters:
    """Compute the principal components of the filters that are applied to pixels."""
    check_images(model)
    with eval_mode(model):
        tensor, source = _pixel_filters(model)
        weight = tensor.detach().double().cpu().numpy()  # (D, C, P, P)
    check_finite("The filters", weight)
    components, explained = principal(weight.reshape(len(weight), -1))
    if not len(explained):
        raise InputError(
            f"All {len(weight)} filters are equal and have no principal components; train the model first."
        )
    noise = np.random.default_rng(0).standard_normal((len(weight), weight[0].size))
    tiles = components[:_MAX_COMPONENTS].reshape(-1, *weight.shape[1:])
    return Filters(
        components=tiles.astype(np.float32),
        explained_variance=explained[:_MAX_COMPONENTS],
        smoothness=np.array([smoothness(tile) for tile in tiles]),
        count=len(weight),
        needed=_components_needed(explained),
        needed_by_noise=_components_needed(principal(noise)[1]),
        source=source,
    )


def _pixel_filters(model: ViT) -> tuple[Tensor, str]:
    """The weights that are applied to pixels, (D, C, P, P), and the name of their layer.

    After a convolutional stem the patch projection acts on features and cannot be shown as an image; the
    layer that acts on pixels is then the first convolution of the stem.
    """
    tokens: Any = model.tokens
    match model.config.embedding:
        case "conv" | "mobile":
            return tokens.stem.conv1.weight, "the stem's first convolution"
        case "resnet":  # its convolutions standardize their weights
            weight = standardize(tokens.stem.root.conv.weight)
            return weight, "the stem's first convolution (standardized weights)"
        case "mlp":
            return tokens.proj.weight, "the first layer of the patch embedding"
        case _:
            return tokens.proj.weight, "the patch embedding"


def principal(rows: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute principal components (n, columns) as unit vectors, and the fraction of the variance of each.

    The rows are centered first. The sign of a component is arbitrary; it is chosen so that the largest weight
    is positive, which makes figures reproducible across machines. Rows that are all equal have no components.
    """
    x = rows.astype(np.float64)
    x = x - x.mean(axis=0)
    tall = x.shape[0] >= x.shape[1]
    values, vectors = np.linalg.eigh(x.T @ x if tall else x @ x.T)  # the smaller of the two
    values, vectors = values[::-1].clip(min=0), vectors[:, ::-1]
    scale = float((rows.astype(np.float64) ** 2).sum())
    valid = values > _SMALLEST * scale if scale else np.zeros(len(values), dtype=bool)
    components = vectors[:, valid].T if tall else (x.T @ vectors[:, valid] / np.sqrt(values[valid])).T
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    return components * np.sign(largest), values[valid] / values.sum() if valid.any() else values[valid]


def smoothness(tile: NDArray[np.floating]) -> float:
    """The correlation of neighboring pixels of a tile (C, P, P): their mean product over the mean square."""
    pairs = [(tile[:, 1:], tile[:, :-1]), (tile[..., 1:], tile[..., :-1])]
    products = np.concatenate([(one * other).ravel() for one, other in pairs])
    return float(products.mean() / np.square(tile).mean()) if products.size else float("nan")


def is_smooth(correlation: float) -> bool:
    """Whether filters with this smoothness have structure; False for NaN."""
    return correlation > _SMOOTH


def _components_needed(explained: NDArray[np.float64]) -> int:
    """Number of components that explain 90 % of the variance."""
    return int(np.searchsorted(explained.cumsum(), _VARIANCE - 1e-9)) + 1 if len(explained) else 0


@styled
def draw(filters: Filters) -> Figure:
    """Draw the components as tiles, and beside them the variance that they explain together."""
    count, channels = filters.components.shape[:2]
    rows = -(-count // _COLUMNS)
    layer = filters.source.split(" (")[0]
    title = f"Principal components of the {filters.count} filters of {layer}"
    if channels == 3:
        title += "\nmid gray is 0; each tile is scaled by its largest weight"
    figure = new_figure(8.6, 0.7 + 0.98 * max(rows, 2), title)
    parts: Any = figure.subfigures(1, 2, width_ratios=[3.4, 1])
    left, right = parts
    axes = left.subplots(rows, _COLUMNS, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    shown = as_colors(filters) if channels == 3 else filters.components.mean(axis=1)
    limit = float(np.abs(shown).max())
    for axis, tile, fraction in zip(axes.flat, shown, filters.explained_variance, strict=False):
        image = axis.imshow(tile, cmap=DIVERGING, vmin=-limit, vmax=limit)
        axis.set_xlabel(_percent(fraction), fontsize=7.5, labelpad=2)
    if channels != 3:
        add_colorbar(left, image, axes, "weight" if channels == 1 else f"weight, mean of {channels} channels")
    axis = right.subplots()
    percents = 100 * filters.explained_variance.cumsum()
    axis.plot(range(1, count + 1), percents, color=LINES[0], marker=".", markersize=4)
    axis.set(xlabel="components", ylabel="explained variance, %", ylim=(0, 103))
    axis.set_xlim(0, max(count, 2) + 0.7)
    axis.locator_params(axis="x", integer=True, nbins=4)
    return figure


def as_colors(filters: Filters) -> NDArray[np.float32]:
    """Weights of three channels as RGB colors, where mid gray is 0: (n, P, P, 3)."""
    largest = np.abs(filters.components).max(axis=(1, 2, 3), keepdims=True)
    return (0.5 + 0.5 * filters.components / largest).transpose(0, 2, 3, 1)


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.095 else f"{fraction:.1%}"


def caption(filters: Filters) -> str:
    """Compare the number and the smoothness of the components with those of random filters."""
    count, channels = filters.components.shape[:2]
    scale = {
        3: "each tile is scaled by its largest weight, and mid gray is 0",
        1: "all tiles share one color scale",
    }.get(channels, f"each tile is the mean over {channels} channels, and all share one color scale")
    comparison = "the filters are not made of few patterns, unlike in the ViT paper"
    if filters.needed < 0.8 * filters.needed_by_noise:
        comparison = "the filters are combinations of a few patterns, as in the ViT paper"
    smooth = float((filters.smoothness * filters.explained_variance).sum() / filters.explained_variance.sum())
    text = (
        f"The first {count} principal components of the {filters.count} filters of {filters.source}, with "
        f"the fraction of the variance that each explains; {scale}. Explaining 90% of the variance takes "
        f"{filters.needed} components, and {filters.needed_by_noise} for random filters: {comparison}."
    )
    if np.isnan(smooth):
        return text
    look = "smooth" if smooth > _VERY_SMOOTH else "somewhat smooth" if is_smooth(smooth) else "not smooth"
    return (
        f"{text} The correlation of neighboring pixels is {smooth:.2f} (1 for a constant patch, near 0 for "
        f"noise), so the components are {look}."
    )


def table(filters: Filters) -> Rows:
    """List the variance and smoothness of each component."""
    explained = filters.explained_variance
    columns = zip(explained, explained.cumsum(), filters.smoothness, strict=True)
    header = ["component", "explained_variance", "cumulative", "smoothness"]
    return header, [[number, *map(float, row)] for number, row in enumerate(columns, start=1)]


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    filters = compute(request.model)
    return filters, draw(filters)


FIGURE = FigureSpec("filters", "Patch embedding filters", _make, caption, table, needs_images=False)
