"""Images inside a packed file (`vitrail pack`): decoded and resized pixels, or JPEGs.

The first time, a process reads an image completely and checks its checksum. After that, of an image that is
stored as pixels, only the rows that a crop covers are read.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.errors import printable
from vitrail.images.formats.stored_images import StoredImage, open_stored
from vitrail.images.limits import BrokenImage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class PackedImage(StoredImage):
    """An image in a packed file, in place of the path of an image file."""

    file: str
    """The path of the packed file."""
    image_name: str
    row: int
    """Its number in the index."""
    crc: int
    """The CRC-32 of its bytes."""
    offset: int
    size: int
    """Its bytes."""
    height: int
    """0 for a JPEG, which has a header of its own."""
    width: int
    channels: int
    reason: str = ""
    """Why the source could not be read when it was packed."""

    @property
    def is_array(self) -> bool:
        """Whether it is stored as pixels, and can be read in parts."""
        return self.height > 0 and not self.reason

    def read_rows(self, top: int, count: int) -> NDArray[np.uint8]:
        """Some rows of an image that is stored as pixels, (count, width, channels)."""
        row = self.width * self.channels
        data = self._read(self.offset + top * row, count * row)
        return np.frombuffer(data, dtype=np.uint8).reshape(count, self.width, self.channels)

    def read_bytes(self) -> bytearray:
        """Its pixels, or the bytes of a JPEG."""
        return self._read(self.offset, self.size)

    def load(self, channels: int) -> NDArray[np.uint8] | Image:
        """The pixels (h, w, C) of a stored array; an image, if it has other channels than asked for."""
        pixels = self.read_rows(0, self.height)
        return pixels if self.channels == channels else as_image(pixels)

    def check_readable(self) -> None:
        """Raise the error that the source had when it was packed."""
        if self.reason:
            raise BrokenImage(f"{printable(self)} could not be read when it was packed: {self.reason}")

    def _read(self, start: int, count: int) -> bytearray:
        """Some of its bytes; the first time all, to check them."""
        cut_off = f"{printable(self.file)} is shorter than its index says; it was cut off. Pack it again."
        file = open_stored(self.file)
        if file.is_checked(self.row):
            return file.read(start, count, cut_off)
        data = file.read(self.offset, self.size, cut_off)
        if zlib.crc32(data) != self.crc:
            raise BrokenImage(
                f"{printable(self)} is damaged: its bytes do not have the checksum that they were packed "
                "with. Pack the data again."
            )
        file.set_checked(self.row)
        first = start - self.offset
        return data if count == self.size else data[first : first + count]


def as_image(pixels: NDArray[np.uint8]) -> Image:
    """Pixels (h, w, C) as an image of Pillow's."""
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
