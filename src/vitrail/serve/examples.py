"""Example images for the page: from a folder, or built in, which need no download."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import open_regular
from vitrail.images.decode import decode_image
from vitrail.images.formats.folders import list_images

MAX_EXAMPLES = 12
KINDS = {"PNG": "image/png", "JPEG": "image/jpeg"}  # formats that every browser shows
BUILT_IN = Path(__file__).parent / "example_images"
DIGITS = [f"digits/digit-{number}.png" for number in range(10)]
WINDOWS = [f"windows/{name}.jpg" for name in ("rose-window", "sunset", "flower", "fish", "night")]
DIGIT, MARGIN = 20, 4  # pixels of a digit, and around it in MNIST


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
    return _as_png(path.name, image)


def _as_png(name: str, image: Image.Image) -> Example:
    file = io.BytesIO()
    image.save(file, "PNG")
    return Example(name, "image/png", file.getvalue())


def built_in(channels: int, side: int = DIGIT + 2 * MARGIN) -> list[Example]:
    """Digits (scikit-learn's) for one channel, stained-glass windows for color, nothing for other models.

    Args:
        side: the shorter side of the model's input. A small one has no room for the margin of MNIST digits.
    """
    paths = [BUILT_IN / name for name in {1: DIGITS, 3: WINDOWS, 4: WINDOWS}.get(channels, [])]
    found = [_read_example(path)._replace(name=path.stem.replace("-", " ")) for path in paths]
    if channels != 1 or side < DIGIT:
        return found
    return [_as_png(one.name, ImageOps.expand(Image.open(io.BytesIO(one.data)), MARGIN)) for one in found]
