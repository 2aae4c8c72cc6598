"""Example images for the page: from a folder, or built in.

A model with one channel gets handwritten digits, one with color gets stained-glass windows drawn by this
module, so that the page can be tried without an image at hand and without a download.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitrail.base.errors import InputError, MissingExtra, printable
from vitrail.base.safe_files import open_regular
from vitrail.images.decode import decode_image
from vitrail.images.formats.folders import list_images

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

MAX_EXAMPLES = 12
KINDS = {"PNG": "image/png", "JPEG": "image/jpeg"}  # formats that every browser shows

SIDE, FINE = 224, 4  # windows are drawn FINE times larger and scaled down, for smooth edges
LEAD, LEAD_WIDTH = "#17171d", 14
BLUES = ("#123a7a", "#0072b2", "#2b5fb3", "#56b4e9", "#1d4e9e")
REDS = ("#a3123a", "#d55e00", "#c21f4e", "#e69f00", "#8e1b5a")
GREENS = ("#00684d", "#009e73", "#3f8f3a", "#86b817", "#0b7a5f")
GOLDS = ("#e69f00", "#f0c419", "#f7dc6f", "#f0a830", "#ffd24a")

Colors = Sequence[str]
Point = tuple[float, float]


class Example(NamedTuple):
    """An example image file."""

    name: str
    kind: str
    """Its media type, determined from its content."""
    data: bytes


def from_folder(folder: Path) -> list[Example]:
    """At most 12 images below a folder, evenly spaced, so that they cover the classes of a data set.

    Each is decoded once, so that a broken file is reported at startup.
    """
    if not folder.is_dir():
        raise InputError(f"--examples needs a folder of images, and {printable(folder)} is not a folder.")
    paths = list_images(folder)
    if not paths:
        raise InputError(f"The folder {printable(folder)} contains no images; add some, or choose another.")
    count = min(MAX_EXAMPLES, len(paths))
    return [_read_example(paths[i * len(paths) // count]) for i in range(count)]


def _read_example(path: Path) -> Example:
    """A JPEG or PNG unchanged; other formats converted to PNG."""
    with open_regular(path, "an image") as file:
        data = file.read()
    image = decode_image(io.BytesIO(data), printable(path))
    if kind := KINDS.get(str(image.format)):
        return Example(path.name, kind, data)
    return as_png(path.name, image)


def as_png(name: str, image: Image) -> Example:
    file = io.BytesIO()
    image.save(file, "PNG")
    return Example(name, "image/png", file.getvalue())


SHEET, MARGIN = 28, 4  # pixels of an MNIST digit


def built_in(channels: int, side: int = SHEET) -> list[Example]:
    """Example images for a model with this many channels; none if image files have no such format.

    Args:
        side: the shorter side of the model's input. A small one has no room for the margin of MNIST digits.
    """
    if channels == 1:
        return digits(MARGIN if side >= SHEET - 2 * MARGIN else 0)
    if channels not in (3, 4):
        return []
    windows = {"rose window": rose, "sunset": sunset, "flower": flower, "fish": fish, "night": night}
    return [as_png(name, window(draw)) for name, draw in windows.items()]


# ---- digits -----------------------------------------------------------------------------------------


def digits(margin: int) -> list[Example]:
    """Ten digits of scikit-learn; without that package, some drawn with a few strokes."""
    from PIL import Image

    from vitrail.views.sample import sample_images

    try:
        sample = sample_images(10)
    except (MissingExtra, ImportError):
        return [as_png(f"digit {digit}", strokes(points)) for digit, points in STROKES.items()]
    both = zip(sample.names, sample.pixels, strict=True)
    inked = slice(MARGIN - margin, SHEET - MARGIN + margin)
    return [as_png(name, Image.fromarray(pixels[inked, inked, 0])) for name, pixels in both]


STROKES: dict[int, list[Point]] = {  # on a sheet of 28 x 28
    0: [(14 + 6 * math.sin(turn / 2), 14 - 9 * math.cos(turn / 2)) for turn in range(14)],
    1: [(15, 5), (13, 23)],
    2: [(8, 9), (11, 5), (17, 5), (20, 9), (17, 14), (8, 22), (21, 22)],
    4: [(9, 5), (7, 14), (19, 14), (19, 5), (18, 23)],
    7: [(7, 6), (20, 6), (13, 23)],
}


def strokes(points: Sequence[Point]) -> Image:
    from PIL import Image, ImageDraw

    sheet = Image.new("L", (28 * 8, 28 * 8))
    pen = ImageDraw.Draw(sheet)
    pen.line([(8 * x, 8 * y) for x, y in points], fill=255, width=19, joint="curve")
    return sheet.resize((28, 28), Image.Resampling.LANCZOS)


# ---- stained glass, on a sheet from -1 to 1 -----------------------------------------------------------


def window(draw: Callable[[ImageDraw], None]) -> Image:
    """A window: panes in lead, lit from above."""
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (SIDE * FINE, SIDE * FINE), LEAD)
    draw(ImageDraw.Draw(sheet))
    pixels = np.asarray(sheet.resize((SIDE, SIDE), Image.Resampling.LANCZOS)).astype(np.float32)
    down, across = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    light = 1.12 - 0.3 * np.hypot(across, down + 0.5)
    grain = np.random.default_rng(0).normal(1, 0.035, (SIDE // 4, SIDE // 4)).repeat(4, 0).repeat(4, 1)
    return Image.fromarray((pixels * (light * grain)[..., None]).clip(0, 255).astype(np.uint8))


def pane(pen: ImageDraw, points: Sequence[Point], color: str) -> None:
    """One piece of glass with lead around it."""
    half = SIDE * FINE / 2
    scaled = [(half * (1 + x), half * (1 + y)) for x, y in points]
    pen.polygon(scaled, fill=color)
    pen.line([*scaled, *scaled[:2]], fill=LEAD, width=LEAD_WIDTH, joint="curve")


def disc(pen: ImageDraw, x: float, y: float, radius: float, color: str, tall: float = 1.0) -> None:
    turns = [2 * math.pi * step / 48 for step in range(48)]
    pane(pen, [(x + radius * math.cos(t), y + tall * radius * math.sin(t)) for t in turns], color)


def rays(pen: ImageDraw, x: float, y: float, count: int, colors: Colors, far: float = 3.0) -> None:
    """Panes that fan out from a point."""
    for step in range(count):
        at = [2 * math.pi * (step + side) / count for side in (0, 1)]
        edge = [(x + far * math.cos(turn), y + far * math.sin(turn)) for turn in at]
        pane(pen, [(x, y), *edge], colors[step % len(colors)])


def rose(pen: ImageDraw) -> None:
    rays(pen, 0, 0, 16, ("#123a7a", "#1d4e9e"))
    for far, count, colors in ((0.94, 16, BLUES), (0.7, 8, REDS), (0.42, 8, GREENS)):
        rays(pen, 0, 0, count, colors, far)
    for step in range(8):
        turn = math.pi * (step + 0.5) / 4
        disc(pen, 0.62 * math.cos(turn), 0.62 * math.sin(turn), 0.15, GOLDS[step % 2])
    disc(pen, 0, 0, 0.2, "#f0c419")


def sunset(pen: ImageDraw) -> None:
    rays(pen, 0, 0.25, 22, ("#d55e00", "#e69f00", "#c21f4e", "#f0a830"))
    disc(pen, 0, 0.25, 0.42, "#f7dc6f")
    for row in range(5):
        top = 0.25 + 0.15 * row
        for step in range(-4, 4):
            left = 0.3 * step + 0.15 * (row % 2)
            wave = [(left, top), (left + 0.15, top - 0.05), (left + 0.3, top), (left + 0.3, 1.1), (left, 1.1)]
            pane(pen, wave, BLUES[(step + 2 * row) % len(BLUES)])
    pane(pen, [(-0.42, 0.42), (0.1, 0.42), (0.0, 0.58), (-0.34, 0.58)], "#7a2f1d")
    pane(pen, [(-0.16, -0.3), (-0.16, 0.38), (-0.5, 0.38)], "#faf3e0")
    pane(pen, [(-0.1, -0.12), (-0.1, 0.38), (0.18, 0.38)], "#ecd9b0")


def flower(pen: ImageDraw) -> None:
    rays(pen, 0, -0.15, 14, ("#56b4e9", "#8cd0f2", "#2b5fb3"))
    pane(pen, [(-0.05, 0.1), (0.05, 0.1), (0.1, 1.1), (-0.02, 1.1)], "#3f8f3a")
    pane(pen, [(0.06, 0.75), (0.3, 0.4), (0.7, 0.42), (0.45, 0.72)], "#86b817")
    pane(pen, [(0.02, 0.9), (-0.25, 0.55), (-0.66, 0.6), (-0.4, 0.86)], "#009e73")
    for ring, far in ((0, 0.72), (0.5, 0.5)):
        for step in range(10):
            turns = [2 * math.pi * (step + ring + shift) / 10 for shift in (-0.42, 0, 0.42)]
            reach = (0.72 * far, far, 0.72 * far)
            edge = [(r * math.cos(t), r * math.sin(t) - 0.15) for r, t in zip(reach, turns, strict=True)]
            pane(pen, [(0, -0.15), *edge], (REDS if ring else GOLDS)[step % 5])
    disc(pen, 0, -0.15, 0.2, "#6b3a12")


def fish(pen: ImageDraw) -> None:
    for row in range(8):
        for step in range(-5, 5):
            left, top = 0.25 * step + 0.12 * (row % 2), -1 + 0.26 * row
            water = [(left, top), (left + 0.25, top), (left + 0.25, top + 0.26), (left, top + 0.26)]
            pane(pen, water, (*BLUES, *GREENS[:2])[(3 * step + 5 * row) % 7])
    pane(pen, [(0.4, 0), (0.86, -0.36), (0.76, 0), (0.86, 0.36)], "#c21f4e")
    pane(pen, [(-0.1, -0.3), (0.12, -0.62), (0.3, -0.2)], "#e69f00")
    disc(pen, -0.12, 0, 0.6, "#d55e00", 0.58)
    for x in (0.28, 0.08, -0.12):
        pane(
            pen,
            [(x - 0.14, -0.3), (x + 0.06, -0.24), (x + 0.1, 0), (x + 0.06, 0.24), (x - 0.14, 0.3)],
            "#f0a830",
        )
    disc(pen, -0.46, -0.08, 0.09, "#faf3e0")
    disc(pen, -0.47, -0.08, 0.03, "#17171d")


def night(pen: ImageDraw) -> None:
    rays(pen, 0.4, -0.5, 18, ("#0d1b4c", "#123a7a", "#1d2f6f", "#1d4e9e"))
    disc(pen, 0.4, -0.5, 0.26, "#f7dc6f")
    for x, y in ((-0.6, -0.66), (-0.2, -0.4), (-0.76, -0.2), (0.02, -0.8)):
        star = [(0.1 if tip % 2 else 0.035, math.pi * tip / 4) for tip in range(8)]
        pane(pen, [(x + far * math.cos(turn), y + far * math.sin(turn)) for far, turn in star], "#ffd24a")
    peaks = (
        (-1.2, -0.5, 0.0, 0.2, "#5d4c8b"),
        (-0.5, 0.3, 0.95, -0.02, "#7a2f6d"),
        (0.3, 0.9, 1.6, 0.16, "#44306e"),
    )
    for left, middle, right, top, color in peaks:
        pane(pen, [(left, 1.1), (middle, top), (right, 1.1)], color)
        snow = 0.2 * (1.1 - top)
        slopes = [middle - (middle - left) * 0.2, middle + (right - middle) * 0.2]
        pane(pen, [(slopes[0], top + snow), (middle, top), (slopes[1], top + snow)], "#faf3e0")
    for step in range(-5, 5):
        x = 0.22 * step
        pane(pen, [(x, 1.1), (x + 0.11, 0.62), (x + 0.22, 1.1)], GREENS[step % len(GREENS)])
