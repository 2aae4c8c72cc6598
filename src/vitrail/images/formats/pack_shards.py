"""Packing a data set into tar shards (`vitrail pack --to shards`): the files as they are, with their indexes.

OUT is a folder with train-000000.tar, train-000001.tar, ... in the order of the data. Each shard is written
aside and renamed, then its index; a shard without an index is written again. So an interrupted pack resumes,
as long as the file RESUME with the hash of what is being packed is there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import atomic_file, locked_file, open_regular, remove_partial, write_text
from vitrail.images.classes import are_numbers
from vitrail.images.content import bytes_key, name_key
from vitrail.images.formats.folders import SUFFIXES
from vitrail.images.formats.pack_writer import source_state
from vitrail.images.formats.packed import PackedImage
from vitrail.images.formats.shard_images import ShardImage
from vitrail.images.formats.shard_index import index_paths, open_index, write_index
from vitrail.images.formats.stored_images import StoredImage

if TYPE_CHECKING:
    from vitrail.images.formats.sources import Dataset, Split

SHARD_SIZE = 512  # MB, by default
RESUME = ".resume"
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Shard:
    """A shard to write: some consecutive images of a split."""

    path: Path
    split: Split
    first: int
    last: int


@dataclass
class ShardResult:
    """What was packed."""

    images: int
    shards: int
    bytes: int = 0
    resumed: int = 0
    """Shards that an earlier, interrupted pack had written."""
    unreadable: list[str] = field(default_factory=list)
    """The names of files that could not be read; they are empty in their shards."""


def pack_shards(
    data: Dataset,
    out: Path,
    *,
    shard_size: int = SHARD_SIZE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ShardResult:
    """Write a data set of image files to tar shards in WebDataset's layout, with an index beside each.

    Args:
        data: as `read_data` returns it: without a held-out split, which is chosen when shards are opened.
        shard_size: megabytes of images in a shard, about.
    """
    _check_source(data)
    states = {name: [_state(path) for path in split.paths or ()] for name, split in data.splits.items()}
    planned = [
        _Shard(out / f"{name}-{number:06}.tar", split, first, last)
        for name, split in data.splits.items()
        for number, (first, last) in enumerate(_ranges(states[name], shard_size * 1_000_000))
    ]
    result = ShardResult(sum(map(len, data.splits.values())), len(planned))
    with _locked(out, _identity(data, states, shard_size)):
        remove_partial(out)
        waiting = [shard for shard in planned if not shard.path.exists() or open_index(shard.path) is None]
        result.resumed = len(planned) - len(waiting)
        done = result.images - sum(shard.last - shard.first for shard in waiting)
        with ThreadPoolExecutor(_THREADS) as pool:
            written = pool.map(lambda shard: _write_shard(shard, data.classes), waiting)
            for shard, unreadable in zip(waiting, written, strict=True):
                result.unreadable += unreadable
                done += shard.last - shard.first
                progress(done, result.images)
        if not data.multilabel and not are_numbers(data.classes):  # several labels are written by name
            names = {str(number): name for number, name in enumerate(data.classes)}
            write_text(out / "classes.json", json.dumps(names, indent=1), overwrite=True)
        result.bytes = sum(shard.path.stat().st_size for shard in planned)
        (out / RESUME).unlink()
    return result


def _check_source(data: Dataset) -> None:
    if data.train.paths is None:
        raise InputError(f"{printable(data.name)} is an array; shards are made of image files.")
    if isinstance(next(iter(data.train.paths), None), (PackedImage, ShardImage)):
        raise InputError(f"{printable(data.name)} is packed already; shards are made of image files.")


def _state(path: Any) -> tuple[int, int]:
    """Size and time of an image file; of an image in a Parquet file, those of its bytes and of that file."""
    if isinstance(path, StoredImage):
        return len(path.read_bytes()), source_state(path.file)[1]
    return source_state(path)


def _ranges(states: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """From which to which image each shard goes; a shard has one image at least."""
    first = total = 0
    for number, (size, _) in enumerate(states):
        if total + size > most and number > first:
            yield first, number
            first, total = number, 0
        total += size
    if len(states) > first:
        yield first, len(states)


def _identity(data: Dataset, states: dict[str, list[tuple[int, int]]], shard_size: int) -> str:
    """A hash of what is packed: names, sizes, times and labels."""
    digest = hashlib.sha256(json.dumps([data.classes, shard_size, states]).encode())
    for split in data.splits.values():
        digest.update("\0".join(split.names).encode("utf-8", "surrogatepass"))
        digest.update(split.labels.tobytes())
    return digest.hexdigest()


@contextmanager
def _locked(out: Path, identity: str) -> Iterator[None]:
    """The output folder, locked against a second writer: new, empty, or of the same pack."""
    resume = out / RESUME
    if os.path.lexists(out) and not (out.is_dir() and (resume.exists() or not any(out.iterdir()))):
        raise InputError(
            f"{printable(out)} already exists; vitrail pack --to shards needs a new or empty folder."
        )
    out.mkdir(parents=True, exist_ok=True)
    with locked_file(resume, out) as file:
        before = file.read().decode("utf-8", "replace")
        if before and before != identity:
            raise InputError(
                f"{printable(out)} holds a part of another pack: the data or the shard size has changed. "
                "Remove the folder, or choose another one."
            )
        if not before:
            file.write(identity.encode())
            file.flush()
            os.fsync(file.fileno())
        yield


# ---- one shard ------------------------------------------------------------------------------


def _write_shard(shard: _Shard, classes: Sequence[str]) -> list[str]:
    """Write a shard and its index; returns the names of the files that could not be read."""
    assert shard.split.paths is not None
    names = list(shard.split.names[shard.first : shard.last])
    labels = shard.split.labels[shard.first : shard.last]
    sets = [tuple(np.flatnonzero(row).tolist()) for row in labels] if labels.ndim == 2 else None
    numbered = are_numbers(classes)  # such names are written as they are; others as the number of the class
    places, keys, taken, unreadable = [], [], set[str](), []
    with (
        atomic_file(shard.path, overwrite=True) as partial,
        tarfile.open(partial, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for row, name in enumerate(names):
            data = _read_source(shard.split.paths[shard.first + row])
            unreadable += [name] if data is None else []
            key, suffix = member_key(name, taken, row)
            places.append(_add(tar, key + suffix, data or b""))
            keys.append(bytes_key(data) if data else name_key(name))
            if sets is not None:
                text = json.dumps({"label": [classes[number] for number in sets[row]]})
                _add(tar, f"{key}.json", text.encode())
            else:
                label = labels[row]
                _add(tar, f"{key}.cls", (classes[label] if numbered else str(label)).encode())
    path, status = next(index_paths(shard.path)), os.stat(shard.path)
    if sets is None:
        write_index(path, status, classes, places, labels, keys, names)
    else:
        code = {one: number for number, one in enumerate(dict.fromkeys(sets))}
        write_index(path, status, classes, places, [code[one] for one in sets], keys, names, sets=list(code))
    return unreadable


def member_key(name: str, taken: set[str], row: int) -> tuple[str, str]:
    """The key of an image in its shard, and the ending of its file.

    A key ends before the first dot of the last part, is relative, and occurs once.
    """
    stem, suffix = os.path.splitext(name)
    suffix = suffix.lower()
    parts = [part for part in stem.replace("\\", "_").split("/") if part not in ("", ".", "..")] or ["image"]
    parts[-1] = parts[-1].replace(".", "_")
    key = "/".join(parts)
    key = f"{key}-{row}" if key in taken else key
    taken.add(key)
    return key, suffix if suffix in SUFFIXES else ".jpg"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> tuple[int, int]:
    """Append a file, and return where its bytes are. It has no time or owner: equal data, equal shards."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
    return tar.offset - -(-len(data) // 512) * 512, len(data)


def _read_source(path: Any) -> bytes | None:
    try:
        if isinstance(path, StoredImage):
            return bytes(path.read_bytes())
        with open_regular(path, "an image") as file:
            return file.read()
    except (OSError, ValueError):  # the reading of a data set reports it
        return None
