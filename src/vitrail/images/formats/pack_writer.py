"""Packing a data set: every image is decoded and resized once, and written to one file (packed.py).

The file is written as OUT.partial beside its target, with a journal of the images that are safely in it, so
that an interrupted pack resumes. It is renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from vitrail.base.errors import FileError, InputError, VitrailError, option, printable
from vitrail.base.safe_files import DISK_FULL, check_new, locked_file, open_own, open_regular, sync_folder
from vitrail.images.content import content_keys, file_key
from vitrail.images.decode import open_image
from vitrail.images.formats.packed import HEADER, MAGIC, ROW, SPLIT_NAMES, VERSION, PackIndex, read_index
from vitrail.images.pixels import apply_orientation
from vitrail.images.workers import Task, Workers, choose_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.formats.sources import Dataset, Split

SIZE = 256  # the short side by default: 8/7 of 224
_QUALITY = 95  # of JPEGs
_TASK = 16  # images of a task
_AHEAD = 8  # tasks that are done ahead, for each worker
_SYNC = 2**28  # bytes between two entries in the journal
_RECORD = np.dtype([("height", "<u4"), ("width", "<u4"), ("channels", "<u4"), ("crc", "<u4")])

Progress = Callable[[int, int], None]
"""Called with the number of images packed so far and the number of images."""


@dataclass
class PackResult:
    """What was packed."""

    out: Path
    images: int
    bytes: int = 0
    resumed: int = 0
    """Images that an earlier, interrupted pack had written."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """The reason for each file that could not be read, by name. The packed file has it in its place."""


def pack_dataset(
    data: Dataset,
    out: Path,
    *,
    size: int = SIZE,
    jpeg: bool = False,
    workers: int | Literal["auto"] = "auto",
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> PackResult:
    """Write a data set of image files to a packed file.

    Args:
        data: as `read_data` returns it: without a held-out split, which is chosen when the file is opened.
        size: the short side that larger images are resized to.
        jpeg: whether images are stored as JPEGs of quality 95: a tenth of the bytes, and slower to read.
        wait: whether to wait for another process that is writing the same file, and take its file then.
    """
    if not wait:
        check_new(out, "vitrail pack")
    splits = _file_splits(data)
    rows = _source_rows(splits)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _space_checked(out), locked_file(_partial(out), out, wait=wait) as file:
        if os.path.lexists(out):  # another process has written it since
            if not file.seek(0, 2):
                _partial(out).unlink()
            if not wait:
                check_new(out, "vitrail pack")
            return PackResult(out, len(rows), out.stat().st_size)
        journal = _Journal(out, _hash_all(data, splits, rows, size, jpeg))
        done = journal.restore(file, rows)
        result = PackResult(out, len(rows), resumed=done)
        paths = [path for _, split in splits for path in split.paths or ()]
        running = Workers(choose_workers(workers, len(paths) - done, image_bytes=4 * size * size))
        tasks = (
            Task(pack_image, [(path, size, jpeg) for path in paths[first : first + _TASK]])
            for first in range(done, len(paths), _TASK)
        )
        try:
            records = chain.from_iterable(running.map(tasks, _AHEAD * max(1, running.plan.count)))
            for number, record in enumerate(records, done):
                _write_record(file, rows[number : number + 1], record)
                journal.add(file, rows, number)
                progress(number + 1, len(rows))
        finally:
            running.close()
            journal.save(file, rows)
        names = [name for _, split in splits for name in split.names]
        labels = np.concatenate([split.labels for _, split in splits])
        _finish(file, PackIndex(data.name, data.classes, names, rows, labels, size, jpeg))
        result.bytes = file.tell()
        for number in np.flatnonzero(rows["channels"] == 0).tolist():
            file.seek(int(rows["offset"][number]))
            result.unreadable[names[number]] = file.read(int(rows["bytes"][number])).decode()
        check_new(out, "vitrail pack")
        os.replace(_partial(out), out)
        sync_folder(out.parent)
        journal.path.unlink(missing_ok=True)
    return result


def _file_splits(data: Dataset) -> list[tuple[int, Split]]:
    """The splits of a data set by number, with the content keys of their images."""
    splits = [getattr(data, name) for name in SPLIT_NAMES]
    if data.train.paths is None:
        raise InputError(
            f"{printable(data.name)} is an array, which needs no decoding; vitrail pack is for image files."
        )
    if any(not isinstance(path, Path) for path in data.train.paths[:1]):
        raise InputError(f"{printable(data.name)} is packed already; vitrail pack is for image files.")
    return [
        (number, replace(split, keys=content_keys(split)))
        for number, split in enumerate(splits)
        if split is not None
    ]


def _source_rows(splits: list[tuple[int, Split]]) -> NDArray[Any]:
    """A row for each image with what is known of its source."""
    rows = np.zeros(sum(len(split) for _, split in splits), dtype=ROW)
    at = 0
    for number, split in splits:
        part = rows[at : at + len(split)]
        part["split"], part["key"] = number, split.keys
        for row, path in zip(part, split.paths or (), strict=True):
            row["source_bytes"], row["source_time"] = source_state(path)
        at += len(split)
    return rows


def source_state(path: Any) -> tuple[int, int]:
    """The size of a file and the time of its last change; zeros if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0, 0
    return status.st_size, status.st_mtime_ns


def pack_identity(data: Dataset, size: int, *, jpeg: bool) -> bytes:
    """A hash of a packed file's contents, from its sources' names, sizes, times and content keys."""
    splits = _file_splits(data)
    return _hash_all(data, splits, _source_rows(splits), size, jpeg)


