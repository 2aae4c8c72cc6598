"""Packed files in the cache folder (`--cache`), and emptying that folder.

A cached file is named by a hash of what is in it: names, sizes, times and content keys of its sources, and
the size of its images. So a changed source makes another file, and never an old image.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitrail.base.errors import FileError, printable
from vitrail.base.safe_files import cache_folder
from vitrail.images.formats.pack_writer import pack_dataset, pack_identity
from vitrail.images.formats.packed import read_packed
from vitrail.images.formats.sources import Dataset, Split, concatenate
from vitrail.images.preprocess import Preprocess

_FILES = {
    "packed": r"[0-9a-f]{32}\.pack(\.partial(\.rows)?)?",
    "keys": r"[0-9a-f]{16}\.npy",
    "fast": r"fastest\.json",  # vitrail.fast.choices
}


def packed_folder() -> Path:
    return cache_folder() / "packed"


def cached_dataset(
    data: Dataset, preprocess: Preprocess, message: Callable[[str], None] = lambda text: None
) -> Dataset:
    """The same data set with its images in a packed file in the cache, which is written if it is not there.

    Args:
        preprocess: of the model; the short side of the packed images is 8/7 of its size.
        message: called with a sentence before the images are packed.
    """
    size = max(preprocess.target) * 8 // 7
    if data.train.paths is None or not all(isinstance(path, Path) for path in data.train.paths[:1]):
        why = "the images are in memory" if data.train.paths is None else "they are in one file already"
        return replace(data, notes=[*data.notes, f"Not used, since {why}: cache."])
    # In the order of their names: the held-out split may change, the file stays the same.
    joined = concatenate(list(data.splits.values()))
    order = np.array(sorted(range(len(joined)), key=joined.names.__getitem__), dtype=np.int64)
    everything = Dataset(data.name, data.classes, joined.take(order))
    out = packed_folder() / f"{pack_identity(everything, size, jpeg=False).hex()[:32]}.pack"
    if out.exists():
        note = f"The images come from the cache, {printable(out)}."
    else:
        message(f"Packing {len(everything.train):,} images into the cache, {printable(out)}.")
        result = pack_dataset(everything, out, size=size, wait=True)
        note = f"The images were packed into the cache ({result.bytes / 1e9:.1f} GB), {printable(out)}."
    try:
        packed = read_packed(out).train
    except FileError as error:
        raise FileError(f"{error} To empty the cache: vitrail pack --clear-cache.") from error
    by_name = dict(zip(packed.names, packed.paths or (), strict=True))

    def from_cache(split: Split) -> Split:
        return replace(split, paths=[by_name[name] for name in split.names])

    val, test = (split if split is None else from_cache(split) for split in (data.val, data.test))
    return replace(data, train=from_cache(data.train), val=val, test=test, notes=[*data.notes, note])


def clear_cache() -> tuple[int, int]:
    """Delete the files that Vitrail has written to its cache folder; return how many, and their bytes."""
    count = size = 0
    for folder, pattern in _FILES.items():
        path = cache_folder() / folder
        for file in list(path.iterdir()) if path.is_dir() else []:
            if re.fullmatch(pattern, file.name) and file.is_file() and not file.is_symlink():
                count, size = count + 1, size + file.stat().st_size
                file.unlink()
    return count, size
