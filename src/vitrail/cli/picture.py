"""Small pictures in the terminal: two pixels in each cell, in colour where there is colour.

`python -m vitrail.cli.picture` shows itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

Pixels = Sequence[Sequence[float]]
"""Rows of brightness, from 0 to 1."""

HEAT = [(10, 10, 60), (120, 20, 110), (235, 90, 50), (255, 235, 120)]
SHADES = " .:-=+*#%@"


def heat(value: float) -> tuple[int, int, int]:
    """From deep blue over red to yellow."""
    place = min(max(value, 0.0), 1.0) * (len(HEAT) - 1)
    low = min(int(place), len(HEAT) - 2)
    share = place - low
    cold, hot = HEAT[low], HEAT[low + 1]
    red, green, blue = (round(c + (h - c) * share) for c, h in zip(cold, hot, strict=True))
    return red, green, blue


def picture(pixels: Pixels, light: Pixels | None = None, *, colour: bool = True) -> Text:
    """A grey picture; with `light`, the same picture lit by it (both 0 to 1, of one shape).

    Without colour, brightness becomes a character; `light` alone is then shown.
    """
    if not colour:
        rows = light or pixels
        shades = [[SHADES[round(min(max(value, 0.0), 1.0) * 9)] * 2 for value in row] for row in rows]
        return Text("\n".join("".join(row) for row in shades))
    text = Text()
    for top in range(0, len(pixels), 2):
        for column in range(len(pixels[0])):
            upper, lower = (_colour(pixels, light, row, column) for row in (top, top + 1))
            text.append("▀", style=f"rgb({upper}) on rgb({lower})")
        text.append("\n")
    text.rstrip()
    return text


def _colour(pixels: Pixels, light: Pixels | None, row: int, column: int) -> str:
    if row >= len(pixels):
        return "0,0,0"
    ink = min(max(pixels[row][column], 0.0), 1.0)
    base = heat(light[row][column]) if light else (255, 255, 255)
    shine = 0.35 + 0.65 * ink if light else ink
    return ",".join(str(round(part * shine)) for part in base)


def gallery(rows: Sequence[Sequence[Text]], console: Console, gap: int = 3) -> None:
    """Texts side by side, row under row, as many columns as the terminal is wide enough for."""
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


if __name__ == "__main__":
    ramp = [[(row + column) / 14 for column in range(8)] for row in range(8)]
    console = Console()
    seen = console.color_system is not None
    gallery(
        [
            [picture(ramp, colour=seen), picture(ramp, ramp, colour=seen)],
            [Text("grey"), Text("lit")],
        ],
        console,
    )
