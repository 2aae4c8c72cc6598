"""Tar shards in the layout of WebDataset as a data set: a .tar, a folder of them, or `photos-{000..127}.tar`.

Each shard has an index (shard_index.py); one that has none is read once. Shards with the word train, val or
test in their name, or in folders of these names, are splits.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.images.content import Progress
from vitrail.images.formats.folders import SPLITS
from vitrail.images.formats.lazy import BLOCK, LARGE, Indices, LazySequence, Rows, hash_rows, take_rows
from vitrail.images.formats.shard_images import ShardHeader, ShardImage
from vitrail.images.formats.shard_index import build_index, open_index
from vitrail.images.formats.sources import Dataset, Split, build_dataset
from vitrail.images.formats.tables import numeric_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SHARDS = 1_000_000
_THREADS = min(8, os.cpu_count() or 1)
T = TypeVar("T", covariant=True)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


# ---- finding shards -------------------------------------------------------------------------


def is_shards(path: str | Path) -> bool:
    """Whether a path names shards: a .tar, a folder of them, or a pattern with a range in braces."""
    file = Path(path)
    if file.is_dir():
        return bool(_folder_splits(file))
    return str(path).lower().endswith(".tar") and (file.is_file() or bool(_RANGE.search(str(path))))


def list_shards(path: str | Path) -> dict[str, list[Path]]:
    """The shards of each split; of train, if their names do not say."""
    file = Path(path)
    if file.is_dir():
        return _folder_splits(file)
    if file.is_file():
        return {"train": [file]}
    files = [Path(name) for name in expand_braces(str(path))]
    missing = [name for name in files if not name.is_file()]
    if missing:
        raise InputError(
            f"{printable(missing[0])} does not exist ({len(missing):,} of the {len(files):,} shards of "
            f"{printable(path)} do not); check the numbers in the braces."
        )
    return by_split(files)


def expand_braces(pattern: str) -> list[str]:
    """The names of a pattern such as photos-{000..127}.tar; numbers have the digits of the first."""
    parts = _RANGE.split(pattern)  # text, first, last, text, first, last, ..., text
    pairs = list(zip(parts[1::3], parts[2::3], strict=True))
    for first, last in pairs:
        if int(first) > int(last):
            raise InputError(
                f"{{{first}..{last}}} in {printable(pattern)} must go from a lower to a higher number."
            )
    if math.prod(int(last) - int(first) + 1 for first, last in pairs) > MAX_SHARDS:
        raise InputError(f"{printable(pattern)} stands for more than {MAX_SHARDS:,} shards; check it.")
    ranges = ([f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)] for first, last in pairs)
    texts = parts[0::3]
    return ["".join(a + b for a, b in zip(texts, (*chosen, ""), strict=True)) for chosen in product(*ranges)]


def _folder_splits(folder: Path) -> dict[str, list[Path]]:
    """The shards of a folder by split; empty if it is another kind of folder."""
    shards, folders = _tars_in(folder)
    if shards:
        return {} if folders else by_split(shards)
    splits: dict[str, list[Path]] = {}
    for below in folders:
        name = SPLITS.get(below.name.lower())
        inside, deeper = _tars_in(below)
        if name is None or not inside or deeper or name in splits:
            return {}
        splits[name] = inside
    return splits


def _tars_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The shards and the folders in a folder, sorted, without hidden ones."""
    shards, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "__")):
                continue
            if entry.name.lower().endswith(".tar"):
                shards.append(entry.name)
            elif os.path.isdir(entry.path):  # an entry raises an error for circular links
                folders.append(entry.name)
    return [folder / name for name in sorted(shards)], [folder / name for name in sorted(folders)]


def by_split(shards: list[Path]) -> dict[str, list[Path]]:
    """Files by the split in their names, as in pets-train-000012.tar."""
    splits: dict[str, list[Path]] = {}
    for shard in shards:
        words = {SPLITS[word] for word in re.split(r"[^a-z]+", shard.stem.lower()) if word in SPLITS}
        splits.setdefault(words.pop() if len(words) == 1 else "train", []).append(shard)
    return splits


