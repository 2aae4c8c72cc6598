"""Shared plotting helpers: style, color maps, overlays, and saving a figure.

A figure is drawn for white paper. Its SVG has no background and a rule for dark pages: the text, lines
and grid that are not part of the data become light. Colors of data stay as they are.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import require_extra
from vitrail.images.decode import suppress_warnings

if TYPE_CHECKING:  # matplotlib is loaded by the first figure
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any

_drawing = threading.RLock()
"""Held while this module's style is set: matplotlib has one style for all threads."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Perceptually uniform color maps: equal steps in value look like equal steps in brightness.
SEQUENTIAL = "viridis"
OVERLAY = "magma"  # sequential, for maps drawn over images
DIVERGING = "RdBu_r"  # for values around zero, which is white
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # safe for color-blind readers
INK, FAINT, GRID = "#222222", "#8a8a8a", "#e4e4e4"
ON_DATA = ("#000000", "#ffffff")  # text on light and on dark cells, the same on every page

_DARK = {
    INK: "#ececf0",
    GRID: "#3a3a44",
    LINES[0]: "#4ba3dc",
}  # on a dark page; the others have enough contrast
_BAR = (2.4, 0.13)  # length and width of a color bar, in inches

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",  # makes the file reproducible
}


def styled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a plotting function to use the style of this module, leaving the user's settings alone."""

    @wraps(function)
    def styled(*arguments: _P.args, **options: _P.kwargs) -> _R:
        with require_extra("inspect"):
            import matplotlib
        with _drawing, matplotlib.rc_context(_STYLE):
            return function(*arguments, **options)

    return styled


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """Create an empty white figure of a size in inches, with constrained layout."""
    figure = _figure_class()(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, color=INK)
    return figure


@cache
def _figure_class() -> Any:
    """A figure of matplotlib that is displayed when it is the value of a notebook cell."""
    from matplotlib.figure import Figure as Figure

    return type("NotebookFigure", (Figure,), {"_repr_png_": png_bytes})


def show_image(axis: Axes, pixels: NDArray[np.uint8], title: str = "") -> None:
    """Draw an image (H, W, C) without axes. Other than 3 or 4 channels are averaged and drawn in gray."""
    shown: Any = pixels if pixels.shape[2] in (3, 4) else pixels.mean(axis=2)
    axis.imshow(shown, cmap="gray", vmin=0, vmax=255)
    axis.axis("off")
    axis.set_title(title)


def show_map(axis: Axes, values: NDArray[np.floating], *, vmax: float | None = None, title: str = "") -> Any:
    """Draw a map of values from 0 to `vmax`, by default the largest; returns what a color bar needs."""
    image = axis.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=float(values.max()) if vmax is None else vmax)
    axis.axis("off")
    axis.set_title(title)
    return image


def overlay_map(
    axis: Axes, pixels: NDArray[np.uint8], values: NDArray[np.floating], *, vmax: float | None = None
) -> Any:
    """Draw a map (h, w) over its image, patch by patch, without smoothing."""
    gray = pixels[..., :3].mean(axis=2)
    box = (-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5)
    axis.imshow(gray, cmap="gray", vmin=0, vmax=255, extent=box)
    limit = float(values.max()) if vmax is None else vmax
    image = axis.imshow(values, cmap=OVERLAY, vmin=0, vmax=limit or 1.0, alpha=0.65, extent=box)
    axis.axis("off")
    return image


def add_colorbar(figure: Figure, image: Any, axes: Any, label: str) -> None:
    """Add a color bar for an image or map, of the same size in all figures that are tall enough."""
    tallest = max(axis.get_position().height for axis in np.ravel(axes))
    span = tallest if np.size(axes) == 1 else 1.0
    height = 0.85 * span * figure.bbox.height / 150
    length = min(_BAR[0], 0.8 * height)
    colorbar = figure.colorbar(
        image, ax=axes, shrink=length / height, aspect=length / _BAR[1], pad=0.02, label=label
    )
    colorbar.outline.set_visible(False)


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save a figure as PNG and SVG beside `path`. Neither holds a date, so the files are reproducible."""
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    files[0].write_bytes(png_bytes(figure))
    files[1].write_text(svg_text(figure), encoding="utf-8")
    return files


def png_bytes(figure: Figure) -> bytes:
    """A figure as PNG, on white."""
    import matplotlib

    file = io.BytesIO()
    with _drawing, matplotlib.rc_context(_STYLE), suppress_warnings():  # of letters that its font lacks
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def svg_text(figure: Figure) -> str:
    """A figure as SVG for light and dark pages, without a background."""
    import matplotlib

    file = io.StringIO()
    with _drawing, matplotlib.rc_context(_STYLE), suppress_warnings():  # of letters that its font lacks
        figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None})
    # Drop the XML declaration and the DOCTYPE, which contain URLs.
    text = re.sub(r"^.*?(?=<svg)", "", file.getvalue(), count=1, flags=re.DOTALL)
    return text.replace("<defs>", f"<style>{_dark_rule()}</style>\n<defs>", 1)


def _dark_rule() -> str:
    """Styles that replace the colors of text and lines where the reader prefers a dark page.

    Viewers that know no media queries show the colors of a light page.
    """
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    ]
    return f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}"
