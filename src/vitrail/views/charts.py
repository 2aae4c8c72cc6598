"""The charts of the reports, as SVG text: training curves, confusion matrix, class bars, reliability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import printable
from vitrail.views.canvas import (
    FAINT,
    GRID,
    INK,
    LINES,
    ON_DATA,
    Figure,
    add_colorbar,
    new_figure,
    styled,
    svg_text,
)

if TYPE_CHECKING:
    from vitrail.evaluation.calibration import Calibration
    from vitrail.evaluation.metrics import ClassMetrics

MAX_CLASSES = 30  # more classes are not drawn; tables then show a selection
_MAX_LETTERS = 20  # of a class name beside an axis
_LETTER = 0.08  # approximate width of a letter in inches
_MAX_LABELED = 16  # with more classes the counts are not printed in the cells
_CURVE_SIZE = (4.6, 3.0)  # inches; two charts fit side by side on a page, one on a phone


# ---- training -------------------------------------------------------------------------------


def curve(
    rows: Sequence[Mapping[str, Any]], lines: Mapping[str, str], label: str, percent: bool = False
) -> str:
    """`curve_figure` as SVG."""
    return svg_text(curve_figure(rows, lines, label, percent))


@styled
def curve_figure(
    rows: Sequence[Mapping[str, Any]], lines: Mapping[str, str], label: str, percent: bool = False
) -> Figure:
    """Columns of metrics.jsonl over epochs.

    Args:
        lines: the columns, and the label of each line.
        percent: whether the values are fractions, to be shown in percent from 0 to 100.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(*_CURVE_SIZE)
    axis = figure.subplots()
    highest = 0.0
    for (column, name), color, marker in zip(lines.items(), LINES, "os^", strict=False):
        points = [(row["epoch"], row[column]) for row in rows if row.get(column) is not None]
        x, y = np.array(points, dtype=float).reshape(-1, 2).T
        highest = max(highest, *y[np.isfinite(y)])
        style: dict[str, Any] = {"marker": marker, "markersize": 4} if len(x) <= 25 else {}
        axis.plot(x, 100 * y if percent else y, color=color, label=name, linewidth=1.6, **style)
    axis.set_ylim(0, 100 if percent else (1.05 * highest or None))
    last = max(row["epoch"] for row in rows)
    axis.set(xlabel="epoch", ylabel=label, xlim=(1, last) if last > 1 else (0, 2))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter("{x:g}")  # 8e-05, not 8 with 1e-5 above the axis
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    if len(lines) > 1:
        axis.legend()
    return figure


@styled
def scores(values: Sequence[float]) -> str:
    """The accuracy of each run as a dot, and their mean as a line."""
    figure = new_figure(_CURVE_SIZE[0], 0.9 + 0.22 * len(values))
    axis = figure.subplots()
    percents = [100 * value for value in values]
    rows = range(1, len(values) + 1)
    axis.axvline(float(np.mean(percents)), color=FAINT, linewidth=1, linestyle="--")
    axis.plot(percents, rows, "o", color=LINES[0], markersize=6)
    axis.set(xlabel="accuracy, %", ylabel="fold", yticks=rows, ylim=(len(values) + 0.6, 0.4))
    axis.grid(axis="x", color=GRID, linewidth=0.6)
    return svg_text(figure)


# ---- classes --------------------------------------------------------------------------------


@styled
def confusion_matrix(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Confusion matrix with counts as numbers and fractions of the row as colors."""
    from matplotlib.colors import LinearSegmentedColormap

    table, labels = np.array(counts), [printable(name, _MAX_LETTERS) for name in names]
    K, totals = len(names), table.sum(axis=1, keepdims=True)
    fractions = table / np.maximum(totals, 1)
    letters = max(map(len, labels))
    cell = 0.6 if K <= 6 else 0.46 if K <= _MAX_LABELED else 0.25
    rotated = letters * _LETTER > cell
    names_below = 0.75 * _LETTER * letters if rotated else 0.1
    figure = new_figure(1.6 + _LETTER * letters + cell * K, 0.65 + names_below + cell * K)
    axis = figure.subplots()
    # From transparent, which is the color of the page.
    colors = LinearSegmentedColormap.from_list("from clear", [(LINES[0], 0.0), (LINES[0], 1.0)])
    image = axis.imshow(100 * fractions, cmap=colors, vmin=0, vmax=100)
    # Class names are literal text: a dollar sign does not start a formula.
    style: dict[str, Any] = {"fontsize": 8 if K <= _MAX_LABELED else 7, "parse_math": False}
    rotation: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if rotated else {}
    axis.set_yticks(range(K), labels, **style)
    axis.set_xticks(range(K), labels, **style, **rotation)
    axis.set(xlabel="predicted class", ylabel="true class")
    axis.set_xticks(np.arange(1, K) - 0.5, minor=True)
    axis.set_yticks(np.arange(1, K) - 0.5, minor=True)
    axis.grid(which="minor", color=GRID, linewidth=0.6)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
    if K <= _MAX_LABELED:
        for (row, column), count in np.ndenumerate(table):
            dark = fractions[row, column] > 0.55
            text = f"{count:,}" + (f"\n{fractions[row, column]:.0%}" if K <= 6 and totals[row] else "")
            color = ON_DATA[1] if dark else INK if count else FAINT
            axis.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    add_colorbar(figure, image, axis, "% of the row")
    return svg_text(figure)


@styled
def class_bars(per_class: Sequence[ClassMetrics]) -> str:
    """Precision and recall of each class as bars."""
    K = len(per_class)
    figure = new_figure(5.6, 1.2 + 0.36 * K)
    axis = figure.subplots()
    for index, (metric, color) in enumerate(zip(("recall", "precision"), LINES, strict=False)):
        values = [100 * (getattr(one, metric) or 0.0) for one in per_class]
        axis.barh(np.arange(K) + 0.36 * (index - 0.5), values, height=0.34, color=color, label=metric)
    labels = [printable(one.name, _MAX_LETTERS) for one in per_class]
    axis.set_yticks(range(K), labels, fontsize=8, parse_math=False)
    axis.set(xlabel="%", xlim=(0, 100), ylim=(K - 0.4, -0.6))  # the first class on top
    axis.grid(axis="x", color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=2)
    return svg_text(figure)


# ---- calibration ----------------------------------------------------------------------------


@styled
def reliability_diagram(calibration: Calibration) -> str:
    """Accuracy by confidence with and without temperature scaling, and a histogram of the confidence."""
    figure = new_figure(5.6, 4.6)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot([0, 100], [0, 100], color=FAINT, linestyle="--", linewidth=1, label="perfect calibration")
    kinds = [("model", calibration.bins, LINES[0], "o")]
    if calibration.fitted and calibration.scaled_bins:
        kinds.append(("with temperature scaling", calibration.scaled_bins, LINES[1], "s"))
    for number, (label, bins, color, marker) in enumerate(kinds):
        filled = [one for one in bins if one.count]
        x, y = [100 * one.confidence for one in filled], [100 * one.accuracy for one in filled]
        top.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.4, label=label)
        width = 42 * (bins[0].high - bins[0].low)  # the bars of the two series are side by side
        left = [100 * one.low + number * width + 0.08 * width for one in bins]
        below.bar(left, [one.count for one in bins], width=width, align="edge", color=color)
    top.set(ylabel="accuracy, %", ylim=(0, 102))
    top.legend(loc="upper left")
    top.grid(color=GRID, linewidth=0.6)
    below.set(xlabel="confidence, %", ylabel="images", xlim=(0, 100.5))
    return svg_text(figure)