def _hash_all(
    data: Dataset, splits: list[tuple[int, Split]], rows: NDArray[Any], size: int, jpeg: bool
) -> bytes:
    digest = hashlib.sha256(repr((VERSION, size, jpeg, data.name, data.classes)).encode("utf-8", "replace"))
    digest.update(rows.tobytes())
    for _, split in splits:
        digest.update(np.ascontiguousarray(split.labels).tobytes())
        digest.update("\0".join(split.names).encode("utf-8", "surrogatepass"))
    return digest.digest()


# ---- one image ------------------------------------------------------------------------------


def pack_image(path: Path, size: int, jpeg: bool) -> NDArray[np.uint8]:
    """The record of an image, or of the reason why it cannot be read; runs in a worker."""
    try:
        image = _resized(path, size)
    except (ValueError, OSError) as error:
        return _record(printable(error, 400).replace(printable(path), "it").encode())
    if not jpeg:
        pixels = np.asarray(image)
        return _record(
            pixels.tobytes(), image.height, image.width, pixels.size // (image.height * image.width)
        )
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return _record(buffer.getvalue(), channels=1 if image.mode == "L" else 3)


def _resized(path: Path, size: int) -> Image.Image:
    """An upright image in gray or RGB, whose short side is at most `size`."""

    def min_size(height: int, width: int) -> tuple[int, int]:
        """Twice the size is enough, and a JPEG can be decoded at that size."""
        scale = 2 * size / min(height, width)
        return round(height * scale), round(width * scale)

    opened = open_image(path, min_size)
    gray = opened.mode in ("1", "L") or opened.mode.startswith(("I", "F"))
    image = apply_orientation(opened, 1 if gray and not opened.has_transparency_data else 3)
    short = min(image.size)
    if short <= size:
        return image
    sides = (max(1, round(side * size / short)) for side in image.size)
    return image.resize((next(sides), next(sides)), Image.Resampling.BICUBIC)


def _record(payload: bytes, height: int = 0, width: int = 0, channels: int = 0) -> NDArray[np.uint8]:
    head = np.array([(height, width, channels, zlib.crc32(payload))], dtype=_RECORD)
    return np.frombuffer(head.tobytes() + payload, dtype=np.uint8)


def _write_record(file: io.BufferedRandom, row: NDArray[Any], record: NDArray[np.uint8]) -> None:
    """Append the bytes of an image, and note where they are."""
    head = record[: _RECORD.itemsize].view(_RECORD)
    for name in ("height", "width", "channels", "crc"):
        row[name] = head[name]
    row["offset"], row["bytes"] = file.tell(), len(record) - _RECORD.itemsize
    file.write(record[_RECORD.itemsize :].data)


# ---- files ----------------------------------------------------------------------------------


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


@contextmanager
def _space_checked(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise FileError(
                f"There is no space left for {printable(out)} ({error.strerror}); free some and run the same "
                "command again, which resumes it, or remove the .partial file and use "
                f"{option('jpeg', True)} or a smaller image size."
            ) from error
        raise


class _Journal:
    """The rows of the images that are safely in the partial file, behind a hash of what is being packed."""

    def __init__(self, out: Path, identity: bytes) -> None:
        self.out, self.path, self.identity = out, out.with_name(out.name + ".partial.rows"), identity
        self.saved, self.synced = 0, 0

    def restore(self, file: io.BufferedRandom, rows: NDArray[Any]) -> int:
        """Restore the rows of an interrupted pack, and cut the file after their images. Returns how many."""
        with open_own(self.path) as journal:
            stored = journal.read()
        if not stored and file.seek(0, 2):
            self.path.unlink()
            raise InputError(
                f"{printable(_partial(self.out))} is not of an interrupted vitrail pack; move it away, or "
                "choose another output."
            )
        found = np.zeros(0, dtype=ROW)
        if stored[: len(self.identity)] == self.identity:
            body = stored[len(self.identity) :]
            found = np.frombuffer(body[: len(body) // ROW.itemsize * ROW.itemsize], dtype=ROW)[: len(rows)]
        end = int(found["offset"][-1] + found["bytes"][-1]) if len(found) else HEADER.size
        if not len(found) or file.seek(0, 2) < end:
            found, end = found[:0], HEADER.size
            with open_own(self.path) as journal:
                journal.truncate()
                journal.write(self.identity)
        self.saved = len(found)
        rows[: self.saved] = found
        file.truncate(end)
        file.seek(end)
        self.synced = end
        return self.saved

    def add(self, file: io.BufferedRandom, rows: NDArray[Any], number: int) -> None:
        if file.tell() - self.synced > _SYNC:
            self.save(file, rows, number + 1)

    def save(self, file: io.BufferedRandom, rows: NDArray[Any], count: int | None = None) -> None:
        """Append the rows of all images that are written, once these are on the disk."""
        count = int((rows["offset"] > 0).sum()) if count is None else count
        file.flush()
        os.fsync(file.fileno())
        with open_own(self.path) as journal:
            journal.seek(0, 2)
            journal.write(rows[self.saved : count].tobytes())
        self.saved, self.synced = count, file.tell()


def _finish(file: io.BufferedRandom, index: PackIndex) -> None:
    """Append the index, then write the header: without it, the file is not a packed file."""
    offset, block = file.tell(), index.to_bytes()
    file.write(block)
    file.flush()
    os.fsync(file.fileno())
    file.seek(0)
    file.write(HEADER.pack(MAGIC, VERSION, zlib.crc32(block), offset, len(block)))
    file.flush()
    os.fsync(file.fileno())
    file.seek(0, 2)


# ---- checking -------------------------------------------------------------------------------


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


def check_packed(data: Dataset, file: Path, progress: Progress = lambda done, total: None) -> PackCheck:
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
