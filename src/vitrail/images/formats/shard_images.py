"""Images inside a tar shard, found by the index beside it (`photos-000000.tar.index`).

| bytes    | what                                                                                          |
|----------|-----------------------------------------------------------------------------------------------|
| 0 to 96  | HEADER: magic, version, CRC-32 of the JSON object, its length, the number of images, size and |
|          | time of the tar, the length of the names, SHA-256 of names, labels and content keys, the      |
|          | first 8 bytes of that of the places (zeros in an older index)                                 |
| the rest | the JSON object, then columns with a value for each image: where its bytes are (PLACE), its   |
|          | label (u4), its content key (u8), where its name ends (u8); then the names                    |

An image is only a row number. Where its bytes are is read from the index by the worker that reads the image,
so the main process needs no memory for it.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import FileError, printable
from vitrail.base.safe_files import open_regular
from vitrail.images.formats.stored_images import StoredImage, Version, open_stored
from vitrail.images.limits import BrokenImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC, VERSION = b"VITRSHRD", 1
HEADER = struct.Struct("<8sIIQQQqQ32s8s")
PLACE = np.dtype([("offset", "<u8"), ("size", "<u4")])
COLUMNS = {"places": PLACE, "labels": np.dtype("<u4"), "keys": np.dtype("<u8"), "ends": np.dtype("<u8")}
NO_LABEL = 2**32 - 1
MAX_SIZE = 2**32 - 1  # bytes of an image
_MAX_JSON, _MAX_NAME = 2**28, 2**16


@dataclass(frozen=True)
class ShardHeader:
    """The header of an index, and where its columns are."""

    tar: str
    index: str
    count: int
    """The number of images."""
    tar_version: Version
    index_version: Version
    info: bytes
    """A JSON object (data/shard_index.py): classes, and names of images that are not read."""
    digest: bytes
    """Of names, labels and content keys."""
    places_digest: bytes
    """The first bytes of that of the places; zeros in an older index."""
    starts: dict[str, int]
    """The position of each column, and of the names."""

    def image(self, row: int) -> ShardImage:
        versions = self.tar_version, self.index_version
        return ShardImage(self.tar, self.index, row, self.starts["places"], *versions)

    def read(self, column: str, first: int, last: int) -> NDArray[Any]:
        """The values of a column from one row up to another."""
        dtype = COLUMNS[column]
        at = self.starts[column] + first * dtype.itemsize
        return np.frombuffer(self.read_bytes(at, (last - first) * dtype.itemsize), dtype=dtype)

    def read_bytes(self, start: int, count: int) -> bytearray:
        """Some bytes of the index."""
        return _read(self.index, start, count, self.index_version)

    def names(self, first: int, last: int) -> list[str]:
        """The names of the images from one row up to another."""
        if first >= last:
            return []
        ends = self.read("ends", max(0, first - 1), last).tolist()
        start = ends.pop(0) if first else 0
        if not 0 <= start <= ends[-1] or ends[-1] - start > _MAX_NAME * len(ends):
            raise _damaged(self.index, "its names are malformed")
        at = self.starts["names"] + start
        text = bytes(self.read_bytes(at, ends[-1] - start))
        pairs = zip([start, *ends], ends, strict=False)
        return [text[a - start : b - start].decode("utf-8", "surrogateescape") for a, b in pairs]


def read_header(tar: str, index: str) -> ShardHeader:
    """The header of an index; an error if there is none or it is damaged."""
    with open_regular(index, "the index of a shard") as file:
        status = os.fstat(file.fileno())
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise _damaged(index, "its header is incomplete")
        _, version, crc, length, count, tar_size, tar_time, names, digest, places = HEADER.unpack(head)
        if version != VERSION:
            raise _damaged(index, f"it has format {version}, and this version of Vitrail reads {VERSION}")
        starts, at = column_starts(length, count)
        if length > _MAX_JSON or at + names != status.st_size:
            raise _damaged(index, f"it has {status.st_size:,} bytes, and its header says {at + names:,}")
        info = file.read(length)
    if zlib.crc32(info) != crc:
        raise _damaged(index, "its description does not have the checksum of its header")
    version = status.st_size, status.st_mtime_ns
    return ShardHeader(tar, index, count, (tar_size, tar_time), version, info, digest, places, starts)


def column_starts(length: int, count: int) -> tuple[dict[str, int], int]:
    """The position of each column, and where the names start.

    Args:
        length: of the JSON object.
        count: the number of images.
    """
    starts, at = {}, HEADER.size + length
    for column, dtype in COLUMNS.items():
        starts[column] = at = -(-at // 8) * 8
        at += dtype.itemsize * count
    starts["names"] = at
    return starts, at


@dataclass(frozen=True, slots=True)
class ShardImage(StoredImage):
    """An image in a tar shard, in place of the path of an image file."""

    file: str
    """The path of the shard."""
    index: str
    row: int
    places: int
    """The position of the column in the index."""
    version: Version
    index_version: Version

    @property
    def image_name(self) -> str:  # type: ignore[override]
        return read_header(self.file, self.index).names(self.row, self.row + 1)[0]

    def read_bytes(self) -> bytearray:
        """The bytes of the image file."""
        at = self.places + self.row * PLACE.itemsize
        data = _read(self.index, at, PLACE.itemsize, self.index_version)
        offset, size = np.frombuffer(data, dtype=PLACE)[0].tolist()
        if offset + size > self.version[0]:
            raise _damaged(self.index, "an image lies outside its shard")
        if not size:
            raise BrokenImage(f"{printable(self)} is empty (0 bytes).")
        return _read(self.file, offset, size, self.version)


def _read(file: str, start: int, count: int, version: Version) -> bytearray:
    cut_off = f"{printable(file)} was cut off while it was in use."
    return open_stored(file, version).read(start, count, cut_off)


def _damaged(index: str, reason: str) -> FileError:
    return FileError(
        f"{printable(Path(index))} is not a complete index: {reason}. Delete it: it is written again from "
        "its shard."
    )
