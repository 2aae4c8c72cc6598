"""Packed files: a data set in one file, its images decoded and resized once (`vitrail pack`).

| bytes    | what                                                                                      |
|----------|-------------------------------------------------------------------------------------------|
| 0 to 64  | HEADER: magic, version, CRC-32 of the index, its offset and its length                    |
| from 64  | the images one after the other: pixels (h, w, C), JPEGs, or why the source was unreadable |
| the rest | the index: the length of a JSON object, the object, a row (ROW) for each image, labels    |

The index is checked when the file is opened. The bytes of an image are checked against the CRC-32 of its row
when a process first reads it, by every command: if they are damaged, the image is one that cannot be read.
After that, of an image that is stored as pixels, only the rows that a crop covers are read. A checksum shows
damage; it does not show a forgery.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import FileError, VitrailError, printable
from vitrail.base.safe_files import open_regular, parse_json
from vitrail.images.formats.sources import Dataset, Split
from vitrail.images.formats.stored_images import StoredImage, open_stored
from vitrail.images.limits import BrokenImage

if TYPE_CHECKING:
    from typing import BinaryIO

    from numpy.typing import NDArray
    from PIL.Image import Image

MAGIC, VERSION = b"VITRPACK", 1
HEADER = struct.Struct("<8sIIQQ32x")
SPLIT_NAMES = ("train", "val", "test")
ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("bytes", "<u8"),
        ("height", "<u4"),  # 0 for a JPEG
        ("width", "<u4"),
        ("channels", "<u4"),  # 0 for a source that could not be read: the bytes are the reason
        ("crc", "<u4"),  # of the bytes
        ("split", "<u4"),
        ("key", "<u8"),  # the content key of the source
        ("source_bytes", "<u8"),
        ("source_time", "<i8"),  # of its last change, in nanoseconds
    ]
)
_MAX_SIDE, _MAX_REASON = 65_535, 4_096


@dataclass(frozen=True)
class PackIndex:
    """The index of a packed file."""

    name: str
    classes: list[str]
    names: list[str]
    rows: NDArray[Any]
    """(N,) of ROW."""
    labels: NDArray[np.int64]
    """(N,) class numbers, or (N, K) of 0 and 1."""
    size: int
    """The short side of the images, at most."""
    jpeg: bool

    def to_bytes(self) -> bytes:
        """The index as it is stored."""
        fields = {"name": self.name, "classes": self.classes, "names": self.names, "size": self.size}
        text = json.dumps({**fields, "jpeg": self.jpeg, "multilabel": self.labels.ndim == 2}).encode()
        labels = self.labels.astype("<u1" if self.labels.ndim == 2 else "<i8")
        return b"".join([struct.pack("<Q", len(text)), text, self.rows.tobytes(), labels.tobytes()])


def is_packed(file: Path) -> bool:
    """Whether a file starts like a packed file."""
    try:
        with open_regular(file) as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError, VitrailError):  # ValueError: a NUL byte in the path
        return False


def read_packed(file: Path) -> Dataset:
    """The data set in a packed file. Only its index is read."""
    index = read_index(file)
    with open_regular(file, "a packed file") as opened:
        images = [
            PackedImage(
                str(file.absolute()),
                name,
                row=number,
                crc=int(row["crc"]),
                offset=int(row["offset"]),
                size=int(row["bytes"]),
                height=int(row["height"]),
                width=int(row["width"]),
                channels=int(row["channels"]),
                reason="" if row["channels"] else _read_reason(opened, row),
            )
            for number, (name, row) in enumerate(zip(index.names, index.rows, strict=True))
        ]
    splits = {}
    for number, split in enumerate(SPLIT_NAMES):
        found = np.flatnonzero(index.rows["split"] == number)
        if len(found) or split == "train":
            everything = Split(index.labels, index.names, images, None, index.rows["key"].astype(np.uint64))
            splits[split] = everything.take(found)
    kind = "JPEGs" if index.jpeg else "pixels"
    note = f"{printable(file.name)} is a packed file of {kind} with a short side of at most {index.size}."
    data = splits["train"], splits.get("val"), splits.get("test")
    return Dataset(index.name, index.classes, *data, notes=[note])


def _read_reason(file: BinaryIO, row: Any) -> str:
    file.seek(int(row["offset"]))
    text = file.read(min(int(row["bytes"]), _MAX_REASON)).decode("utf-8", "replace")
    return printable(text, 400) or "unknown"


# ---- the index ------------------------------------------------------------------------------


def read_index(file: Path) -> PackIndex:
    """The index of a packed file, checked: every image lies within the file, and every label is a class."""
    name = printable(file)
    with open_regular(file, "a packed file") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        head = opened.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise _damaged(name, "its header is incomplete")
        _, version, crc, offset, length = HEADER.unpack(head)
        if version != VERSION:
            raise FileError(
                f"{name} is a packed file of format {version}, and this version of Vitrail reads format "
                f"{VERSION}; pack the data again."
            )
        if offset < HEADER.size or offset + length != size:
            raise _damaged(name, f"it has {size:,} bytes, and its header says {offset + length:,}")
        opened.seek(offset)
        block = opened.read(length)
    if zlib.crc32(block) != crc:
        raise _damaged(name, "its index does not have the checksum of its header")
    try:
        index = _parse_index(block, name)
        _check_rows(index, offset)
    except (KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
        raise _damaged(name, f"its index is malformed ({printable(error)})") from error
    return index


def _damaged(name: str, reason: str) -> FileError:
    return FileError(f"{name} is not a complete packed file: {reason}. Pack the data again.")


def _parse_index(block: bytes, name: str) -> PackIndex:
    length = struct.unpack_from("<Q", block)[0]
    if length > len(block) - 8:
        raise ValueError("its description is longer than it")
    fields = parse_json(block[8 : 8 + length], name)
    classes, names, size = fields["classes"], fields["names"], fields["size"]
    for texts in (classes, names):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("classes or names are not a list of text")
    if type(size) is not int or not 1 <= size <= _MAX_SIDE:
        raise ValueError(f"size is not a number from 1 to {_MAX_SIDE:,}")
    count, rest = len(names), memoryview(block)[8 + length :]
    multilabel, jpeg = (fields[key] is True for key in ("multilabel", "jpeg"))
    label_bytes = count * (len(classes) if multilabel else 8)
    if len(rest) != count * ROW.itemsize + label_bytes:
        raise ValueError(f"it has {len(rest):,} bytes of rows and labels for {count:,} images")
    rows = np.frombuffer(rest[: count * ROW.itemsize], dtype=ROW)
    stored = np.frombuffer(rest[count * ROW.itemsize :], dtype="<u1" if multilabel else "<i8")
    labels = (stored.reshape(count, len(classes)) if multilabel else stored).astype(np.int64)
    most = 1 if multilabel else len(classes) - 1
    if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) <= most:
        raise ValueError("a label is no class")
    return PackIndex(str(fields["name"]), classes, names, rows, labels, size, jpeg)


def _check_rows(index: PackIndex, end: int) -> None:
    """Check that every image lies between the header and the index, and has the bytes of its shape."""
    rows = index.rows
    offset, size = rows["offset"], rows["bytes"]
    inside = (offset >= HEADER.size) & (offset <= end) & (size <= end) & (offset + size <= end)
    channels, height, width = (rows[field].astype(np.uint64) for field in ("channels", "height", "width"))
    sides = (height <= _MAX_SIDE) & (width <= _MAX_SIDE)
    known = np.isin(channels, (0, 1, 3)) & (rows["split"] < len(SPLIT_NAMES))
    pixels = (channels > 0) & (height > 0)
    if (
        not (inside & sides & known).all()
        or (height[pixels] * width[pixels] * channels[pixels] != size[pixels]).any()
    ):
        raise ValueError("an image lies outside the file, or has an impossible shape")
    if ((channels == 0) & ((height > 0) | (width > 0))).any() or ((height == 0) & (width > 0)).any():
        raise ValueError("an image without pixels has a size")


# ---- reading images -------------------------------------------------------------------------


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

    def _read(self, start: int, count: int) -> bytearray:
        """Some of its bytes; the first time all, to check them."""
        if self.reason:
            raise BrokenImage(f"{printable(self)} could not be read when it was packed: {self.reason}")
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
