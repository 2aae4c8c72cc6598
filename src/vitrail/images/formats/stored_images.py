"""Images inside a larger file: a packed file (packed.py), a tar shard (shard.py).

A stored image takes the place of the path of an image file. Its bytes are read from the open file when they
are needed. They are not mapped into memory: a file that is cut off while it is in use would end the process
with a bus error, and is a sentence here.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from vitrail.base.errors import printable
from vitrail.base.safe_files import open_regular
from vitrail.images.limits import BrokenImage

if TYPE_CHECKING:
    from typing import BinaryIO

_OPEN_FILES = 256  # that stay open in a process; a process may often have 1,024


class StoredImage(ABC):
    """An image inside a larger file, in place of the path of an image file."""

    __slots__ = ()

    file: str
    """The path of the file that it is in."""
    image_name: str
    """Its name within the file."""

    @abstractmethod
    def read_bytes(self) -> bytearray:
        """The bytes that are stored."""

    def open_file(self) -> BinaryIO:
        """The file of an image that is not stored as pixels."""
        return io.BytesIO(self.read_bytes())

    @property
    def name(self) -> str:
        """The last part of its name, as of a path."""
        return os.path.basename(self.image_name)

    def __str__(self) -> str:
        return f"{self.file}: {self.image_name}"


Version = tuple[int, int]
"""What tells whether a file is still the same: its size and the time of its last change."""


def version_of(file: str) -> Version:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


class StoredFile:
    """A file that stays open while it is in the cache below."""

    def __init__(self, file: str, version: Version | None = None) -> None:
        with open_regular(file, "a file with images") as opened:
            status = os.fstat(opened.fileno())
            if version is not None and version != (status.st_size, status.st_mtime_ns):
                raise BrokenImage(f"{printable(file)} was changed while it was in use; start again.")
            self.number = os.dup(opened.fileno())
        self._checked = bytearray()

    def read(self, start: int, count: int, cut_off: str) -> bytearray:
        data = bytearray(count)  # writable, so that torch takes it without a warning
        at = 0
        while at < count:
            part = os.preadv(self.number, [memoryview(data)[at:]], start + at)
            if not part:
                raise BrokenImage(cut_off)
            at += part
        return data

    def is_checked(self, row: int) -> bool:
        """Whether the checksum of a row was found right since the file was opened."""
        byte, bit = divmod(row, 8)
        return byte < len(self._checked) and bool(self._checked[byte] >> bit & 1)

    def set_checked(self, row: int) -> None:
        """Note that a row is right. A bit that another thread overwrites costs a second check."""
        byte, bit = divmod(row, 8)
        if byte >= len(self._checked):
            self._checked.extend(bytes(byte + 1 - len(self._checked)))
        self._checked[byte] |= 1 << bit

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        if hasattr(self, "number"):
            close(self.number)


open_stored = lru_cache(maxsize=_OPEN_FILES)(StoredFile)
