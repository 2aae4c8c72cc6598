"""The fingerprint of a model's training set: which images it was trained on, by their content keys.

A key is the first 64 bits of the SHA-256 of an image (`vitrail.images.content`). Up to 100,000 images the
keys themselves are stored, sorted; of more, a Bloom filter (Bloom 1970), which finds every training image and
takes one other image in a thousand for one, in 14.4 bits per image instead of 64.

A model that was trained in several stages has a part for each filter, and one for all keys together. In a
file the parts are the tensors `fingerprint/0`, `fingerprint/1`, ...: uint64 keys, or uint8 bits of a filter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.fields import short_repr

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFIX = "fingerprint/"
MAX_KEYS = 100_000  # images; of more, a Bloom filter is stored
FALSE_POSITIVES = 0.001  # of a Bloom filter
_HASHES = 10  # -log2(0.001), rounded
_BITS = 14.378  # per image: -ln(0.001) / ln(2)^2
_MAX_PARTS = 1000


@dataclass(frozen=True, eq=False)
class FingerprintPart:
    """The images of one or more training runs."""

    images: int
    """The number of different images."""
    data: NDArray[Any]
    """Sorted keys (uint64), or the bits of a Bloom filter (uint8)."""

    @property
    def is_exact(self) -> bool:
        return self.data.dtype == np.uint64

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        if not len(self.data):
            return np.zeros(len(keys), dtype=bool)
        if self.is_exact:
            places = np.searchsorted(self.data, keys).clip(max=len(self.data) - 1)
            return np.asarray(self.data[places] == keys)
        found = np.ones(len(keys), dtype=bool)
        for bits in _bit_numbers(keys, 8 * len(self.data)):
            found &= (self.data[bits >> np.uint64(3)] >> (bits & np.uint64(7)).astype(np.uint8) & 1) == 1
        return found


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Which images a model was trained on."""

    parts: tuple[FingerprintPart, ...]

    @property
    def images(self) -> int:
        """The number of images, where images of two filters may be counted twice."""
        return sum(part.images for part in self.parts)

    @property
    def is_exact(self) -> bool:
        """Whether no other image is taken for a training image."""
        return all(part.is_exact for part in self.parts)

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(N,) whether the model was trained on the image with each key."""
        found = np.zeros(len(keys), dtype=bool)
        for part in self.parts:
            found |= part.contains(keys)
        return found

    def __or__(self, other: Fingerprint | None) -> Fingerprint:
        """The fingerprint of a model that was trained on both sets, one after the other."""
        if other is None:
            return self
        parts = (*self.parts, *other.parts)
        keys = [part.data for part in parts if part.is_exact]
        filters = [part for part in parts if not part.is_exact]
        new = fingerprint_of(np.concatenate(keys)).parts if keys else ()
        return Fingerprint((*new, *filters))

    def describe(self) -> list[int]:
        """For the JSON in a file: the number of images of each part."""
        return [part.images for part in self.parts]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The parts by their names in a file."""
        return {f"{PREFIX}{number}": part.data for number, part in enumerate(self.parts)}


def fingerprint_of(keys: NDArray[np.uint64]) -> Fingerprint:
    """The fingerprint of a training set with these keys."""
    keys = np.unique(keys)
    if len(keys) <= MAX_KEYS:
        return Fingerprint((FingerprintPart(len(keys), keys),))
    bits = np.zeros(8 * math.ceil(_BITS * len(keys) / 8), dtype=bool)
    for numbers in _bit_numbers(keys, len(bits)):
        bits[numbers] = True
    return Fingerprint((FingerprintPart(len(keys), np.packbits(bits, bitorder="little")),))


def _bit_numbers(keys: NDArray[np.uint64], size: int) -> Iterable[NDArray[np.uint64]]:
    """The bits of each key in a filter of `size` bits, one after the other (Kirsch and Mitzenmacher 2006).

    Keys are uniform already, so that their two halves swapped can serve as the second hash.
    """
    half = np.uint64(32)
    step = (keys << half | keys >> half) | np.uint64(1)
    for number in range(_HASHES):
        yield (keys + np.uint64(number) * step) % np.uint64(size)


def read_fingerprint(
    counts: Any, shapes: Mapping[str, tuple[str, tuple[int, ...]]], read: Callable[[str], NDArray[Any]]
) -> Fingerprint | None:
    """The fingerprint in a file; None if it has none. Raises ValueError if it is damaged.

    Args:
        counts: the number of images of each part, from the file's JSON.
        shapes: dtype and shape of the file's tensors, by name.
        read: reads one of them.
    """
    names = [name for name in shapes if name.startswith(PREFIX)]
    if counts is None and not names:
        return None
    _check_parts(counts, names, shapes)
    parts = [
        FingerprintPart(count, np.asarray(read(f"{PREFIX}{number}"))) for number, count in enumerate(counts)
    ]
    for part in parts:
        if part.is_exact and (len(part.data) != part.images or (part.data[:-1] >= part.data[1:]).any()):
            raise ValueError("the keys of its fingerprint are not sorted, or not as many as it says")
    return Fingerprint(tuple(parts))


def _check_parts(
    counts: Any, names: Sequence[str], shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    valid = isinstance(counts, list) and len(counts) <= _MAX_PARTS
    valid = valid and all(type(count) is int and 0 <= count < 2**48 for count in counts)
    if not valid or sorted(names) != sorted(f"{PREFIX}{number}" for number in range(len(counts))):
        raise ValueError(f"its fingerprint has the parts {short_repr(names)} for {short_repr(counts)}")
    for name in names:
        dtype, shape = shapes[name]
        if dtype not in ("uint64", "uint8") or len(shape) != 1:
            raise ValueError(f"{name} is {dtype} of shape {shape}, and neither keys nor a filter")
