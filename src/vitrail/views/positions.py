"""Similarity of the position embeddings of every two patches (ViT paper, Fig. 7 center and Fig. 10).

Added embeddings are compared by cosine similarity. Rotary embeddings are compared by the mean over
frequencies of the cosine of the phase difference: the factor by which rotation scales q.k when q and k are
equal and all frequencies have the same weight. A position bias is shown as it is: the number added to the
attention score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.views.canvas import DIVERGING, SEQUENTIAL, Axes, Figure, add_colorbar, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import check_finite, check_images, check_index

Floats = NDArray[np.float64]

_MAX_TILES = 14  # tiles along a side; of a larger grid only _FEW_TILES are drawn
_FEW_TILES = 7


@dataclass(frozen=True, eq=False)
class Positions:
    """Similarity of the positions of all pairs of patches, and how it depends on distance."""

    position: str
    """The `position` field of the model's config."""
    measure: str
    """The name of the similarity measure."""
    grid: tuple[int, int]
    similarity: Floats
    """(h w, h w), patches in row-major order."""
    class_row: Floats | None
    """(h w): from the class token to each patch, if the class token has a position."""
    where: str
    """The heads and blocks of a position bias, in words; empty for other positions."""
    correlation: float
    """Correlation of similarity and grid distance over pairs of different patches; NaN if one is constant."""
    same_line: float
    """Mean over pairs in the same row or column."""
    other: float
    """Mean over the other pairs."""
    line_excess: float
    """Mean difference between pairs in the same row or column and other pairs at the same rounded distance.
    Pairs in a line are closer on average, so `same_line` alone is high for all that decays with distance."""
    spread: float
    """Standard deviation over pairs of different patches."""

    @property
    def is_bias(self) -> bool:
        """Whether this is a position bias, with a table for each block and head."""
        return bool(self.where)


def compute(model: ViT, head: int | None = None) -> Positions:
    """Compare positions; for a position bias, those of one head, or the mean over all, and over blocks."""
    check_images(model)
    config, position = model.config, model.position
    if not position.measure:
        raise InputError(f"A model with position={config.position!r} has no position embeddings to compare.")
    with eval_mode(model):
        tables = position.similarity(model.blocks)  # (T, T) or (N, N); of a position bias (L, k, T, T)
    where = ""
    if tables.ndim == 4:
        chosen = None if head is None else check_index("head", head, config.heads)
        tables = tables.mean(dim=0)
        tables = tables.mean(dim=0) if chosen is None else tables[chosen]
        where = f"mean over blocks, {'mean over heads' if chosen is None else f'head {chosen}'}"
    elif head is not None:
        raise InputError(
            f"head={printable(head)} does not apply to {config.position} positions, which all heads share; "
            "omit it."
        )
    values = tables.double().cpu().numpy()
    check_finite("Positions", values)
    n, count = config.prefix, config.patches
    has_row = config.class_token and len(values) > count
    class_row = values[0, n:] if has_row and (where or values[0, 0]) else None
    h, w = config.grid
    patches = values[-count:, -count:]
    measures = _nearness(patches, (h, w))
    return Positions(config.position, position.measure, (h, w), patches, class_row, where, **measures)


def _nearness(similarity: Floats, grid: tuple[int, int]) -> dict[str, float]:
    """How similarity depends on distance, and on being in the same row or column."""
    row, column = (axis.ravel() for axis in np.indices(grid))
    offsets = np.abs(row[:, None] - row), np.abs(column[:, None] - column)
    pairs = ~np.eye(len(similarity), dtype=bool)
    values, distance = similarity[pairs], np.hypot(*offsets)[pairs]
    line = (np.minimum(*offsets) == 0)[pairs]
    constant = not len(values) or np.ptp(values) <= 1e-9 * np.abs(values).max() or np.ptp(distance) == 0
    steps = distance.round()
    excess, weight = 0.0, 0
    for step in range(2, max(grid)):  # at distance 1 there are only diagonal pairs to compare with
        in_line, off_line = values[line & (steps == step)], values[~line & (steps == step)]
        if in_line.size and off_line.size:
            excess += in_line.size * float(in_line.mean() - off_line.mean())
            weight += in_line.size
    return {
        "correlation": float("nan") if constant else float(np.corrcoef(values, distance)[0, 1]),
        "same_line": _mean(values[line]),
        "other": _mean(values[~line]),
        "line_excess": excess / weight if weight else float("nan"),
        "spread": float(values.std()) if len(values) else float("nan"),
    }


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


@styled
def draw(positions: Positions) -> Figure:
    """Draw one tile per patch, at the location of the patch, with its similarity to all patches."""
    h, w = positions.grid
    rows, columns = tile_indices(h, _MAX_TILES, _FEW_TILES), tile_indices(w, _MAX_TILES, _FEW_TILES)
    # The tiles keep the shape of the grid, within limits.
    shape = len(rows) * (h + 1) / (len(columns) * (w + 1))
    where = f" ({positions.where})" if positions.where else ""
    title = f"{positions.position} positions: {positions.measure} of each patch with all patches{where}"
    figure = new_figure(8.2, min(9.0, max(2.4, 5.8 * shape + 0.8)), title)
    colors = color_scale(positions)
    if positions.class_row is None:
        axes = [figure.subplots()]
    else:
        axes = list(figure.subplots(1, 2, width_ratios=[6, 1]))
        axes[1].imshow(positions.class_row.reshape(h, w), **colors)
        axes[1].set(xticks=[], yticks=[], title="class token")
        axes[1].spines[:].set_visible(True)
    image = draw_tiles(axes[0], positions, rows, columns, colors)
    label = positions.measure if positions.is_bias else f"{positions.measure} (with itself: 1)"
    add_colorbar(figure, image, axes, label)
    figure.draw_without_rendering()  # the color bar chooses its ticks once its height is known
    return figure


