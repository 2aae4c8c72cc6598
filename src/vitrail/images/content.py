"""Content keys: 64 bits that identify an image by its content, whatever its name, folder or position.

The key of a file is the first 64 bits of the SHA-256 of its bytes, big-endian; that of an image in an array,
of its shape and bytes. Copies of a file have the same key. An image that was decoded and saved again has
another one.

Keys of files that took long to read are cached, 16 bytes per file: a hash of path, size and times, and the
key. A cache that is missing, damaged or not writable only costs time.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.errors import VitrailError
from vitrail.base.safe_files import cache_folder, open_regular, read_limited, write_bytes
from vitrail.images.formats.lazy import LazySequence, RelativePaths
from vitrail.images.formats.stored_images import StoredImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.formats.sources import Split

Progress = Callable[[int, int], None]
"""Called with the number of files read so far and the number of files."""

_CHUNK = 64  # files that a thread reads at a time
_PIECE = 1 << 20  # bytes that are read at a time
_THREADS = min(8, os.cpu_count() or 1)
_SLOW = 1.0  # seconds of reading that are worth a cache
_FRESH = 2.0  # seconds in which a file may change again without a new time stamp; it is not cached
_MAX_CACHE = 1 << 30


def content_keys(
    split: Split, source: str | Path | None = None, progress: Progress = lambda done, total: None
) -> NDArray[np.uint64]:
    """(N,) the content key of each image of a split.

    A file that is empty or cannot be read has the hash of its name as its key; reading the images reports it.

    Args:
        source: the path of the data set, for the cache; None for no cache.
    """
    if isinstance(split.keys, LazySequence):
        return np.concatenate(list(split.keys.blocks()))
    if split.keys is not None:
        return split.keys
    if split.images is not None:
        return np.array([_array_key(image) for image in split.images], dtype=np.uint64)
    assert split.paths is not None
    if not isinstance(split.paths, RelativePaths):
        return _file_keys(split.paths, split.names, source, progress)
    numbers: dict[str, int] = {}  # of each file, which many rows of a table may name
    rows = np.array([numbers.setdefault(name, len(numbers)) for name in split.names], dtype=np.int64)
    files = list(numbers)
    return _file_keys(RelativePaths(split.paths.folder, files), files, source, progress)[rows]


def _first_bits(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def bytes_key(data: bytes | bytearray | memoryview) -> int:
    """The content key of a file with these bytes."""
    return _first_bits(hashlib.sha256(data).digest())


def name_key(name: str) -> int:
    """What stands for the content key of a file that is empty or cannot be read."""
    return bytes_key(name.encode("utf-8", "surrogatepass"))


def _array_key(image: NDArray[np.uint8]) -> int:
    digest = hashlib.sha256(repr(image.shape).encode())
    digest.update(np.ascontiguousarray(image).data)
    return _first_bits(digest.digest())


def file_key(path: Path | StoredImage) -> int:
    """The content key of a file, or of the bytes of a stored image."""
    digest = hashlib.sha256()
    if isinstance(path, StoredImage):
        return bytes_key(path.read_bytes())
    with open_regular(path, "an image") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return _first_bits(digest.digest())


# ---- many files -----------------------------------------------------------------------------


def _file_keys(
    paths: Sequence[Path | StoredImage], names: Sequence[str], source: str | Path | None, progress: Progress
) -> NDArray[np.uint64]:
    start, now = time.monotonic(), time.time()
    cache = _Cache(source)
    keys = np.zeros(len(paths), dtype=np.uint64)
    known = np.zeros(len(paths), dtype=np.uint64)  # what a file is cached by; 0 for no caching

    def read(first: int) -> int:
        last = min(first + _CHUNK, len(paths))
        for i in range(first, last):
            known[i], keys[i] = _read_key(paths[i], names[i], cache, now)
        return last

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in pool.map(read, range(0, len(paths), _CHUNK)):
            progress(done, len(paths))
    if time.monotonic() - start > _SLOW:
        cache.save(known[known > 0], keys[known > 0])
    return keys


def _read_key(path: Path | StoredImage, name: str, cache: _Cache, now: float) -> tuple[int, int]:
    """What a file is cached by, and its content key."""
    if isinstance(path, StoredImage):
        return 0, file_key(path)
    try:
        status = os.stat(path)
        times = status.st_mtime_ns, status.st_ctime_ns
        identity = _first_bits(
            hashlib.sha256(
                f"{os.path.abspath(path)}\0{status.st_size}\0{times}".encode("utf-8", "replace")
            ).digest()
        )
        key = cache.keys.get(identity)
        if key is None and status.st_size:
            key = file_key(path)
    except (OSError, ValueError):  # missing, forbidden, a pipe, an impossible name: reading it will say so
        key = None
    if key is None:
        return 0, name_key(name)
    return (identity if max(times) < (now - _FRESH) * 1e9 else 0), key


class _Cache:
    """The keys of one data set's files that were read before, by what they are cached by."""

    def __init__(self, source: str | Path | None) -> None:
        self.path: Path | None = None
        self.keys: dict[int, int] = {}
        if source is not None:
            name = hashlib.sha256(os.path.abspath(source).encode("utf-8", "surrogateescape")).hexdigest()[:16]
            self.path = cache_folder() / "keys" / f"{name}.npy"
            with suppress(OSError, EOFError, ValueError, VitrailError):  # it is only a cache
                pairs = np.load(io.BytesIO(read_limited(self.path, _MAX_CACHE)), allow_pickle=False)
                if pairs.dtype == np.uint64 and pairs.ndim == 2 and pairs.shape[1] == 2:
                    self.keys = dict(pairs.tolist())

    def save(self, known: NDArray[np.uint64], keys: NDArray[np.uint64]) -> None:
        """Replace the cache by these entries."""
        if self.path is None:
            return
        buffer = io.BytesIO()
        np.save(buffer, np.stack([known, keys], axis=1))
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, buffer.getvalue(), overwrite=True)
