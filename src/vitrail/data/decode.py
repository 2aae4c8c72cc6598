"""The one way a picture file is opened: content decides, the header is looked at before any memory is
taken, and nothing but a picture decoder ever runs."""

from __future__ import annotations

import math
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

# No others: some of Pillow's formats start programs.
FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"]
MOST_PIXELS = 50_000_000
ORIENTATION = 0x0112  # the EXIF tag that says how a picture is to be turned

Near = tuple[int, int] | Callable[[int, int], tuple[int, int]]


def open_picture(path: str | Path, near: Near | None = None) -> Image:
    """A picture file, decoded; what becomes of its orientation, depth and alpha is Preprocess's affair.

    Args:
        near: a JPEG may be decoded at half, a quarter or an eighth of its size, as long as it stays
            this large, (H, W): much faster, and not the same pixels. For training alone. May be a
            function of the height and width that the picture has when it is upright.
    """
    with open_regular(path) as file:
        return decode(file, printable(path), near)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file to read; a pipe or a device could keep us waiting for ever."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise InputError("A picture must be a file.", f"{printable(path)}, {kind}", "Name one file.")


def decode(file: BinaryIO, name: str, near: Near | None = None) -> Image:
    """Decode the first frame of a picture."""
    from PIL import Image

    must = f"A picture must be one of {', '.join(FORMATS)}."
    with quiet():  # Pillow warns of large pictures and odd metadata; we decide
        try:
            opened = Image.open(file, formats=FORMATS)
            pixels = math.prod(opened.size)
        except Image.DecompressionBombError:
            pixels = MOST_PIXELS + 1
        except Exception as error:  # decoders raise all sorts, and their texts are not for users
            raise InputError(must, f"{name}, which is none of these", "Convert it.") from error
        if pixels > MOST_PIXELS:
            raise InputError(
                f"A picture may have at most {MOST_PIXELS // 1_000_000} megapixels.",
                f"{name}, which says it has more",
                "Make it smaller.",
            )
        try:
            if near is not None and opened.format == "JPEG":
                make_smaller(opened, near)
            opened.load()
        except Exception as error:
            raise InputError(must, f"{name}, which is broken", "Get it again, or use another.") from error
    return opened


def make_smaller(opened: ImageFile, near: Near) -> None:
    """Have a JPEG decoded at a share of its size, if it stays as large as `near`."""
    turned = opened.getexif().get(ORIENTATION) in (5, 6, 7, 8)  # its sides change places
    wide, high = opened.size[::-1] if turned else opened.size
    least = near(high, wide) if callable(near) else near
    opened.draft(opened.mode, least if turned else least[::-1])


class Quiet:
    """No warnings while any thread decodes: Python keeps one list of filters for all threads."""

    lock, threads, filters = threading.Lock(), 0, ExitStack()


@contextmanager
def quiet() -> Iterator[None]:
    with Quiet.lock:
        if not Quiet.threads:
            Quiet.filters.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        Quiet.threads += 1
    try:
        yield
    finally:
        with Quiet.lock:
            Quiet.threads -= 1
            if not Quiet.threads:
                Quiet.filters.close()
