"""From the bytes of a request to the levels that the model sees; each way to fail has its own status."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from vitrail.data.decode import FORMATS, decode, quiet
from vitrail.errors import InputError
from vitrail.serve.messages import Refusal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from vitrail.preprocess import Preprocess


def levels_of(data: memoryview | bytes, preprocess: Preprocess, pixels: int) -> NDArray[np.uint8]:
    """Levels (H, W, C). Runs in a thread of the decoders; raises nothing but Refusals."""
    with quiet():
        image = open_bytes(data, preprocess, pixels)
        try:
            return preprocess.pixels(image)
        except (InputError, OSError, ValueError) as error:
            do = "Give one of another shape."
            raise Refusal(422, "unfit", "The picture must fit the model.", "one that does not", do) from error


def open_bytes(data: memoryview | bytes, preprocess: Preprocess, pixels: int) -> Image:
    file = io.BytesIO(data)
    wide, high = size_of(file)
    # A strip, resized by its short side, may become larger than it was.
    strip = max(wide, high) / min(wide, high) if preprocess.resize == "shortest" else 1
    if max(wide * high, strip * math.prod(preprocess.before_crop)) > pixels:
        must = f"A picture may have {pixels:,} pixels, also when it is resized."
        raise Refusal(413, "too_many_pixels", must, "more", "Make it smaller.")
    try:
        return decode(file, "a picture")
    except InputError as error:
        do = "Get it again, or use another."
        raise Refusal(422, "broken_picture", "A picture must be whole.", "a broken one", do) from error


def size_of(file: io.BytesIO) -> tuple[int, int]:
    """Width and height by the header alone, before memory is taken for a single pixel."""
    from PIL import Image

    try:
        wide, high = Image.open(file, formats=FORMATS).size
    except Image.DecompressionBombError:
        return 2**31, 2**31
    except Exception as error:  # decoders raise all sorts, and their texts are not for clients
        must = f"A picture must be one of {', '.join(FORMATS)}."
        raise Refusal(415, "no_picture", must, "something else", "Convert it.") from error
    return max(wide, 1), max(high, 1)