# ---- lazy columns ---------------------------------------------------------------------------


class ShardTable:
    """The indexes of some shards as one table; a row is an image."""

    def __init__(self, shards: Sequence[ShardHeader]) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(shard.count for shard in shards)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def runs(self, rows: NDArray[np.int64]) -> Iterator[tuple[ShardHeader, NDArray[np.int64]]]:
        """Rows in their order, in runs of one shard each, as rows of that shard."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        changes = np.flatnonzero(np.diff(shards, prepend=-1))
        for first, last in zip(changes, [*changes[1:], len(rows)], strict=True):
            number = shards[first]
            yield self.shards[number], rows[first:last] - self.starts[number]

    def column(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The values of a column; of each run of rows, from its first to its last row is read."""
        parts = []
        for shard, own in self.runs(rows):
            low, high = int(own.min()), int(own.max()) + 1
            if high - low <= 4 * len(own) + 64:
                parts.append(shard.read(name, low, high)[own - low])
            else:
                parts += [shard.read(name, row, row + 1) for row in own.tolist()]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)


class _Column(LazySequence[T]):
    """Something of each image in some rows of a table."""

    def __init__(self, table: ShardTable, rows: Rows) -> None:
        self.table, self.rows = table, rows

    def take(self, indices: Indices) -> Self:
        return type(self)(self.table, take_rows(self.rows, indices))

    def identity(self) -> bytes:
        digest = hashlib.sha256(hash_rows(self.rows))
        for shard in self.table.shards:
            digest.update(shard.digest)
        return digest.digest()


class ShardImages(_Column[ShardImage]):
    """The images."""

    def read(self, rows: NDArray[np.int64]) -> list[ShardImage]:
        return [shard.image(row) for shard, own in self.table.runs(rows) for row in own.tolist()]


class ShardKeys(_Column[np.uint64]):
    """Their content keys."""

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:  # type: ignore[override]  # an array
        return self.table.column("keys", rows)

    def blocks(self, size: int = BLOCK) -> Iterator[NDArray[np.uint64]]:
        if self.rows != range(len(self.table)):
            yield from super().blocks(size)
            return
        for shard in self.table.shards:  # without looking for the shard of each row
            for first in range(0, shard.count, size):
                yield shard.read("keys", first, min(first + size, shard.count))


class ShardNames(_Column[str]):
    """Their names."""

    def read(self, rows: NDArray[np.int64]) -> list[str]:
        names: list[str] = []
        for shard, own in self.table.runs(rows):
            low, high = int(own.min()), int(own.max()) + 1
            if high - low <= 4 * len(own) + 64:
                near = shard.names(low, high)
                names += [near[row - low] for row in own.tolist()]
            else:
                names += [shard.names(row, row + 1)[0] for row in own.tolist()]
        return names


# ---- the data set ---------------------------------------------------------------------------


def open_shards(shards: Sequence[Path], progress: Progress) -> list[ShardHeader]:
    """The index of each shard; shards without a current one are read, some at a time."""
    infos: dict[bytes, bytes] = {}  # which are mostly equal, with the names of all classes

    def share(header: ShardHeader) -> ShardHeader:
        return replace(header, info=infos.setdefault(header.info, header.info))

    with ThreadPoolExecutor(_THREADS) as pool:
        opened = zip(shards, pool.map(open_index, shards), strict=True)
        found = {shard: share(header) if header else None for shard, header in opened}
        missing = [shard for shard, header in found.items() if header is None]
        for done, header in enumerate(pool.map(build_index, missing), 1):
            found[missing[done - 1]] = share(header)
            progress(done, len(missing))
    return [header for header in found.values() if header is not None]


