"""Figures that a notebook displays by themselves, without %matplotlib."""

from __future__ import annotations

from matplotlib.figure import Figure

from vitrail.views.canvas import png_bytes


class NotebookFigure(Figure):
    """A figure of matplotlib that is displayed when it is the value of a notebook cell."""

    def _repr_png_(self) -> bytes:
        return png_bytes(self)
