"""What the model knows of places: how alike the positions of every two patches are (paper, Fig. 7 and 10).

Positions that are added are compared by their cosine. Rotary ones are compared by what they leave of q.k
where q and k are equal and all their pairs of numbers weigh the same: the mean over the frequencies of the
cosine of the phase between the two places. A bias is what it is: the number added to the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError, printable
from vitrail.inspect.canvas import AMOUNT, SIGNED, bar, canvas, in_our_style
from vitrail.inspect.pictures import check_finite, check_number, check_pictures
from vitrail.inspect.sample import sample_model, show
from vitrail.model import ViT
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST = 14  # tiles along a side, above which FEW of them are drawn
FEW = 7
CHOSEN = 3  # tiles along a side for each of several models
MEASURES = {"added": "cosine similarity", "rotary": "phase kernel", "bias": "bias added to the score"}


@dataclass(frozen=True, eq=False)
class Positions:
    """How alike the positions of patches are, and whether nearness shows in it."""

    position: str
    """What the model's config says."""
    measure: str
    """What the numbers are."""
    grid: tuple[int, int]
    similarity: Floats
    """(h w, h w): from each patch, row by row, to each."""
    class_row: Floats | None
    """(h w): from the class token to each patch, where it has a position."""
    where: str
    """Which heads and blocks a bias was taken from."""
    correlation: float
    """Of similarity and distance in the grid, over all pairs of two patches; nan if either is all one."""
    same_line: float
    """The mean over pairs in one row or one column."""
    other: float
    """The mean over the other pairs."""
    line_excess: float
    """Pairs in one line less other pairs of the same rounded distance: near pairs are in one line more
    often, so `same_line` alone would show lines in anything that fades with distance."""
    spread: float
    """The standard deviation over pairs of two patches."""


def compute(model: ViT, head: int | None = None, layer: int | None = None) -> Positions:
    """Compare positions; of a bias, those of one head and block, or the mean over all of them."""
    check_pictures(model)
    config, position = model.config, model.config.position
    kind = "bias" if position in ("pairwise", "relative") else "rotary" if "rotary" in position else "added"
    if position == "none":
        got = 'a model with position="none"'
        raise InputError("The model must have positions.", got, "Its tokens do not know their place.")
    if kind != "bias" and (head is not None or layer is not None):
        got = f"head={printable(head)}, layer={printable(layer)} with {position} positions"
        do = "Leave them out: here all heads and blocks share one table."
        raise InputError("Only a position bias has a table for each head and block.", got, do)
    with evaluating(model):
        tensor, where = {"added": added, "rotary": rotary, "bias": bias}[kind](model, head, layer)
    values = tensor.double().cpu().numpy()  # (T or N, T or N)
    check_finite("Positions", values)
    n, count = config.prefix, config.patches
    has_row = config.class_token and len(values) > count
    class_row = values[0, n:] if has_row and (kind == "bias" or values[0, 0]) else None
    h, w = config.grid
    patches = values[-count:, -count:]
    return Positions(position, MEASURES[kind], (h, w), patches, class_row, where, **nearness(patches, (h, w)))


def added(model: ViT, head: int | None, layer: int | None) -> tuple[Tensor, str]:
    """Cosines of the rows of E_pos; a row of zeros has none, and counts as 0 with all, itself included."""
    position: Any = model.position
    rows = position.all_rows().double()  # (T, D)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    return rows @ rows.T, ""


def rotary(model: ViT, head: int | None, layer: int | None) -> tuple[Tensor, str]:
    """cos(a - b) = cos a cos b + sin a sin b, and its mean over the angles. Only patches are turned."""
    position: Any = model.position
    cos, sin = position.cos.double(), position.sin.double()  # (N, d)
    return (cos @ cos.T + sin @ sin.T) / cos.shape[1], ""


def bias(model: ViT, head: int | None, layer: int | None) -> tuple[Tensor, str]:
    """The bias of one head and block, or the mean over them."""
    blocks: Any = model.blocks
    tables = torch.stack([block.attention.bias() for block in blocks])  # (L, k, T, T)
    where = []
    for axis, word, chosen in ((0, "block", layer), (1, "head", head)):
        if chosen is None:
            tables = tables.mean(dim=axis, keepdim=True)
            where.append(f"the mean over {word}s")
        else:
            chosen = check_number(word, chosen, tables.shape[axis])
            tables = tables.narrow(axis, chosen, 1)
            where.append(f"{word} {chosen}")
    return tables[0, 0], ", ".join(where)


