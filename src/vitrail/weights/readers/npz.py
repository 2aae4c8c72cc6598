"""Arrays in files: headers, byte ranges, zip archives and the npz format.

A size claimed by a file is compared with the bytes it has before anything is allocated.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import zipfile
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from vitrail.base.errors import printable

MAX_HEADER = 3 << 19  # bytes of a header or pickle: several times what the largest ViT needs
CHUNK = 1 << 20  # bytes read at a time, and of a zip's directory: about 8,000 tensors

# Bytes per element, by torch's dtype names.
SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "bool": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip

# torch's dtypes by numpy's codes. Numpy has no bfloat16 and writes one as two untyped bytes (V2).
CODES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "V2": "bfloat16", "c8": "complex64", "b1": "bool",
    "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8",
}  # fmt: skip


class MalformedFile(Exception):
    """Why a file is refused, and what to do. `files.py` turns it into a FileError with the file's name."""

    def __init__(self, reason: str, do: str = "Download it again, or save it again.") -> None:
        super().__init__(reason, do)


@dataclass(frozen=True)
class Entry:
    """Dtype and shape of a tensor, from a file's header."""

    dtype: str  # torch's name, without "torch."
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * SIZES[self.dtype]


@dataclass(frozen=True)
class Span:
    """The byte range of a tensor, in a member of a zip archive or in the file itself."""

    start: int
    stop: int
    swap: int  # bytes per number if the byte order is not this machine's, else 1
    member: zipfile.ZipInfo | None = None
    fortran: bool = False  # the first axis varies fastest


def swap_size(dtype: str, order: str) -> int:
    """Span.swap for numbers of a dtype in "little" or "big" byte order."""
    return 1 if order == sys.byteorder else 4 if dtype == "complex64" else SIZES[dtype]


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Check that a shape holds integers, and that their product fits in 63 bits."""
    if not isinstance(shape, (list, tuple)) or any(type(side) is not int or side < 0 for side in shape):
        raise MalformedFile(f"the shape of {name} is not a list of non-negative integers")
    if len(shape) > 64 or math.prod(side or 1 for side in shape) >= 2**63:  # a zero must not hide huge sides
        raise MalformedFile(f"the shape of {name} is larger than any tensor can be")
    return tuple(shape)


def as_array(dtype: str, data: bytes) -> np.ndarray:
    """Elements from their bytes; bfloat16 becomes float32, which holds all its values."""
    if dtype == "bool":
        return np.frombuffer(data, np.uint8) != 0
    if dtype == "bfloat16":  # the upper half of a float32
        wide: np.ndarray = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32)
    if dtype.startswith("float8"):
        raise MalformedFile(f"numpy has no {dtype}", "Read it with .tensor() instead.")
    return np.frombuffer(data, np.dtype(dtype))


def read_chunks(handle: IO[bytes], archive: zipfile.ZipFile | None, span: Span) -> Iterator[bytes]:
    """Yield the bytes of a span in this machine's byte order, at most CHUNK at a time."""
    zipped = archive.open(span.member) if archive and span.member else None
    with zipped or nullcontext(handle) as stream:
        handle.seek(0 if zipped else span.start)
        for _ in _read_exactly(stream, span.start if zipped else 0):
            pass
        for chunk in _read_exactly(stream, span.stop - span.start):
            yield chunk if span.swap == 1 else np.frombuffer(chunk, f"u{span.swap}").byteswap().tobytes()
        if zipped:
            stream.read(1)  # zipfile compares the checksum once it reaches the end


def _read_exactly(stream: IO[bytes], count: int) -> Iterator[bytes]:
    while count:
        chunk = stream.read(min(count, CHUNK))
        if len(chunk) != min(count, CHUNK):
            raise MalformedFile("it ends before its last tensor does")
        count -= len(chunk)
        yield chunk


