"""Images inside a packed file (`vitrail pack`): decoded and resized pixels, or JPEGs.

A packed image takes the place of the path of an image file. Its bytes are read from the open file when they
are needed, and only the rows that a crop covers. They are not mapped into memory: a file that is cut off
while it is in use would end the process with a bus error, and is a sentence here.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from vitrail.errors import printable
from vitrail.images.limits import BrokenImage
from vitrail.io.read import open_regular

if TYPE_CHECKING:
    from typing import BinaryIO

    from numpy.typing import NDArray
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class PackedImage:
    """An image in a packed file, in place of the path of an image file."""

    file: str
    """The path of the packed file."""
    image_name: str
    offset: int
    size: int
    """Its bytes."""
    height: int
    """0 for a JPEG, which has a header of its own."""
    width: int
    channels: int
    reason: str = ""
    """Why the source could not be read when it was packed."""

    def __str__(self) -> str:
        return f"{self.file}: {self.image_name}"

    @property
    def name(self) -> str:
        """The last part of its name, as of a path."""
        return os.path.basename(self.image_name)

    @property
    def is_array(self) -> bool:
        """Whether it is stored as pixels, and can be read in parts."""
        return self.height > 0 and not self.reason

    def read_rows(self, top: int, count: int) -> NDArray[np.uint8]:
        """Some rows of an image that is stored as pixels, (count, width, channels)."""
        row = self.width * self.channels
        data = self._read(self.offset + top * row, count * row)
        return np.frombuffer(data, dtype=np.uint8).reshape(count, self.width, self.channels)

    def open_file(self) -> BinaryIO:
        """The file of an image that is stored as a JPEG."""
        return io.BytesIO(self._read(self.offset, self.size))

    def load(self, channels: int) -> NDArray[np.uint8] | Image:
        """The pixels (h, w, C) of a stored array; an image, if it has other channels than asked for."""
        pixels = self.read_rows(0, self.height)
        return pixels if self.channels == channels else as_image(pixels)

    def check_readable(self) -> None:
        """Raise the error that the source had when it was packed."""
        if self.reason:
            raise BrokenImage(f"{printable(self)} could not be read when it was packed: {self.reason}")

    def _read(self, start: int, count: int) -> bytearray:
        data = bytearray(count)  # writable, so that torch takes it without a warning
        at, opened = 0, _open(self.file)  # held: another thread may have opened the one that stays
        while at < count:
            part = os.preadv(opened.number, [memoryview(data)[at:]], start + at)
            if not part:
                raise BrokenImage(
                    f"{printable(self.file)} is shorter than its index says; it was cut off. Pack it again."
                )
            at += part
        return data


def as_image(pixels: NDArray[np.uint8]) -> Image:
    """Pixels (h, w, C) as an image of Pillow's."""
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


class _Descriptor:
    """A file that stays open while it is in the cache below."""

    def __init__(self, file: str) -> None:
        with open_regular(file, "a packed file") as opened:
            self.number = os.dup(opened.fileno())

    def __del__(self) -> None:
        os.close(self.number)


_open = lru_cache(maxsize=64)(_Descriptor)
