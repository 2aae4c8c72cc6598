"""The one way an image file is opened: content decides, the header is looked at before any memory is
taken, and nothing but an image decoder ever runs."""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vitrail.data.headers import EXIF, FORMATS, broken, read_header, too_much, walk_strips
from vitrail.data.limits import (
    ORIENTATION,
    BrokenImage,
    DecodeLimits,
    ImageTooLarge,
    NotAnImage,
    bytes_needed,
    check_memory,
    check_size,
    check_work,
)
from vitrail.errors import InputError, VitrailError, printable

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    from vitrail.preprocess import Preprocess

__all__ = [
    "FORMATS",
    "BrokenImage",
    "DecodeLimits",
    "ImageTooLarge",
    "NotAnImage",
    "decode",
    "open_picture",
    "open_regular",
    "quiet",
]

Near = tuple[int, int] | Callable[[int, int], tuple[int, int]]
LIMITS = DecodeLimits()


def open_picture(
    path: str | Path,
    near: Near | None = None,
    limits: DecodeLimits = LIMITS,
    preprocess: Preprocess | None = None,
) -> Image:
    """An image file, decoded; see `decode`."""
    with open_regular(path) as file:
        return decode(file, printable(path), near, limits, preprocess)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file to read; a pipe or a device could keep us waiting for ever."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise InputError(f"{printable(path)} is {kind}; name a file.")


def decode(
    file: BinaryIO,
    name: str,
    near: Near | None = None,
    limits: DecodeLimits = LIMITS,
    preprocess: Preprocess | None = None,
) -> Image:
    """Decode the first frame of an image; its orientation, depth and alpha are left to Preprocess.

    Args:
        near: a JPEG may be decoded at half, a quarter or an eighth of its size, as long as it stays
            this large, (H, W): much faster, and not the same pixels. For training alone. May be a
            function of the height and width that the image has when it is upright.
        limits: what may be spent on it, looked up in the header before any of it is spent.
        preprocess: what will be done with it, so that the memory for that is limited too.

    Raises:
        ImageTooLarge: more pixels, work or memory than `limits`.
        NotAnImage: none of FORMATS.
        BrokenImage: one of them that cannot be decoded.
    """
    header = read_header(file, name, limits)
    with quiet():  # Pillow warns of large images and odd metadata; we decide
        opened = open_header(file, name)
        check_size(name, *opened.size, limits)
        try:
            if opened.info.get("compression") == "jpeg":
                walk_strips(file, name, opened, header, limits)
            check_work(name, opened, header, limits)
            check_exif(opened, name)
            check_memory(name, bytes_needed(opened, header, preprocess), limits)
            if near is not None and opened.format == "JPEG":
                make_smaller(opened, near)
            opened.load()
            check_exif(opened, name)  # a PNG may have it after its pixels
        except VitrailError:
            raise
        except Exception as error:  # decoders raise all sorts, and their texts are not for users
            raise broken(name) from error
    vars(opened).pop("_decoder", None)  # a WebP's, which would keep two more copies of the image
    return opened


def open_header(file: BinaryIO, name: str) -> ImageFile:
    from PIL import Image

    try:
        return Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"{name} has far too many pixels. Make it smaller.") from error
    except Exception as error:  # its first bytes are those of an image
        raise broken(name) from error


def check_exif(opened: ImageFile, name: str) -> None:
    """EXIF also comes in a WebP's chunk and as text of a PNG: Pillow makes objects of its numbers."""
    if max(len(opened.info.get(key) or b"") for key in ("exif", "Raw profile type exif")) > 2 * EXIF:
        raise too_much(name, f"more than {EXIF:,} bytes of EXIF")


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
