"""The drawings of the pages: curves, confusions, reliability, classes. Each returns SVG, as text."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import printable
from vitrail.inspect.canvas import FAINT, INK, LINES, bar, canvas, in_our_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitrail.evaluation.calibration import Bin, Calibration
    from vitrail.evaluation.metrics import PerClass

MOST_CLASSES = 30  # in a drawing; of more, tables show a choice
LETTERS = 20  # of a class's name beside an axis
LETTER = 0.08  # inches, about
WRITTEN = 16  # classes up to which the counts stand in the cells
SMALL = (4.6, 3.0)  # inches: two stand side by side on a page, one on a telephone


def svg(figure: Figure) -> str:
    """The figure as SVG, without a date: the same figure is the same text."""
    file = io.StringIO()
    with warnings.catch_warnings():  # a letter that matplotlib's font lacks is there in the reader's
        warnings.filterwarnings("ignore", message="(?s)Glyph .* missing from")
        warnings.filterwarnings("ignore", message="(?s)Matplotlib currently does not support")
        figure.savefig(file, format="svg", metadata={"Date": None})
    # What comes before the drawing, an XML declaration and a DOCTYPE, names addresses that nobody needs.
    return re.sub(r"^.*?(?=<svg)", "", file.getvalue(), count=1, flags=re.DOTALL)


def short(name: str) -> str:
    return printable(name, LETTERS)


# ---- how training went ----------------------------------------------------------------------


@in_our_style
def curve(
    rows: Sequence[Mapping[str, Any]], lines: Mapping[str, str], label: str, share: bool = False
) -> str:
    """Some columns of metrics.jsonl over epochs.

    Args:
        lines: columns, and what each line is called.
        share: whether they are shares, to be shown in percent from 0 to 100.
    """
    from matplotlib.ticker import MaxNLocator

    figure = canvas(*SMALL)
    axis = figure.subplots()
    for (column, name), colour, mark in zip(lines.items(), LINES, "os^", strict=False):
        found = [(row["epoch"], row[column]) for row in rows if row.get(column) is not None]
        x, y = np.array(found, dtype=float).reshape(-1, 2).T
        how: dict[str, Any] = {"marker": mark, "markersize": 4} if len(x) <= 25 else {}
        axis.plot(x, 100 * y if share else y, color=colour, label=name, linewidth=1.6, **how)
    axis.set_ylim(0, 100 if share else None)
    last = max(row["epoch"] for row in rows)
    axis.set_xlim(*(1, last) if last > 1 else (0, 2))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("epoch")
    axis.set_ylabel(label)
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axis.set_axisbelow(True)
    if len(lines) > 1:
        axis.legend()
    return svg(figure)


# ---- which classes --------------------------------------------------------------------------


@in_our_style
def confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """How often each class was taken for each: numbers are counts, colours are shares of a row."""
    table = np.array(counts)
    K, whole = len(names), table.sum(axis=1, keepdims=True)
    shares = table / np.maximum(whole, 1)
    letters = max(len(short(name)) for name in names)
    cell = 0.6 if K <= 6 else 0.46 if K <= WRITTEN else 0.25
    side = 1.0 + LETTER * letters + cell * K
    figure = canvas(side + 0.8, side)
    axis = figure.subplots()
    image = axis.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    name_ticks(axis, names, turned=letters * LETTER > cell)
    axis.set_xlabel("what the model said")
    axis.set_ylabel("what the picture shows")
    axis.set_xticks(np.arange(1, K) - 0.5, minor=True)
    axis.set_yticks(np.arange(1, K) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
    if K <= WRITTEN:
        for (row, column), count in np.ndenumerate(table):
            light = shares[row, column] > 0.55
            words = f"{count:,}" + (f"\n{shares[row, column]:.0%}" if K <= 6 and whole[row] else "")
            colour = "white" if light else INK if count else FAINT
            axis.text(column, row, words, ha="center", va="center", color=colour, fontsize=8)
    bar(figure, image, axis, "% of the row")
    return svg(figure)


def name_ticks(axis: Axes, names: Sequence[str], turned: bool) -> None:
    """Class names at both axes, as they are: a dollar sign begins no formula."""
    places, words = range(len(names)), [short(name) for name in names]
    how: dict[str, Any] = {"fontsize": 8 if len(names) <= WRITTEN else 7, "parse_math": False}
    axis.set_yticks(places, words, **how)
    turn: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if turned else {}
    axis.set_xticks(places, words, **how, **turn)


@in_our_style
def classes(found: Sequence[PerClass]) -> str:
    """Precision and recall of each class as bars."""
    K = len(found)
    figure = canvas(5.6, 1.2 + 0.36 * K)
    axis = figure.subplots()
    for at, (word, colour) in enumerate(zip(("recall", "precision"), LINES, strict=False)):
        shares = [100 * (getattr(one, word) or 0.0) for one in found]
        axis.barh(np.arange(K) + 0.36 * (at - 0.5), shares, height=0.34, color=colour, label=word)
    axis.set_yticks(range(K), [short(one.name) for one in found], fontsize=8, parse_math=False)
    axis.set_ylim(K - 0.4, -0.6)  # the first class on top
    axis.set_xlim(0, 100)
    axis.set_xlabel("%")
    axis.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axis.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=2)
    return svg(figure)


# ---- how far scores can be believed -----------------------------------------------------------


@in_our_style
def reliability(found: Calibration) -> str:
    """How often answers of each score were right, as they are and with the temperature; and how many."""
    figure = canvas(5.6, 4.6)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot([0, 100], [0, 100], color=FAINT, linestyle="--", linewidth=1, label="as it should be")
    kinds = [
        ("as they are", found.bins, LINES[0], "o"),
        ("with the temperature", found.cooled, LINES[1], "s"),
    ]
    for number, (word, bins, colour, mark) in enumerate(kind for kind in kinds if kind[1]):
        some = [one for one in bins if one.count]
        x, y = [100 * one.score for one in some], [100 * one.right for one in some]
        top.plot(x, y, color=colour, marker=mark, markersize=5, linewidth=1.4, label=word)
        histogram(below, bins, number, colour)
    top.set_ylabel("% that is right")
    top.set_ylim(0, 102)
    top.legend(loc="upper left")
    top.grid(color="#e4e4e4", linewidth=0.6)
    below.set_ylabel("pictures")
    below.set_xlabel("score in %")
    below.set_xlim(0, 100.5)
    return svg(figure)


def histogram(axis: Axes, bins: Sequence[Bin], place: int, colour: str) -> None:
    """How many pictures have each score; two kinds stand beside each other."""
    width = 100 * (bins[0].high - bins[0].low) * 0.42
    left = [100 * one.low + place * width + 0.08 * width for one in bins]
    axis.bar(left, [one.count for one in bins], width=width, align="edge", color=colour)
