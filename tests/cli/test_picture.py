"""Pictures in the terminal."""

import io

from rich.console import Console
from rich.text import Text

from vitrail.cli.picture import gallery, heat, picture

DOT = [[1.0, 0.0], [0.0, 0.0], [0.0, 0.5]]


def test_two_pixels_to_a_cell():
    text = picture(DOT)
    assert text.plain == "▀▀\n▀▀"
    styles = [str(span.style) for span in text.spans]
    assert styles == [
        "rgb(255,255,255) on rgb(0,0,0)",
        "rgb(0,0,0) on rgb(0,0,0)",
        "rgb(0,0,0) on rgb(0,0,0)",
        "rgb(128,128,128) on rgb(0,0,0)",
    ]


def test_characters_where_there_is_no_colour():
    assert picture(DOT, colour=False).plain == "@@  \n    \n  =="
    assert picture(DOT, [[0.0, 1.0]] * 3, colour=False).plain == "  @@\n  @@\n  @@"


def test_heat_runs_from_cold_to_hot_and_stays_inside():
    assert heat(-1) == heat(0) == (10, 10, 60)
    assert heat(2) == heat(1) == (255, 235, 120)
    brightness = [sum(heat(step / 20)) for step in range(21)]
    assert brightness == sorted(brightness)


def test_a_gallery_shows_what_fits():
    console = Console(width=24, record=True, file=io.StringIO())
    gallery([[Text("aaaaaaaa"), Text("bbbbbbbb"), Text("cccccccc")]], console)
    shown = console.export_text()
    assert "aaaaaaaa" in shown
    assert "bbbbbbbb" in shown
    assert "cccccccc" not in shown
