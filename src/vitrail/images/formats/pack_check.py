"""A check of a packed file: its bytes are those that were written, and its sources have not changed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.base.errors import VitrailError
from vitrail.base.safe_files import open_regular
from vitrail.images.content import file_key
from vitrail.images.formats.pack_writer import source_state
from vitrail.images.formats.packed_file import SPLIT_NAMES, read_index
from vitrail.images.formats.sources import Dataset


@dataclass
class PackCheck:
    """The differences between a packed file and its sources, as names of images."""

    images: int
    damaged: list[str] = field(default_factory=list)
    """Their bytes do not have the checksum of the index."""
    changed: list[str] = field(default_factory=list)
    """The source has other bytes, or another label or split."""
    missing: list[str] = field(default_factory=list)
    """The source does not exist any more."""
    new: list[str] = field(default_factory=list)
    """In the source, and not in the packed file."""

    @property
    def is_current(self) -> bool:
        return not (self.damaged or self.changed or self.missing or self.new)


def check_packed(
    data: Dataset, file: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> PackCheck:
    """Compare a packed file with the data set it was made of (as `read_data` returns it)."""
    index = read_index(file)
    check = PackCheck(len(index.names))
    sources = _sources(data)
    with open_regular(file, "a packed file") as opened:
        for done, (name, row, label) in enumerate(zip(index.names, index.rows, index.labels, strict=True), 1):
            opened.seek(int(row["offset"]))
            if zlib.crc32(opened.read(int(row["bytes"]))) != int(row["crc"]):
                check.damaged.append(name)
            path, labels = sources.pop((int(row["split"]), name), (None, ()))
            if path is None or source_state(path) == (0, 0):
                check.missing.append(name)
            elif labels != _class_names(index.classes, label) or _has_changed(path, row):
                check.changed.append(name)
            progress(done, len(index.names))
    check.new = [name for _, name in sources]
    return check


def _sources(data: Dataset) -> dict[tuple[int, str], tuple[Any, tuple[str, ...]]]:
    """The path and the class names of each image, by the number of its split and its name."""
    return {
        (number, name): (path, _class_names(data.classes, label))
        for number, part in enumerate(SPLIT_NAMES)
        if (split := getattr(data, part)) is not None
        for name, path, label in zip(split.names, split.paths or (), split.labels, strict=True)
    }


def _class_names(classes: list[str], label: Any) -> tuple[str, ...]:
    return tuple(classes[number] for number in (np.flatnonzero(label) if np.ndim(label) else [label]))


def _has_changed(path: Path, row: Any) -> bool:
    """Whether a file has other bytes than when it was packed; a new time alone is no change."""
    if source_state(path) == (int(row["source_bytes"]), int(row["source_time"])):
        return False
    try:
        return file_key(path) != int(row["key"])
    except (OSError, VitrailError):
        return True