def nearness(similarity: Floats, grid: tuple[int, int]) -> dict[str, float]:
    """Do near patches have more similar positions, and patches in one row or column still more?"""
    down, across = (axis.ravel() for axis in np.indices(grid))
    apart = np.abs(down[:, None] - down), np.abs(across[:, None] - across)
    pairs = ~np.eye(len(similarity), dtype=bool)
    values, distance = similarity[pairs], np.hypot(*apart)[pairs]
    line = (np.minimum(*apart) == 0)[pairs]
    constant = not len(values) or np.ptp(values) <= 1e-9 * np.abs(values).max() or np.ptp(distance) == 0
    steps = distance.round()
    excess, weight = 0.0, 0
    for step in range(2, max(grid)):  # pairs one step apart have only diagonals, 1.4 apart, to compare with
        near, far = values[line & (steps == step)], values[~line & (steps == step)]
        if near.size and far.size:
            excess, weight = excess + near.size * float(near.mean() - far.mean()), weight + near.size
    return {
        "correlation": float("nan") if constant else float(np.corrcoef(values, distance)[0, 1]),
        "same_line": mean(values[line]),
        "other": mean(values[~line]),
        "line_excess": excess / weight if weight else float("nan"),
        "spread": float(values.std()) if len(values) else float("nan"),
    }


def mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


@in_our_style
def draw(found: Positions) -> Figure:
    h, w = found.grid
    rows, columns = chosen(h, MOST, FEW), chosen(w, MOST, FEW)
    figure = canvas(*panel_size(rows, columns, found.grid), title(found))
    colours = scale(found)
    if found.class_row is None:
        axes = [figure.subplots()]
    else:
        axes = list(figure.subplots(1, 2, width_ratios=[6, 1]))
        axes[1].imshow(found.class_row.reshape(h, w), **colours)
        axes[1].set(xticks=[], yticks=[], title="class token")
        axes[1].spines[:].set_visible(True)
    image = mosaic(axes[0], found, rows, columns, colours)
    bar(figure, image, axes, label(found))
    figure.draw_without_rendering()  # a bar finds room for its numbers once it knows its height
    return figure


def panel_size(rows: list[int], columns: list[int], grid: tuple[int, int]) -> tuple[float, float]:
    """Inches for a figure whose tiles keep the shape of the grid, within reason."""
    shape = len(rows) * (grid[0] + 1) / (len(columns) * (grid[1] + 1))
    return 8.2, min(9.0, max(2.4, 5.8 * shape + 0.8))


def title(found: Positions) -> str:
    words = f"{found.position} positions: {found.measure} of each patch with all"
    return f"{words} ({found.where})" if found.where else words


def label(found: Positions) -> str:
    return f"{found.measure} (itself: 1)" if found.measure != MEASURES["bias"] else found.measure


def chosen(count: int, most: int, few: int) -> list[int]:
    """All places along a side, or a few of them, evenly apart, from the first to the last."""
    return list(range(count)) if count <= most else [round(x) for x in np.linspace(0, count - 1, few)]


def scale(*found: Positions) -> dict[str, Any]:
    """Colours for all numbers between two patches, around zero where there are some on both sides of it.

    What a patch is to itself may lie beyond: it gets the last colour.
    """
    parts = [one.similarity[~np.eye(len(one.similarity), dtype=bool)] for one in found]
    values = np.concatenate([*parts, *(one.class_row for one in found if one.class_row is not None)])
    least, most = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    if 0 <= least < most or least < most <= 0:
        return {"cmap": AMOUNT, "vmin": least, "vmax": most}
    limit = max(-least, most) or 1.0
    return {"cmap": SIGNED, "vmin": -limit, "vmax": limit}


def mosaic(axis: Axes, found: Positions, rows: list[int], columns: list[int], colours: dict[str, Any]) -> Any:
    """One tile for each chosen patch, laid out as the patches are."""
    h, w = found.grid
    whole = np.full((len(rows) * (h + 1) - 1, len(columns) * (w + 1) - 1), np.nan)  # one line between tiles
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = found.similarity[row * w + column].reshape(h, w)
            whole[i * (h + 1) : i * (h + 1) + h, j * (w + 1) : j * (w + 1) + w] = tile
    image = axis.imshow(whole, **colours)
    axis.set_facecolor("#999999")
    axis.spines[:].set_visible(False)
    axis.set_yticks([i * (h + 1) + (h - 1) / 2 for i in range(len(rows))], [str(row) for row in rows])
    axis.set_xticks([j * (w + 1) + (w - 1) / 2 for j in range(len(columns))], [str(one) for one in columns])
    axis.tick_params(length=0, labelsize=8)
    axis.set(ylabel="row of the patch", xlabel="column of the patch")
    return image


