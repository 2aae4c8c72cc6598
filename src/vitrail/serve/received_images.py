"""Decode an uploaded image to the pixels that the model takes; each kind of failure has its own status.

This runs in the decoder processes (decode_worker.py), which never load torch.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitrail.base.errors import InputError
from vitrail.images.decode import decode_image, suppress_warnings
from vitrail.images.headers import FORMATS
from vitrail.images.limits import DecodeLimits, ImageTooLarge
from vitrail.images.pixels import to_uint8
from vitrail.images.preprocess import Preprocess
from vitrail.serve.messages import HTTPError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


@dataclass(frozen=True)
class DecodeTask:
    """The preprocessing of every image, and the limits on its size."""

    preprocess: Preprocess
    full_size: bool
    """Whether to keep the image's own size, because an ONNX graph or torch resizes it later."""
    pixels: int
    side: int
    memory: int


def decode_pixels(data: memoryview | bytes, task: DecodeTask) -> NDArray[np.uint8]:
    """uint8 pixels (H, W, C). Raises only HTTPError."""
    try:
        with suppress_warnings():
            image = _open_bytes(data, task)
            if not task.full_size:
                return task.preprocess.pixels(image)
            pixels = to_uint8(image, task.preprocess.channels)
            return pixels.reshape(*pixels.shape[:2], -1)  # grayscale images have no third axis
    except (InputError, OSError, ValueError) as error:
        raise unfit_image() from error
    except MemoryError:
        message = "The image takes more memory to decode than this server allows; make it smaller."
        raise HTTPError(413, "too_much_memory", message) from None


def _open_bytes(data: memoryview | bytes, task: DecodeTask) -> Image:
    file = io.BytesIO(data)
    wide, high = _read_size(file)
    preprocess = task.preprocess
    # A narrow strip, resized by its shorter side, may become larger than it was.
    strip = max(wide, high) / min(wide, high) if preprocess.resize == "shortest" else 1
    if max(wide * high, strip * math.prod(preprocess.before_crop)) > task.pixels:
        message = (
            f"An image may have at most {task.pixels:,} pixels, also after resizing; send a smaller one."
        )
        raise HTTPError(413, "too_many_pixels", message)
    if max(wide, high) > task.side:
        message = f"An image may be at most {task.side:,} pixels wide or high; send a smaller one."
        raise HTTPError(413, "too_long_side", message)
    try:
        limits = DecodeLimits(pixels=task.pixels, side=task.side, memory=task.memory)
        return decode_image(file, "an image", limits=limits, preprocess=preprocess)
    except ImageTooLarge as error:
        message = "Decoding the image would take too long or too much memory; send it saved anew, or smaller."
        raise HTTPError(413, "too_costly", message) from error
    except InputError as error:
        if isinstance(error.__cause__, MemoryError):
            raise MemoryError from None
        raise HTTPError(422, "broken_image", "The image is corrupt; send another copy.") from error


def _read_size(file: io.BytesIO) -> tuple[int, int]:
    """Width and height from the header, before any pixel is decoded."""
    from PIL import Image

    try:
        wide, high = Image.open(file, formats=FORMATS).size
    except Image.DecompressionBombError:
        return 2**31, 2**31
    except Exception as error:  # decoders raise many types, and their messages are not for clients
        message = f"The file is not an image; send one of {', '.join(FORMATS)}."
        raise HTTPError(415, "no_image", message) from error
    return max(wide, 1), max(high, 1)


def unfit_image() -> HTTPError:
    return HTTPError(
        422, "unfit_image", "The image does not fit the model; send one of another shape or mode."
    )
