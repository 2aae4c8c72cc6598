"""Opening and decoding image files safely. The content decides the format, not the name; the header is
checked before memory is allocated; and nothing but an image decoder ever runs."""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vitrail.base.errors import VitrailError, printable
from vitrail.base.safe_files import open_regular
from vitrail.images.formats.packed import PackedImage, as_image
from vitrail.images.formats.stored_images import StoredImage
from vitrail.images.headers import (
    FORMATS,
    MAX_EXIF,
    broken_image,
    excessive_metadata,
    read_header,
    walk_strips,
)
from vitrail.images.limits import (
    ORIENTATION,
    DecodeLimits,
    ImageTooLarge,
    bytes_needed,
    check_memory,
    check_size,
    check_work,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    from vitrail.images.preprocess import Preprocess

ImagePath = str | Path | StoredImage
"""What `open_image` opens."""
MinSize = tuple[int, int] | Callable[[int, int], tuple[int, int]]
LoadImage = Callable[[Path | StoredImage], "NDArray[np.uint8]"]
"""From the path of an image file to its pixels (H, W, C)."""
_LIMITS = DecodeLimits()
_SMALL_FILE = 2**20  # bytes


def open_image(
    path: ImagePath,
    min_size: MinSize | None = None,
    limits: DecodeLimits = _LIMITS,
    preprocess: Preprocess | None = None,
) -> Image:
    """Open and decode an image file or a stored image; see `decode_image`."""
    if isinstance(path, PackedImage) and path.is_array:
        return as_image(path.read_rows(0, path.height))
    if isinstance(path, StoredImage):
        return decode_image(path.open_file(), printable(path), min_size, limits, preprocess)
    with open_regular(path, "an image") as file:
        # Small files are read at once: the header is read in many small pieces, each a system call.
        start = file.read(_SMALL_FILE + 1)
        whole = io.BytesIO(start) if len(start) <= _SMALL_FILE else file
        return decode_image(whole, printable(path), min_size, limits, preprocess)


def decode_image(
    file: BinaryIO,
    name: str,
    min_size: MinSize | None = None,
    limits: DecodeLimits = _LIMITS,
    preprocess: Preprocess | None = None,
) -> Image:
    """Decode the first frame of an image. Orientation, bit depth and alpha are left to `Preprocess`.

    Args:
        name: the name of the image in error messages.
        min_size: decode a JPEG at 1/2, 1/4 or 1/8 of its size, but no smaller than this (height, width).
            Much faster, but not the same pixels: for training only. May be a function of the height and
            width of the upright image.
        limits: checked against the header before decoding.
        preprocess: what will be done with the image, so that the memory for that is limited too.

    Raises:
        ImageTooLarge: it would exceed `limits`.
        NotAnImage: it is in none of FORMATS.
        BrokenImage: it is in one of them, and cannot be decoded.
    """
    header = read_header(file, name, limits)
    with suppress_warnings():  # Pillow warns of large images and odd metadata; the limits decide
        opened = open_header(file, name)
        check_size(name, *opened.size, limits)
        try:
            if opened.info.get("compression") == "jpeg":
                walk_strips(file, name, opened, header, limits)
            check_work(name, opened, header, limits)
            _check_exif(opened, name)
            check_memory(name, bytes_needed(opened, header, preprocess), limits)
            if min_size is not None and opened.format == "JPEG":
                _draft(opened, min_size)
            opened.load()
            _check_exif(opened, name)  # in a PNG it may follow the pixels
        except VitrailError:
            raise
        except Exception as error:  # decoders raise many types, with messages that do not help a user
            raise broken_image(name) from error
    vars(opened).pop("_decoder", None)  # that of a WebP would keep two more copies of the image alive
    return opened


def read_size(path: ImagePath) -> tuple[int, int]:
    """(H, W) of an image file or a stored image, from its header."""
    if isinstance(path, PackedImage) and path.is_array:
        return path.height, path.width
    with (
        path.open_file() if isinstance(path, StoredImage) else open_regular(path, "an image") as file,
        suppress_warnings(),
    ):
        read_header(file, printable(path), _LIMITS)
        width, height = open_header(file, printable(path)).size
    return height, width


def open_header(file: BinaryIO, name: str) -> ImageFile:
    """Open an image with Pillow, without decoding its pixels."""
    from PIL import Image

    try:
        return Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"{name} has far too many pixels; make it smaller.") from error
    except Exception as error:  # its first bytes are those of an image
        raise broken_image(name) from error


def _check_exif(opened: ImageFile, name: str) -> None:
    """Limit the EXIF data of WebP chunks and PNG text too: Pillow makes Python objects of its numbers."""
    if max(len(opened.info.get(key) or b"") for key in ("exif", "Raw profile type exif")) > 2 * MAX_EXIF:
        raise excessive_metadata(name, f"more than {MAX_EXIF:,} bytes of EXIF")


def _draft(opened: ImageFile, min_size: MinSize) -> None:
    """Have a JPEG decoded at a fraction of its size that is at least `min_size`."""
    swapped = opened.getexif().get(ORIENTATION) in (5, 6, 7, 8)  # upright, height and width are exchanged
    width, height = opened.size[::-1] if swapped else opened.size
    smallest = min_size(height, width) if callable(min_size) else min_size
    opened.draft(opened.mode, smallest if swapped else smallest[::-1])


def read_or_reason(path: Path | StoredImage, load: LoadImage) -> NDArray[np.uint8] | str:
    """The pixels of one image file, or the reason why there are none."""
    try:
        return load(path)
    except (ValueError, OSError) as error:  # InputError is a ValueError, and so is a NUL byte in a path
        return printable(error, 400)


def read_pixels(
    image: Any, preprocess: Preprocess, *, min_size: MinSize | None = None, limit_memory: bool = False
) -> NDArray[np.uint8]:
    """The pixels that the model sees, uint8 (H, W, C), of a path, a PIL image or an array.

    Args:
        min_size: see `decode_image`; for a path only.
        limit_memory: whether the memory for resizing is limited before a file is decoded.
    """
    with suppress_warnings():
        if isinstance(image, PackedImage) and image.is_array:
            image = image.load(preprocess.channels)
        elif isinstance(image, (str, os.PathLike, StoredImage)):
            limited = preprocess if limit_memory else None
            path = image if isinstance(image, StoredImage) else os.fsdecode(image)
            image = open_image(path, min_size, preprocess=limited)
        return preprocess.pixels(image)


class _WarningFilter:
    """Suppresses warnings while any thread decodes: Python has one list of filters for all threads."""

    lock, threads, filters = threading.Lock(), 0, ExitStack()


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress all warnings in this block, in any number of threads."""
    with _WarningFilter.lock:
        if not _WarningFilter.threads:
            _WarningFilter.filters.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        _WarningFilter.threads += 1
    try:
        yield
    finally:
        with _WarningFilter.lock:
            _WarningFilter.threads -= 1
            if not _WarningFilter.threads:
                _WarningFilter.filters.close()