class _LimitedReader:
    """A file that refuses large reads: zipfile would read as much as an archive claims."""

    def __init__(self, handle: IO[bytes]) -> None:
        self.handle, self.seek, self.tell, self.seekable = handle, handle.seek, handle.tell, handle.seekable

    def read(self, count: int = -1) -> bytes:
        data = self.handle.read(count if 0 <= count <= CHUNK else CHUNK + 1)
        if len(data) > CHUNK:
            raise MalformedFile(f"its zip directory is longer than {CHUNK:,} bytes")
        return data


def open_zip(handle: IO[bytes]) -> zipfile.ZipFile:
    """Open an archive and check its directory: no duplicate names, no overlapping members."""
    archive = zipfile.ZipFile(_LimitedReader(handle))
    names, end = set(), 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        name = printable(member.filename)
        if member.filename in names:
            raise MalformedFile(f"its archive has two members named {name}")
        names.add(member.filename)
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise MalformedFile(f"its member {name} is encrypted, or compressed in an unusual way")
        if member.filename.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", member.filename):
            raise MalformedFile(f"its member {name} points outside the archive")
        if member.compress_type == zipfile.ZIP_STORED and member.file_size != member.compress_size:
            raise MalformedFile(f"its member {name} claims two sizes")
        if member.header_offset < end:
            raise MalformedFile(f"its member {name} overlaps another one")
        end = member.header_offset + 30 + len(member.orig_filename) + member.compress_size
    if end > archive.start_dir:
        raise MalformedFile("it is truncated, or its sizes are wrong")
    return archive


def read_npz(
    archive: zipfile.ZipFile, skip: Collection[str] = ()
) -> tuple[dict[str, Entry], dict[str, Span]]:
    """The arrays of an npz, from their headers, but for those to skip."""
    entries, spans = {}, {}
    for name, member in ((member.filename.removesuffix(".npy"), member) for member in archive.infolist()):
        if member.file_size > 1000 * member.compress_size + CHUNK:  # deflate itself reaches at most 1032
            raise MalformedFile(
                f"{printable(name)} unpacks to 1,000 times its size", "Save it with numpy.savez."
            )
        if name in skip:
            continue
        with archive.open(member) as stream:
            entries[name], spans[name] = _read_npy_header(name, stream, member)
    return entries, spans


def _read_npy_header(name: str, stream: IO[bytes], member: zipfile.ZipInfo) -> tuple[Entry, Span]:
    name, start = printable(name), stream.read(8)
    width = {b"\x93NUMPY\1": 2, b"\x93NUMPY\2": 4, b"\x93NUMPY\3": 4}.get(start[:7], 0)
    length = int.from_bytes(stream.read(width), "little")
    if not width or length > 10_000:
        raise MalformedFile(f"{name} is not a numpy array, or has a header of more than 10,000 bytes")
    text = stream.read(length).decode("latin1" if start[6] < 3 else "utf-8")
    # With so few brackets and no signs, nothing can be nested deeply enough to crash the parser.
    if not re.fullmatch(r"[\w\s'\"<>|=(),:{}]*", text) or text.count("(") > 1 or text.count("{") != 1:
        raise MalformedFile(f"{name} is not an array of plain numbers")
    header = ast.literal_eval(text.strip())
    code = str(header["descr"])
    order, dtype = code[:1], CODES.get(code[1:])
    if dtype is None or order not in "<>|=":
        what = {"U": " (text)", "S": " (text)", "O": " (Python objects)"}.get(code[1:2], "")
        raise MalformedFile(
            f"{name} is not an array of plain numbers but of {code!r}{what}", "Save it as numbers."
        )
    entry = Entry(dtype, check_shape(name, header["shape"]))
    begin, end = 8 + width + length, member.file_size
    if begin + entry.bytes != end:
        raise MalformedFile(f"{name} claims {entry.bytes:,} bytes and has {end - begin:,}")
    swap = swap_size(dtype, {"<": "little", ">": "big"}.get(order, sys.byteorder))
    return entry, Span(begin, end, swap, member, bool(header["fortran_order"]))
