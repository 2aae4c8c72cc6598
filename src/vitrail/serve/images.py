"""From the bytes of a request to the pixels that the model takes; each way to fail has its own status.

This runs in the decoder processes (decode_worker.py), which never load torch.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitrail.data.decode import FORMATS, decode, quiet
from vitrail.errors import InputError
from vitrail.preprocess import Preprocess, levels
from vitrail.serve.messages import Refusal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


@dataclass(frozen=True)
class Task:
    """What is done with every image, and how large one may be."""

    preprocess: Preprocess
    whole: bool
    """Whether the model gets the image in its own size: a graph that resizes, or torch, does the rest."""
    pixels: int
    side: int


def pixels_of(data: memoryview | bytes, task: Task) -> NDArray[np.uint8]:
    """uint8 pixels (H, W, C). Raises nothing but Refusals."""
    try:
        with quiet():
            image = open_bytes(data, task)
            if not task.whole:
                return task.preprocess.pixels(image)
            pixels = levels(image, task.preprocess.channels)
            return pixels.reshape(*pixels.shape[:2], -1)  # grey ones have no third axis
    except (InputError, OSError, ValueError) as error:
        raise unfit() from error
    except MemoryError:
        message = "The image takes more memory to decode than this server allows; make it smaller."
        raise Refusal(413, "too_much_memory", message) from None


def open_bytes(data: memoryview | bytes, task: Task) -> Image:
    file = io.BytesIO(data)
    wide, high = size_of(file)
    preprocess = task.preprocess
    # A strip, resized by its short side, may become larger than it was.
    strip = max(wide, high) / min(wide, high) if preprocess.resize == "shortest" else 1
    if max(wide * high, strip * math.prod(preprocess.before_crop)) > task.pixels:
        message = f"An image may have {task.pixels:,} pixels, also after resizing; this one has more."
        raise Refusal(413, "too_many_pixels", message)
    if max(wide, high) > task.side:
        message = f"An image may be {task.side:,} pixels wide or high; this one is more."
        raise Refusal(413, "too_long_side", message)
    try:
        return decode(file, "an image")
    except InputError as error:
        if isinstance(error.__cause__, MemoryError):
            raise MemoryError from None
        raise Refusal(422, "broken_picture", "The image is broken; send another copy.") from error


def size_of(file: io.BytesIO) -> tuple[int, int]:
    """Width and height by the header alone, before memory is taken for a single pixel."""
    from PIL import Image

    try:
        wide, high = Image.open(file, formats=FORMATS).size
    except Image.DecompressionBombError:
        return 2**31, 2**31
    except Exception as error:  # decoders raise all sorts, and their texts are not for clients
        message = f"This is not an image; send one of {', '.join(FORMATS)}."
        raise Refusal(415, "no_picture", message) from error
    return max(wide, 1), max(high, 1)


def unfit() -> Refusal:
    return Refusal(422, "unfit", "The image does not fit the model; send one of another shape or mode.")
