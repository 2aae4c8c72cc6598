"""Small images in the terminal: two pixels per character cell, in color if the terminal has color."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.images.colormap import heat

Pixels = Sequence[Sequence[float]]
"""Rows of brightness values from 0 to 1."""

_SHADES = " .:-=+*#%@"


def image(pixels: Pixels, light: Pixels | None = None, *, color: bool = True) -> Text:
    """A gray image; with `light`, of the same shape, the image is colored by it.

    Without color, a character stands for the brightness, and only `light` is shown.
    """
    if not color:
        rows = light or pixels
        shades = [[_SHADES[round(min(max(value, 0.0), 1.0) * 9)] * 2 for value in row] for row in rows]
        return Text("\n".join("".join(row) for row in shades))
    text = Text()
    for top in range(0, len(pixels), 2):
        for column in range(len(pixels[0])):
            upper, lower = (_color(pixels, light, row, column) for row in (top, top + 1))
            text.append("▀", style=f"rgb({upper}) on rgb({lower})")
        text.append("\n")
    text.rstrip()
    return text


def _color(pixels: Pixels, light: Pixels | None, row: int, column: int) -> str:
    if row >= len(pixels):
        return "0,0,0"
    gray = min(max(pixels[row][column], 0.0), 1.0)
    base = heat(light[row][column]) if light else (255, 255, 255)
    brightness = 0.35 + 0.65 * gray if light else gray
    return ",".join(str(round(part * brightness)) for part in base)


def gallery(rows: Sequence[Sequence[Text]], console: Console, gap: int = 3) -> None:
    """Print rows of texts side by side, as many columns as fit the terminal."""
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    fit = 1
    while fit < len(widths) and sum(widths[: fit + 1]) + gap * fit + 2 <= console.width:
        fit += 1
    table = Table.grid(padding=(0, gap, 0, 0))
    for row in rows:
        table.add_row(Text(" "), *row[:fit])
    console.print(table)


def _width(text: Text) -> int:
    return max((len(line) for line in text.plain.splitlines()), default=0)
