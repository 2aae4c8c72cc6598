"""What all figures share: paper, ink, colours, and how a figure becomes files."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from vitrail.errors import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Given = ParamSpec("Given")
Result = TypeVar("Result")

# Colour maps whose brightness grows evenly, so that a step in colour is a step in the number.
AMOUNT = "viridis"  # from nothing to much
HEAT = "magma"  # the same, to lay over pictures
SIGNED = "RdBu_r"  # around zero, white in the middle
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by everyone
INK, FAINT = "#222222", "#8a8a8a"

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",  # the same figure is the same file
}


def in_our_style(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that draws, in our style and without changing the user's."""

    @wraps(function)
    def styled(*arguments: Given.args, **options: Given.kwargs) -> Result:
        with needs("inspect"):
            import matplotlib
        with matplotlib.rc_context(STYLE):
            return function(*arguments, **options)

    return styled


def canvas(width: float, height: float, title: str = "") -> Figure:
    """An empty figure in inches, white, whose parts keep out of each other's way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, color=INK)
    return figure


def show_picture(axis: Axes, pixels: NDArray[np.uint8], title: str = "") -> None:
    """A picture (H, W, C) without axes; one channel in grey, more than three by their mean."""
    shown: Any = pixels if pixels.shape[2] in (3, 4) else pixels.mean(axis=2)
    axis.imshow(shown, cmap="gray", vmin=0, vmax=255)
    axis.axis("off")
    if title:
        axis.set_title(title)


def show_map(axis: Axes, values: NDArray[np.floating], *, most: float | None = None, title: str = "") -> Any:
    """A map of amounts from 0 to `most`; what it returns is what a colour bar needs."""
    image = axis.imshow(values, cmap=AMOUNT, vmin=0, vmax=float(values.max()) if most is None else most)
    axis.axis("off")
    if title:
        axis.set_title(title)
    return image


def lay_over(
    axis: Axes, pixels: NDArray[np.uint8], values: NDArray[np.floating], *, most: float | None = None
) -> Any:
    """A map (h, w) over the picture it belongs to, patch by patch: nothing is smoothed over."""
    grey = pixels[..., :3].mean(axis=2)
    box = (-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5)
    axis.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=box)
    limit = float(values.max()) if most is None else most
    image = axis.imshow(values, cmap=HEAT, vmin=0, vmax=limit or 1.0, alpha=0.65, extent=box)
    axis.axis("off")
    return image


def bar(figure: Figure, image: Any, axes: Any, label: str) -> None:
    """A colour bar: which colour is which number."""
    made = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, label=label)
    made.outline.set_visible(False)


def save(figure: Figure, place: Path) -> list[Path]:
    """The figure as PNG and SVG, without a date: the same figure is the same file."""
    import matplotlib

    files = [place.with_suffix(".png"), place.with_suffix(".svg")]
    with matplotlib.rc_context(STYLE):
        figure.savefig(files[0], metadata={"Software": None})
        figure.savefig(files[1], metadata={"Date": None})
    return files