def read_shards(path: str | Path, progress: Progress) -> Dataset:
    """The data set in shards. Progress is reported while shards that have no index are read."""
    shards = {name: open_shards(files, progress) for name, files in list_shards(path).items()}
    everything = [shard for some in shards.values() for shard in some]
    if not sum(shard.count for shard in everything):
        raise InputError(f"{printable(path)} has no images: its shards must hold key.jpg and key.cls.")
    infos = {info: json.loads(info) for info in {shard.info: None for shard in everything}}
    classes, numbers = _merge_classes(infos)
    splits = {}
    for name, some in shards.items():
        table = ShardTable(some)
        rows, labels = range(len(table)), _labels(some, infos, numbers, len(classes))
        keys: Any = ShardKeys(table, rows)
        keys = keys.read(np.arange(len(table))) if len(table) < LARGE else keys
        splits[name] = Split(labels, ShardNames(table, rows), ShardImages(table, rows), None, keys)
    file = Path(path)
    name = file.resolve().name if file.is_dir() else _RANGE.sub("", file.stem).strip("-_. ") or "shards"
    note = f"{len(everything):,} tar shard{'s' * (len(everything) > 1)}; their indexes are current."
    return build_dataset(name, classes, splits, [note, *_skip_note(infos.values())])


def _skip_note(infos: Iterable[Any]) -> list[str]:
    """A note on images that are not read."""
    others = [str(name) for info in infos for name in info.get("others", ())]
    if not others:
        return []
    return [
        f"Not read: {len(others):,} images such as {printable(others[0])!r}, whose names have a second dot: "
        "a key ends at the first one."
    ]


def _merge_classes(infos: Mapping[bytes, Any]) -> tuple[list[str], dict[bytes, NDArray[np.int64]]]:
    """The classes of all shards, and the class of each label of a shard by the shard's description.

    Shards that were written together all have the list of all classes, in its order. Others have the labels
    that occur in them, which are put in numeric order, as those of a table are.
    """
    lists = {info: [str(name) for name in fields["classes"]] for info, fields in infos.items()}
    unequal = list({tuple(names): None for names in lists.values()})
    classes = list(unequal[0])
    if len(unequal) > 1:
        classes = sorted({name for names in unequal for name in names}, key=numeric_order)
    number = {name: index for index, name in enumerate(classes)}
    return classes, {info: np.array([number[n] for n in names], np.int64) for info, names in lists.items()}


def _labels(
    shards: Sequence[ShardHeader],
    infos: Mapping[bytes, Any],
    numbers: dict[bytes, NDArray[np.int64]],
    classes: int,
) -> NDArray[np.int64]:
    """(N,) the class of each image, as the smallest integers that hold it if there are very many; (N, K) of 0
    and 1 if any shard has several labels of an image."""
    count = sum(shard.count for shard in shards)
    multilabel = any("sets" in info for info in infos.values())
    if multilabel and count >= LARGE:
        raise InputError(
            f"multi-label shards may hold up to {LARGE - 1:,} images, not {count:,}; use a .jsonl table."
        )
    small = np.int16 if classes <= 2**15 else np.int32
    shape = (count, classes) if multilabel else (count,)
    labels: NDArray[Any] = np.empty(shape, dtype=np.int64 if count < LARGE else small)
    at = 0
    for shard in shards:
        codes, label = shard.read("labels", 0, shard.count), numbers[shard.info]  # of each code
        if multilabel:
            sets = infos[shard.info].get("sets", [[number] for number in range(len(label))])
            label = np.array([np.isin(np.arange(classes), label[some]) for some in sets], dtype=np.int64)
        if shard.count and codes.max() >= len(label):
            raise _no_label(shard, np.flatnonzero(codes >= len(label)))
        labels[at : at + shard.count] = label[codes]
        at += shard.count
    return labels


def _no_label(shard: ShardHeader, rows: NDArray[np.int64]) -> InputError:
    name = shard.names(int(rows[0]), int(rows[0]) + 1)[0]
    more = f" and {len(rows) - 1:,} more images" if len(rows) > 1 else ""
    stem = name.rpartition("/")[2].partition(".")[0]
    return InputError(
        f"{printable(shard.tar)} has no label for {printable(name)!r}{more}; add {printable(stem)}.cls with "
        f'its class, or {printable(stem)}.json with {{"label": ...}}. If its folders are classes, unpack it.'
    )
