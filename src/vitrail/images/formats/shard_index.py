"""The index of a tar shard: where its images are, their labels and content keys (images/shard.py).

An index lies beside its shard, as `photos-000000.tar.index`, or in the cache folder if that folder is
read-only. It is used while the shard has the size and the time that are written in it and the contents of the
index have their SHA-256, which is checked each time it is opened; if not, it is made again.

Shards have the layout of WebDataset: `key.jpg` (or another image) and `key.cls` or `key.json` with its label,
where the key is the name up to the first dot after the last slash. A list of labels in a `key.json` makes the
data multi-label: the label of an image is then the number of one of the sets of classes that occur.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vitrail.base.errors import FileError, InputError, VitrailError, printable
from vitrail.base.safe_files import atomic_file, cache_folder, open_regular, parse_json
from vitrail.images.content import bytes_key, name_key
from vitrail.images.formats.folders import SUFFIXES
from vitrail.images.formats.shard_images import (
    HEADER,
    MAGIC,
    MAX_SIZE,
    NO_LABEL,
    PLACE,
    VERSION,
    ShardHeader,
    column_starts,
    read_header,
)
from vitrail.images.formats.stored_images import open_stored, version_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_LABEL = 1 << 20  # bytes of a .cls or .json file
_MAX_HEADER = 1 << 20  # bytes of an extended header in a tar
_HASHED = ("labels", "keys", "ends")  # the columns of the first digest, after the names
_PLACES_DIGEST = 8  # bytes
_PIECE = 1 << 22  # bytes that are read at a time
_KEYS = ("label", "cls", "class")  # of a label in a .json file


def index_paths(tar: Path) -> Iterator[str]:
    """Where the index of a shard may be: beside it, or in the cache folder."""
    path = os.path.abspath(tar)
    yield f"{path}.index"
    yield str(cache_folder() / "index" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.index")


def open_index(tar: Path) -> ShardHeader | None:
    """The index of a shard; None if there is none that is intact and for the shard as it is now."""
    version = version_of(str(tar))
    for path in index_paths(tar):
        with suppress(OSError, VitrailError):
            header = read_header(os.path.abspath(tar), path)
            if header.tar_version == version:
                if _is_intact(header):
                    return header
                open_stored.cache_clear()  # it is open, and the new one will have the same size and time
    return None


def build_index(tar: Path) -> ShardHeader:
    """Read a whole shard, and write its index."""
    rows = _Rows(tar)
    with _open_tar(tar) as file:
        status = os.fstat(file.fileno())
        for name, offset, size in _members(tar, file):
            rows.add(file, name, offset, size)
    labels, classes, sets = rows.encode_labels()
    for path in index_paths(tar):
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_index(path, status, classes, rows.places, labels, rows.keys, rows.names, rows.others, sets)
            return read_header(os.path.abspath(tar), path)
        except OSError as error:
            reason = printable(error.strerror or error)
    raise FileError(
        f"The index of {printable(tar)} can be written neither beside it nor in the cache folder "
        f"{printable(cache_folder())} ({reason}); set VITRAIL_CACHE to a folder that can be written."
    )


def write_index(
    path: str,
    tar: os.stat_result,
    classes: Sequence[str],
    places: Sequence[tuple[int, int]],
    labels: Sequence[int] | NDArray[Any],
    keys: Sequence[int],
    names: Sequence[str],
    others: Sequence[str] = (),
    sets: Sequence[Sequence[int]] | None = None,
) -> None:
    """Write an index atomically; an older one is replaced.

    Args:
        tar: size and time of the shard.
        classes: the names of all classes, or of those in this shard.
        labels: the number of each image's class, or NO_LABEL; of multi-label data, of its set of classes.
        others: the names of images that are not read.
        sets: of multi-label data, the sets of class numbers.
    """
    texts = [name.encode("utf-8", "surrogateescape") for name in names]
    columns: dict[str, NDArray[Any]] = {
        "places": np.array(places, dtype=PLACE),
        "labels": np.array(labels, dtype="<u4"),
        "keys": np.array(keys, dtype="<u8"),
        "ends": np.cumsum([len(text) for text in texts], dtype="<u8"),
    }
    joined = b"".join(texts)
    digest = hashlib.sha256(joined)
    for column in _HASHED:
        digest.update(columns[column].tobytes())
    fields = {"classes": list(classes), "others": list(others)}
    info = json.dumps(fields if sets is None else fields | {"sets": sets}).encode()
    digest.update(b"" if sets is None else info)
    digests = digest.digest(), hashlib.sha256(columns["places"].tobytes()).digest()[:_PLACES_DIGEST]
    starts, _ = column_starts(len(info), len(names))
    lengths = len(info), len(names), tar.st_size, tar.st_mtime_ns, len(joined)
    with atomic_file(path, overwrite=True) as partial:
        with partial.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, zlib.crc32(info), *lengths, *digests) + info)
            for column, values in columns.items():
                file.seek(starts[column])
                file.write(values.tobytes())
            file.truncate(starts["names"])
            file.seek(starts["names"])
            file.write(joined)
        # Readers tell a changed index by its size and time. Two processes may write the same one at the same
        # time, and must not disturb each other: so the fraction of the second is a hash of the contents.
        content = hashlib.sha256(digest.digest() + info + columns["places"].tobytes()).digest()
        time = tar.st_mtime_ns // 10**9 * 10**9 + int.from_bytes(content[:8]) % 10**9
        os.utime(partial, ns=(time, time))


def _is_intact(header: ShardHeader) -> bool:
    """Whether an index has the contents that were written. Its description has a checksum of its own."""
    digest, places = hashlib.sha256(), hashlib.sha256()
    size, _ = header.index_version
    for first in range(header.starts["names"], size, _PIECE):
        digest.update(header.read_bytes(first, min(_PIECE, size - first)))
    for column in _HASHED:
        digest.update(header.read(column, 0, header.count).data)
    places.update(header.read("places", 0, header.count).data)
    if header.places_digest not in (bytes(_PLACES_DIGEST), places.digest()[:_PLACES_DIGEST]):
        return False
    if digest.digest() == header.digest:
        return True
    digest.update(header.info)  # of multi-label data
    return digest.digest() == header.digest


# ---- reading a shard ------------------------------------------------------------------------


class _Rows:
    """What is found in one shard, member by member."""

    def __init__(self, tar: Path) -> None:
        self.tar = tar
        self.names: list[str] = []
        self.places: list[tuple[int, int]] = []
        self.keys: list[int] = []
        self.rows: dict[str, int] = {}
        """The row of each key with an image."""
        self.labels: dict[tuple[str, str], str | tuple[str, ...]] = {}
        """Labels by key, and by cls or json; several of an image as a tuple."""
        self.others: list[str] = []
        """Images whose names have a second dot: they are other parts of their key, as in WebDataset."""

    def add(self, file: BinaryIO, name: str, offset: int, size: int) -> None:
        """Add a member, if it is an image or a label."""
        folder, _, base = name.rpartition("/")
        stem, _, suffix = base.partition(".")
        key, kind = f"{folder}/{stem}", f".{suffix.lower()}"
        if not stem:
            return  # a hidden file
        if kind in (".cls", ".json"):
            if (key, kind) in self.labels:
                raise self.bad(f"has two members {printable(name)!r}; keep one of them")
            data = _read_member(self.tar, file, offset, min(size, _MAX_LABEL + 1))
            if (label := self.parse_label(name, kind, data)) is not None:
                self.labels[key, kind] = label
        elif kind not in SUFFIXES:
            self.others += [name] if posixpath.splitext(kind)[1] in SUFFIXES else []
        else:
            if key in self.rows:
                other = self.names[self.rows[key]]
                raise self.bad(
                    f"has two images with one key, {printable(other)!r} and {printable(name)!r}; the key is "
                    "the name up to its first dot, so rename one of them"
                )
            if size > MAX_SIZE:
                raise self.bad(f"has an image of {size:,} bytes, {printable(name)!r}; no image is that large")
            data = _read_member(self.tar, file, offset, size)
            self.rows[key] = len(self.names)
            self.names.append(name)
            self.places.append((offset, size))
            self.keys.append(bytes_key(data) if data else name_key(name))

    def parse_label(self, name: str, kind: str, data: bytes) -> str | tuple[str, ...] | None:
        """The label in a .cls or .json file, or the labels in a list; None if an object has none."""
        where = f"{printable(self.tar)}: {printable(name)}"
        if len(data) > _MAX_LABEL:
            raise self.bad(f"has a label of more than {_MAX_LABEL:,} bytes, {printable(name)!r}")
        if kind == ".json":
            value = parse_json(data, where)
            values = value if isinstance(value, dict) else {}
            value = next((values[key] for key in _KEYS if key in values), None)
            if value is None:
                return None
        else:
            value = data.decode("utf-8", "replace").strip()
        if isinstance(value, list):
            return tuple(dict.fromkeys(_check_label(one, where) for one in value))
        return _check_label(value, where)

    def encode_labels(self) -> tuple[NDArray[np.int64], list[str], list[tuple[int, ...]] | None]:
        """(N,) the number of each image's class or set of classes, or NO_LABEL; the classes; the sets."""
        from vitrail.images.formats.tables import numeric_order

        found = [self.labels.get((key, ".cls"), self.labels.get((key, ".json"))) for key in self.rows]
        sets = [(label,) if isinstance(label, str) else label for label in found]
        classes = sorted({text for one in sets for text in one or ()}, key=numeric_order)
        number = {text: index for index, text in enumerate(classes)}
        numbers = [None if one is None else tuple(sorted(number[text] for text in one)) for one in sets]
        if not any(isinstance(label, tuple) for label in found):
            codes = [NO_LABEL if one is None else one[0] for one in numbers]
            return np.array(codes, dtype=np.int64), classes, None
        code = {
            one: index for index, one in enumerate(dict.fromkeys(one for one in numbers if one is not None))
        }
        codes = [NO_LABEL if one is None else code[one] for one in numbers]
        return np.array(codes, dtype=np.int64), classes, list(code)

    def bad(self, reason: str) -> InputError:
        return InputError(f"{printable(self.tar)} {reason}.")


