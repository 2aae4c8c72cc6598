"""Parquet files with image bytes, in the layout of Hugging Face's datasets (the extra `parquet`).

A row has a column `image` of {bytes, path} and a label: a number, with its name in the metadata of the file,
or a text. Files are splits by the word train, validation or test in their names. A row group is the smallest
part of the column that can be read; the last few stay in memory, for images that are read in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.base.errors import FileError, InputError, printable, require_extra, setting
from vitrail.images.formats.shards import by_split
from vitrail.images.formats.sources import Dataset, Split, build_dataset
from vitrail.images.formats.stored_images import StoredImage, Version, version_of
from vitrail.images.formats.tables import LABEL_COLUMNS, numeric_order
from vitrail.images.limits import BrokenImage

_IMAGE_COLUMNS = ("image", "img", "picture", "jpg", "png")
_LABELS = (*LABEL_COLUMNS, "fine_label", "category")
_GROUPS = 4  # row groups that stay in memory
_MAX_GROUP = 2**32  # bytes of a row group


def list_parquet(path: Path) -> dict[str, list[Path]]:
    """The files of each split: of one file, of a folder, or of the folder `data` in it; empty for others."""
    if path.is_file():
        return {"train": [path]} if path.suffix.lower() == ".parquet" else {}
    for folder in (path, path / "data"):
        files = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
        if files:
            return by_split(files)
    return {}


def read_parquet(path: Path) -> Dataset:
    """The data set in Parquet files. Only names and labels are read."""
    with require_extra("parquet"):
        import pyarrow.parquet  # noqa: F401

    tables = {name: [_Table(file) for file in files] for name, files in list_parquet(path).items()}
    every = [table for some in tables.values() for table in some]
    classes = _classes(every)
    number = {name: index for index, name in enumerate(classes)}
    splits = {}
    for name, some in tables.items():
        labels = np.array([number[text] for table in some for text in table.labels], dtype=np.int64)
        images = [image for table in some for image in table.images]
        splits[name] = Split(labels, [image.image_name for image in images], images)
    rows = max((table.largest for table in every), default=0)
    note = (
        f"Parquet: reading an image reads its row group of up to {rows:,} images. If that is slow, use "
        f"{setting('shuffle_block', ...)}, or make shards with vitrail pack --to shards."
    )
    return build_dataset(path.stem, classes, splits, [note] if rows > 1 else [])


def _classes(tables: Sequence[_Table]) -> list[str]:
    """The class names in the metadata, if all files have the same; otherwise the labels there are."""
    named = {tuple(table.names) for table in tables}
    if len(named) == 1 and (names := next(iter(named))):
        return list(names)
    return sorted({label for table in tables for label in table.labels}, key=numeric_order)


class _Table:
    """One file: an image and a label for each row."""

    def __init__(self, file: Path) -> None:
        import pyarrow.parquet as pq

        self.file = file
        try:
            with pq.ParquetFile(file) as opened:
                self.schema, self.metadata = opened.schema_arrow, opened.metadata
                self.image, label = self._columns()
                table = opened.read(columns=[f"{self.image}.path", label], use_threads=False)
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise FileError(
                f"{printable(file)} is not a complete Parquet file: {printable(error)}."
            ) from error
        self.names = self._class_names(label)
        self.labels = self._labels(table.column(label).to_pylist())
        counts = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]
        self.largest = max(counts, default=0)
        sizes = (self.metadata.row_group(group).total_byte_size for group in range(len(counts)))
        if max(sizes, default=0) > _MAX_GROUP:
            raise InputError(
                f"{printable(file)} has a row group of more than 4 GiB, too large to read at once; write it "
                "with smaller ones, such as row_group_size=100."
            )
        paths = [(one or {}).get("path") for one in table.column(self.image).to_pylist()]
        places = ((group, row) for group, count in enumerate(counts) for row in range(count))
        version, path = version_of(str(file)), os.path.abspath(file)
        self.images = [
            ParquetImage(path, name or f"{file.stem}/{number}", self.image, *place, version)
            for number, (name, place) in enumerate(zip(paths, places, strict=True))
        ]

    def _columns(self) -> tuple[str, str]:
        """The names of the columns of images and labels."""
        import pyarrow as pa

        images = [
            field.name
            for field in self.schema
            if pa.types.is_struct(field.type) and {"bytes", "path"} <= {one.name for one in field.type}
        ]
        found = [name for name in (*_IMAGE_COLUMNS, *images) if name in images]
        labels = [name for name in _LABELS if name in self.schema.names]
        if not found or not labels:
            what = "image of {bytes, path}" if not found else "label"
            raise InputError(
                f"{printable(self.file)} has no column {what}; found: "
                f"{printable(', '.join(self.schema.names)) or 'none'}."
            )
        return found[0], labels[0]

    def _class_names(self, label: str) -> list[str]:
        """The names of ClassLabel in the metadata that datasets writes; empty if there are none."""
        try:
            info = json.loads((self.schema.metadata or {}).get(b"huggingface", b"{}"))
            names = info["info"]["features"][label]["names"]
        except (ValueError, KeyError, TypeError):
            return []
        valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return names if valid and len(set(names)) == len(names) else []

    def _labels(self, values: list[Any]) -> list[str]:
        for row, value in enumerate(values):
            if value is None or isinstance(value, bool) or not isinstance(value, (int, str)):
                what = "no label" if value is None else f"the label {printable(repr(value), 40)}"
                raise InputError(
                    f"{printable(self.file)}, row {row:,}, has {what}; every image needs a class, a text or "
                    "an integer."
                )
            if self.names and not (isinstance(value, int) and 0 <= value < len(self.names)):
                raise InputError(
                    f"{printable(self.file)}, row {row:,}, has the label {printable(value)!r}, and its "
                    f"classes are numbered from 0 to {len(self.names) - 1}."
                )
        return [self.names[value] if self.names else str(value) for value in values]


# ---- reading images -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParquetImage(StoredImage):
    """An image in a Parquet file, in place of the path of an image file."""

    file: str
    image_name: str
    column: str
    group: int
    row: int
    """Within its row group."""
    version: Version

    def read_bytes(self) -> bytearray:
        """The bytes of the image file."""
        data = _read_group(self.file, self.column, self.group, self.version)[self.row].as_py()
        if not data:
            raise BrokenImage(f"{printable(self)} is empty, or only the path of a file that is elsewhere.")
        return bytearray(data)


@lru_cache(maxsize=_GROUPS)
def _read_group(file: str, column: str, group: int, version: Version) -> Any:
    """The bytes of the images of a row group, as an array of pyarrow."""
    with require_extra("parquet"):
        import pyarrow.parquet as pq

    if version_of(file) != version:
        raise BrokenImage(f"{printable(file)} was changed while it was in use; start again.")
    try:
        # Without pyarrow's threads, which a forked worker does not have.
        with pq.ParquetFile(file, pre_buffer=False) as opened:
            table = opened.read_row_group(group, columns=[f"{column}.bytes"], use_threads=False)
    except (OSError, ValueError) as error:
        raise BrokenImage(f"{printable(file)} cannot be read: {printable(error)}.") from error
    return table.column(column).combine_chunks().field("bytes")
