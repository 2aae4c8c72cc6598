"""Sequences over rows that are read when they are needed: a hundred million images need no Python objects.

A split of such data is a choice of rows (`Rows`): a range, an array of row numbers, or a bit for each row.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE = 1 << 20  # images: from here on, nothing is stored in as many Python objects, and nothing is sorted
BLOCK = 1 << 20  # rows that are read at a time
_BITS = 512  # rows that are counted together in a Selection

T = TypeVar("T", covariant=True)


class Selection:
    """Some of the rows from 0 to N - 1, in their order, as one bit for each row.

    Args:
        mask: (N,) bool.
    """

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        self.count = len(mask)
        bits = np.packbits(mask)
        whole = -(-len(bits) * 8 // _BITS) * _BITS // 8
        self.bits = np.pad(bits, (0, whole - len(bits))).reshape(-1, _BITS // 8)
        counts = np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)
        self.before = np.concatenate([[0], np.cumsum(counts)])  # the chosen rows before each group

    def __len__(self) -> int:
        return int(self.before[-1])

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of the i-th chosen one, for each i."""
        group = np.searchsorted(self.before, indices, side="right") - 1
        within = indices - self.before[group]
        chosen = np.unpackbits(self.bits[group], axis=1).cumsum(axis=1, dtype=np.int16)  # (n, _BITS)
        return group * _BITS + (chosen > within[:, None]).argmax(axis=1)

    def mask(self) -> NDArray[np.bool_]:
        return np.unpackbits(self.bits.reshape(-1), count=self.count).view(np.bool_)


Indices = Selection | Any
"""Which elements of a split to take: an array of indices, or a Selection of all of them."""
Rows = Selection | range | Any
"""The rows of a split: a Selection, a range, or an array of int64."""


def take_values(values: Any, indices: Indices) -> Any:
    """The elements of an array, or of a lazy sequence, at these indices."""
    if isinstance(values, LazySequence):
        return values.take(indices)
    return values[indices.mask()] if isinstance(indices, Selection) else values[indices]


def take_items(items: Sequence[T], indices: Indices) -> Sequence[T]:
    """The items of a sequence at these indices; of a lazy sequence, without reading them."""
    if isinstance(items, LazySequence):
        return items.take(indices)
    numbers = np.flatnonzero(indices.mask()) if isinstance(indices, Selection) else indices
    return [items[i] for i in np.asarray(numbers).tolist()]


def take_rows(rows: Rows, indices: Indices) -> Rows:
    if isinstance(indices, Selection):
        if isinstance(rows, range) and rows == range(indices.count):
            return indices
        indices = np.flatnonzero(indices.mask())
    return find_rows(rows, indices)


def find_rows(rows: Rows, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row numbers at some indices."""
    return rows.start + indices if isinstance(rows, range) else rows[indices]


def hash_rows(rows: Rows) -> bytes:
    if isinstance(rows, range):
        return hashlib.sha256(repr(rows).encode()).digest()
    values = rows.bits if isinstance(rows, Selection) else rows
    return hashlib.sha256(np.ascontiguousarray(values).data).digest()


class LazySequence(Sequence[T]):
    """One item for each row, read when it is asked for."""

    rows: Rows

    @abstractmethod
    def take(self, indices: Indices) -> LazySequence[T]:
        """The items at these indices, still not read."""

    @abstractmethod
    def read(self, rows: NDArray[np.int64]) -> Sequence[T]:
        """The items of some rows."""

    @abstractmethod
    def identity(self) -> bytes:
        """A hash of what the items are read from, and of the rows; equal for equal items."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return self.take(np.arange(*index.indices(len(self)), dtype=np.int64))
        number = range(len(self))[index]  # an IndexError outside, and negative ones from the end
        return self.read(find_rows(self.rows, np.array([number], dtype=np.int64)))[0]

    def blocks(self, size: int = BLOCK) -> Iterator[Any]:
        """All items, some at a time, as `read` returns them."""
        for first in range(0, len(self), size):
            last = min(first + size, len(self))
            yield self.read(find_rows(self.rows, np.arange(first, last, dtype=np.int64)))

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.blocks(BLOCK >> 4))


class RelativePaths(Sequence[Path]):
    """The paths of files below a folder, made when they are needed: a Path takes more memory than a name."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> RelativePaths: ...
    def __getitem__(self, index: int | slice) -> Path | RelativePaths:
        if isinstance(index, slice):
            return RelativePaths(self.folder, self.names[index])
        return self.folder / self.names[index]