def _check_label(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise InputError(
            f"{where} must hold a label, a text or an integer, or a list of these for a multi-label image, "
            f"not {printable(repr(value), 40)}."
        )
    return str(value).strip()


def _open_tar(tar: Path) -> BinaryIO:
    file = open_regular(tar, "a shard")
    start = file.read(6)
    file.seek(0)
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")):
        file.close()
        raise InputError(
            f"{printable(tar)} is compressed, and images are read from a shard in any order; uncompress it "
            "(images hardly shrink)."
        )
    return file


class _HeaderFile:
    """A file of which tarfile reads headers only: a forged one must not ask for gigabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self.file.read(size)


def _members(tar: Path, file: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular file in a tar; anything unsafe is refused by its name."""
    name, size = printable(tar), os.fstat(file.fileno()).st_size
    end = 0
    try:
        with tarfile.open(fileobj=_HeaderFile(file), mode="r:", errors="surrogateescape") as opened:  # type: ignore[call-overload]
            while (member := opened.next()) is not None:
                opened.members = []  # it would keep them all
                end = member.offset_data + (-(-member.size // 512) * 512 if member.isreg() else 0)
                if end > size:
                    raise _truncated(name, f"{printable(member.name)!r} ends after the file")
                if member.isdir():
                    continue
                _check_member(name, member)
                yield posixpath.normpath(member.name), member.offset_data, member.size
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, VitrailError):
            raise
        if not end:
            raise InputError(f"{name} is not a tar file ({printable(error)}).") from error
        raise _truncated(name, f"{printable(error)} after {end:,} bytes") from error
    file.seek(end)
    if file.read(512) != bytes(512):
        raise _truncated(name, "its end mark is missing")


def _truncated(name: str, reason: str) -> FileError:
    return FileError(f"{name} is damaged or was cut off: {reason}. Copy or download it again.")


def _check_member(tar: str, member: tarfile.TarInfo) -> None:
    """Refuse links, devices, sparse files, and names that lead out of a folder."""
    shown = printable(member.name)
    if member.issym() or member.islnk():
        raise InputError(
            f"{tar} has a link, {shown!r} to {printable(member.linkname)!r}; shards must hold regular files."
        )
    if not member.isreg() or member.issparse():
        raise InputError(f"{tar} has a member that is no regular file, {shown!r}; shards hold only such.")
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or "\\" in member.name:
        raise InputError(
            f"{tar} has a member named {shown!r}; names must be relative, without '..' and backslashes."
        )


def _read_member(tar: Path, file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise _truncated(printable(tar), "it became shorter while it was read")
    return data