def tile_indices(count: int, most: int, few: int) -> list[int]:
    """All indices along a side, or `few` evenly spaced ones if there are more than `most`."""
    return list(range(count)) if count <= most else [round(x) for x in np.linspace(0, count - 1, few)]


def color_scale(*positions: Positions) -> dict[str, Any]:
    """Color map and limits for all pairs of different patches; diverging for values of both signs.

    The similarity of a patch with itself may lie outside the limits and is then clipped.
    """
    parts = [one.similarity[~np.eye(len(one.similarity), dtype=bool)] for one in positions]
    values = np.concatenate([*parts, *(one.class_row for one in positions if one.class_row is not None)])
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    if 0 <= low < high or low < high <= 0:
        return {"cmap": SEQUENTIAL, "vmin": low, "vmax": high}
    limit = max(-low, high) or 1.0
    return {"cmap": DIVERGING, "vmin": -limit, "vmax": limit}


def draw_tiles(
    axis: Axes, positions: Positions, rows: list[int], columns: list[int], colors: dict[str, Any]
) -> Any:
    """Draw one tile for each chosen patch, arranged like the patches."""
    h, w = positions.grid
    # Tiles have a gap of 1 between them.
    canvas = np.full((len(rows) * (h + 1) - 1, len(columns) * (w + 1) - 1), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = positions.similarity[row * w + column].reshape(h, w)
            canvas[i * (h + 1) : i * (h + 1) + h, j * (w + 1) : j * (w + 1) + w] = tile
    image = axis.imshow(canvas, **colors)
    axis.set_facecolor("#999999")
    axis.spines[:].set_visible(False)
    for side, shown, ticks in ((h, rows, axis.set_yticks), (w, columns, axis.set_xticks)):
        ticks([n * (side + 1) + (side - 1) / 2 for n in range(len(shown))], [str(index) for index in shown])
    axis.tick_params(length=0, labelsize=8)
    axis.set(ylabel="patch row", xlabel="patch column")
    return image


def caption(positions: Positions) -> str:
    """Explain the tiles, and how similarity depends on distance, rows and columns."""
    h, w = positions.grid
    rows, columns = tile_indices(h, _MAX_TILES, _FEW_TILES), tile_indices(w, _MAX_TILES, _FEW_TILES)
    part = f" Only {len(rows)} of {h} rows and {len(columns)} of {w} columns of tiles are drawn."
    where = f" ({positions.where})" if positions.where else ""
    return (
        f"Each tile stands at the location of a patch and shows the {positions.measure} of that patch with "
        f"all {h} x {w} patches{where}.{part if len(rows) < h or len(columns) < w else ''} "
        f"{describe_distance(positions)} {describe_lines(positions)}"
    )


def describe_distance(positions: Positions) -> str:
    """One sentence on the correlation of similarity and distance."""
    more = "a higher bias" if positions.is_bias else "more similar positions"
    r = positions.correlation
    if np.isnan(r):
        return "All pairs of patches have the same value or the same distance, so there is no correlation."
    if r < -0.2:
        finding = f"nearby patches have {more}, as in the ViT paper"
    elif r <= 0.2:
        finding = f"nearby patches do not clearly have {more}, unlike in the ViT paper"
    else:
        finding = f"distant patches have {more}, unlike in the ViT paper"
    return f"The correlation with the distance between patches is {r:.2f}: {finding}."


def describe_lines(positions: Positions) -> str:
    """One sentence on whether rows and columns stand out."""
    if np.isnan(positions.line_excess):
        return "The grid is too small to separate the effect of rows and columns from that of distance."
    verb = "stand out" if positions.line_excess > 0.2 * positions.spread else "do not stand out"
    return (
        f"The mean is {positions.same_line:.3f} for pairs in the same row or column and "
        f"{positions.other:.3f} for other pairs; at equal distance the difference is "
        f"{positions.line_excess:+.3f} (standard deviation over all pairs: {positions.spread:.3f}), so rows "
        f"and columns {verb}."
    )


def table(positions: Positions) -> Rows:
    """List the value of each pair of patches; the class token comes first, with empty row and column."""
    w = positions.grid[1]
    rows: list[list[object]] = []
    if positions.class_row is not None:
        rows += [["", "", *divmod(j, w), float(value)] for j, value in enumerate(positions.class_row)]
    for i, values in enumerate(positions.similarity):
        rows += [[*divmod(i, w), *divmod(j, w), float(value)] for j, value in enumerate(values)]
    return ["row", "column", "to_row", "to_column", "value"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    positions = compute(request.model, head=request.head)
    return positions, draw(positions)


FIGURE = FigureSpec("positions", "Position similarity", _make, caption, table, needs_images=False)
