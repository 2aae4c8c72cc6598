"""Similarity of the position embeddings of every two patches (ViT paper, Fig. 7 center and Fig. 10).

Added embeddings are compared by cosine similarity. Rotary embeddings are compared by the mean over
frequencies of the cosine of the phase difference: the factor by which rotation scales q.k when q and k are
equal and all frequencies have the same weight. A position bias is shown as it is: the number added to the
attention score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.views.canvas import DIVERGING, SEQUENTIAL, add_colorbar, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.figure_images import check_finite, check_images, check_index
from vitrail.views.sample import sample_model, show_sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_MAX_TILES = 14  # tiles along a side; of a larger grid only _FEW_TILES are drawn
_FEW_TILES = 7
_COMPARED_TILES = 3  # tiles along a side when several models are compared


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


def compute(model: ViT, head: int | None = None, layer: int | None = None) -> Positions:
    """Compare positions; for a position bias, those of one head and block, or the mean over all."""
    check_images(model)
    config, position = model.config, model.position
    if not position.measure:
        raise InputError(f"A model with position={config.position!r} has no position embeddings to compare.")
    with eval_mode(model):
        tensor = position.similarity(model.blocks)
    tensor, where = _choose_table(tensor, config.position, head, layer)
    values = tensor.double().cpu().numpy()  # (T or N, T or N)
    check_finite("Positions", values)
    n, count = config.prefix, config.patches
    has_row = config.class_token and len(values) > count
    class_row = values[0, n:] if has_row and (where or values[0, 0]) else None
    h, w = config.grid
    patches = values[-count:, -count:]
    measures = _nearness(patches, (h, w))
    return Positions(config.position, position.measure, (h, w), patches, class_row, where, **measures)


def _choose_table(tables: Tensor, position: str, head: int | None, layer: int | None) -> tuple[Tensor, str]:
    """One (T, T) table, and which: of a position bias, that of one head and block or a mean."""
    if tables.ndim == 2:
        if head is not None or layer is not None:
            raise InputError(
                f"head={printable(head)} and layer={printable(layer)} do not apply to {position} "
                "positions, which all heads and blocks share; omit them."
            )
        return tables, ""
    where = []
    for axis, kind, index in ((0, "block", layer), (1, "head", head)):  # tables: (L, k, T, T)
        if index is None:
            tables = tables.mean(dim=axis, keepdim=True)
            where.append(f"mean over {kind}s")
        else:
            index = check_index(kind, index, tables.shape[axis])
            tables = tables.narrow(axis, index, 1)
            where.append(f"{kind} {index}")
    return tables[0, 0], ", ".join(where)


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
    for step in range(
        2, max(grid)
    ):  # at distance 1 there are only diagonal pairs, 1.4 apart, to compare with
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
    """One tile per patch, at the location of the patch, with its similarity to all patches."""
    h, w = positions.grid
    rows, columns = tile_indices(h, _MAX_TILES, _FEW_TILES), tile_indices(w, _MAX_TILES, _FEW_TILES)
    figure = new_figure(*_figure_size(rows, columns, positions.grid), _title(positions))
    colors = color_scale(positions)
    if positions.class_row is None:
        axes = [figure.subplots()]
    else:
        axes = list(figure.subplots(1, 2, width_ratios=[6, 1]))
        axes[1].imshow(positions.class_row.reshape(h, w), **colors)
        axes[1].set(xticks=[], yticks=[], title="class token")
        axes[1].spines[:].set_visible(True)
    image = draw_tiles(axes[0], positions, rows, columns, colors)
    add_colorbar(figure, image, axes, _label(positions))
    figure.draw_without_rendering()  # the color bar chooses its ticks once its height is known
    return figure


def _figure_size(rows: list[int], columns: list[int], grid: tuple[int, int]) -> tuple[float, float]:
    """Width and height in inches, so that the tiles keep the shape of the grid within limits."""
    shape = len(rows) * (grid[0] + 1) / (len(columns) * (grid[1] + 1))
    return 8.2, min(9.0, max(2.4, 5.8 * shape + 0.8))


def _title(positions: Positions, patches: str = "each patch") -> str:
    title = f"{positions.position} positions: {positions.measure} of {patches} with all patches"
    return f"{title} ({positions.where})" if positions.where else title


def _label(positions: Positions) -> str:
    return positions.measure if positions.is_bias else f"{positions.measure} (with itself: 1)"


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
    canvas = np.full(
        (len(rows) * (h + 1) - 1, len(columns) * (w + 1) - 1), np.nan
    )  # a gap of 1 between tiles
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = positions.similarity[row * w + column].reshape(h, w)
            canvas[i * (h + 1) : i * (h + 1) + h, j * (w + 1) : j * (w + 1) + w] = tile
    image = axis.imshow(canvas, **colors)
    axis.set_facecolor("#999999")
    axis.spines[:].set_visible(False)
    axis.set_yticks([i * (h + 1) + (h - 1) / 2 for i in range(len(rows))], [str(row) for row in rows])
    axis.set_xticks(
        [j * (w + 1) + (w - 1) / 2 for j in range(len(columns))], [str(column) for column in columns]
    )
    axis.tick_params(length=0, labelsize=8)
    axis.set(ylabel="patch row", xlabel="patch column")
    return image


def caption(positions: Positions) -> str:
    """How to read the tiles, and how similarity depends on distance, rows and columns."""
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


def table(positions: Positions) -> tuple[list[str], list[list[object]]]:
    """One row per pair of patches; the class token comes first, with empty row and column."""
    header = ["row", "column", "to_row", "to_column", "value"]
    _, w = positions.grid
    rows: list[list[object]] = []
    if positions.class_row is not None:
        rows += [["", "", *divmod(j, w), float(value)] for j, value in enumerate(positions.class_row)]
    for i, values in enumerate(positions.similarity):
        rows += [[*divmod(i, w), *divmod(j, w), float(value)] for j, value in enumerate(values)]
    return header, rows


def compare(
    models: Mapping[str, ViT], head: int | None = None, layer: int | None = None
) -> dict[str, Positions]:
    """The positions of several models by name, such as the checkpoints of a run."""
    if not models:
        raise InputError("There are no models to compare; pass at least one.")
    positions = {name: compute(model, head, layer) for name, model in models.items()}
    kinds = {
        f"{one.position} positions on {one.grid[0]} x {one.grid[1]} patches" for one in positions.values()
    }
    if len(kinds) > 1:
        raise InputError(
            f"The models have different positions ({', '.join(sorted(kinds))}); compare checkpoints of one "
            "run."
        )
    return positions


@styled
def draw_compared(positions: Mapping[str, Positions]) -> Figure:
    """A few tiles of each model, all on one color scale."""
    h, w = next(iter(positions.values())).grid
    rows, columns = (
        tile_indices(h, _COMPARED_TILES, _COMPARED_TILES),
        tile_indices(w, _COMPARED_TILES, _COMPARED_TILES),
    )
    across = min(len(positions), 4)
    lines = -(-len(positions) // across)
    first = next(iter(positions.values()))
    figure = new_figure(max(4.6, 0.9 + 2.2 * across), 0.7 + 2.6 * lines, _title(first, "some patches"))
    axes = figure.subplots(lines, across, squeeze=False)
    for axis in axes.flat[len(positions) :]:
        axis.axis("off")
    colors = color_scale(*positions.values())
    for axis, (name, one) in zip(axes.flat, positions.items(), strict=False):
        image = draw_tiles(axis, one, rows, columns, colors)
        axis.set(title=f"{printable(name, 24)}\nr with distance {one.correlation:+.2f}", xlabel="", ylabel="")
    add_colorbar(figure, image, axes, _label(first))
    figure.draw_without_rendering()
    return figure


def caption_compared(positions: Mapping[str, Positions]) -> str:
    """How to read the comparison, and the correlation with distance of each model."""
    numbers = ", ".join(f"{printable(name, 24)} {one.correlation:+.2f}" for name, one in positions.items())
    first = next(iter(positions.values()))
    return (
        f"The {first.measure} of some patches with all patches, for {len(positions)} models on one color "
        f"scale. Correlation with the distance between patches: {numbers}. A negative correlation means "
        "higher values for nearby patches."
    )


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    positions = compute(request.model, head=request.head)
    return positions, draw(positions)


FIGURE = FigureSpec("positions", "Position similarity", _make, caption, table, needs_images=False)


if __name__ == "__main__":
    positions = compute(sample_model().model)
    show_sample("positions", lambda: (draw(positions), caption(positions)))