def caption(found: Positions) -> str:
    h, w = found.grid
    rows, columns = chosen(h, MOST, FEW), chosen(w, MOST, FEW)
    part = f" Only {len(rows)} of {h} rows and {len(columns)} of {w} columns of tiles are drawn."
    where = f" ({found.where})" if found.where else ""
    return (
        f"Each tile belongs to the patch at its place and shows the {found.measure} of that patch with all "
        f"{h} x {w} patches{where}.{part if len(rows) < h or len(columns) < w else ''} "
        f"{verdict_on_distance(found)} {verdict_on_lines(found)}"
    )


def verdict_on_distance(found: Positions) -> str:
    more = "higher" if found.measure == MEASURES["bias"] else "more alike"
    r = found.correlation
    if np.isnan(r):
        return "All pairs of patches have the same number or the same distance: nothing to correlate."
    if r < -0.2:
        words = f"nearer patches are {more}, as in the paper"
    elif r <= 0.2:
        words = f"nearer patches are hardly {more}, unlike in the paper"
    else:
        words = f"farther patches are {more}, unlike in the paper"
    return f"The correlation of this with the distance between patches is {r:.2f}: {words}."


def verdict_on_lines(found: Positions) -> str:
    if np.isnan(found.line_excess):
        return "The grid is too small to tell rows and columns from nearness."
    seen = (
        "rows and columns show" if found.line_excess > 0.2 * found.spread else "rows and columns do not show"
    )
    return (
        f"Pairs in one row or column have {found.same_line:.3f} on average, others {found.other:.3f}; at the "
        f"same distance the difference is {found.line_excess:+.3f}, where all pairs spread by "
        f"{found.spread:.3f}: {seen} beyond nearness."
    )


def table(found: Positions) -> tuple[list[str], list[list[object]]]:
    """One row for each pair of patches; the class token stands before them without row and column."""
    header = ["row", "column", "to_row", "to_column", "value"]
    _, w = found.grid
    rows: list[list[object]] = []
    if found.class_row is not None:
        rows += [["", "", *divmod(j, w), float(value)] for j, value in enumerate(found.class_row)]
    for i, values in enumerate(found.similarity):
        rows += [[*divmod(i, w), *divmod(j, w), float(value)] for j, value in enumerate(values)]
    return header, rows


def compare(
    models: Mapping[str, ViT], head: int | None = None, layer: int | None = None
) -> dict[str, Positions]:
    """The positions of several models, such as the checkpoints of a run, by their names."""
    if not models:
        raise InputError("There must be models to compare.", "none", "Give one at least.")
    found = {name: compute(model, head, layer) for name, model in models.items()}
    kinds = {f"{one.position} positions on {one.grid[0]} x {one.grid[1]} patches" for one in found.values()}
    if len(kinds) > 1:
        do = "Compare checkpoints of one run."
        raise InputError("Models compared must have positions of one kind.", " and ".join(sorted(kinds)), do)
    return found


@in_our_style
def draw_compared(found: Mapping[str, Positions]) -> Figure:
    """A few tiles of each model, all in one scale."""
    h, w = next(iter(found.values())).grid
    rows, columns = chosen(h, CHOSEN, CHOSEN), chosen(w, CHOSEN, CHOSEN)
    across = min(len(found), 4)
    lines = -(-len(found) // across)
    first = next(iter(found.values()))
    figure = canvas(
        max(4.6, 0.9 + 2.2 * across), 0.7 + 2.6 * lines, title(first).replace("each patch", "some patches")
    )
    axes = figure.subplots(lines, across, squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    colours = scale(*found.values())
    for axis, (name, one) in zip(axes.flat, found.items(), strict=False):
        image = mosaic(axis, one, rows, columns, colours)
        axis.set(title=f"{printable(name, 24)}\nr with distance {one.correlation:+.2f}", xlabel="", ylabel="")
    bar(figure, image, axes, label(first))
    figure.draw_without_rendering()
    return figure


def caption_compared(found: Mapping[str, Positions]) -> str:
    numbers = ", ".join(f"{printable(name, 24)} {one.correlation:+.2f}" for name, one in found.items())
    first = next(iter(found.values()))
    return (
        f"Some tiles of the {first.measure} of each patch with all patches, for {len(found)} models in one "
        f"scale. The correlation with the distance between patches is: {numbers}. Below zero, nearer patches "
        f"have more of it."
    )


if __name__ == "__main__":
    found = compute(sample_model().model)
    show("positions", lambda: (draw(found), caption(found)))
