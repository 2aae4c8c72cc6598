"""Images in the terminal."""

import io

from rich.console import Console
from rich.text import Text

from vitrail.cli.terminal_image import gallery, image
from vitrail.images.colormap import heat

DOT = [[1.0, 0.0], [0.0, 0.0], [0.0, 0.5]]


def test_two_pixels_per_cell():
    text = image(DOT)
    assert text.plain == "▀▀\n▀▀"
    styles = [str(span.style) for span in text.spans]
    assert styles == [
        "rgb(255,255,255) on rgb(0,0,0)",
        "rgb(0,0,0) on rgb(0,0,0)",
        "rgb(0,0,0) on rgb(0,0,0)",
        "rgb(128,128,128) on rgb(0,0,0)",
    ]


def test_characters_without_color():
    assert image(DOT, color=False).plain == "@@  \n    \n  =="
    assert image(DOT, [[0.0, 1.0]] * 3, color=False).plain == "  @@\n  @@\n  @@"


def test_heat_is_monotonic_and_clamped():
    assert heat(-1) == heat(0) == (10, 10, 60)
    assert heat(2) == heat(1) == (255, 235, 120)
    brightness = [sum(heat(step / 20)) for step in range(21)]
    assert brightness == sorted(brightness)


def test_a_gallery_shows_the_columns_that_fit():
    console = Console(width=24, record=True, file=io.StringIO())
    gallery([[Text("aaaaaaaa"), Text("bbbbbbbb"), Text("cccccccc")]], console)
    shown = console.export_text()
    assert "aaaaaaaa" in shown
    assert "bbbbbbbb" in shown
    assert "cccccccc" not in shown
