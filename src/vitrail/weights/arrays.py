"""What every kind of weight file shares: entries, spans of bytes, zip archives; and npz itself.

A size that a file gives is compared with the bytes that are there before anything is allocated.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from vitrail.errors import printable

HEADER_MOST = 3 << 19  # bytes of a header or pickle: several times what the largest ViT needs
PIECE = 1 << 20  # bytes read at a time, and of a zip's list of members: some 8,000 tensors

# torch's names and the bytes of one element.
SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "bool": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip

# numpy's codes. It has no bfloat16 of its own, and writes one as two bytes without a meaning (V2).
CODES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "V2": "bfloat16", "c8": "complex64", "b1": "bool",
    "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8",
}  # fmt: skip


class Bad(Exception):
    """Why a file is refused, and what to do. `files.py` adds the file's name and makes it a FileError."""

    def __init__(self, reason: str, do: str = "Download it again, or save it again.") -> None:
        super().__init__(reason, do)


@dataclass(frozen=True)
class Entry:
    """What a file's header says of one tensor."""

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
    """Where the bytes of one tensor are: in a member of a zip archive, or in the file itself."""

    start: int
    stop: int
    swap: int  # the bytes of each number that is in the other byte order than this machine's, else 1
    member: zipfile.ZipInfo | None = None
    fortran: bool = False  # the first axis runs fastest


def swap_of(dtype: str, order: str) -> int:
    """Span.swap, for numbers of a dtype in an order: "little" or "big"."""
    return 1 if order == sys.byteorder else 4 if dtype == "complex64" else SIZES[dtype]


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape that a tensor can have: whole numbers, and a product that 63 bits hold."""
    if not isinstance(shape, (list, tuple)) or any(type(side) is not int or side < 0 for side in shape):
        raise Bad(f"the shape of {name} is not a list of whole numbers")
    if len(shape) > 64 or math.prod(side or 1 for side in shape) >= 2**63:  # zeros hide no giant
        raise Bad(f"the shape of {name} is larger than any tensor can be")
    return tuple(shape)


def as_array(dtype: str, piece: bytes) -> np.ndarray:
    """Elements from their bytes; bfloat16 as float32, which holds all its values."""
    if dtype == "bool":
        return np.frombuffer(piece, np.uint8) != 0
    if dtype == "bfloat16":  # the upper half of a float32
        wide: np.ndarray = np.frombuffer(piece, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32)
    if dtype.startswith("float8"):
        raise Bad(f"numpy has no {dtype}", "Read it with .tensor() instead.")
    return np.frombuffer(piece, np.dtype(dtype))


def pieces(handle: IO[bytes], archive: zipfile.ZipFile | None, span: Span) -> Iterator[bytes]:
    """The bytes of a span in this machine's order, at most PIECE at a time."""
    zipped = archive.open(span.member) if archive and span.member else None
    with zipped or nullcontext(handle) as stream:
        handle.seek(0 if zipped else span.start)
        for _ in exactly(stream, span.start if zipped else 0):
            pass
        for piece in exactly(stream, span.stop - span.start):
            yield piece if span.swap == 1 else np.frombuffer(piece, f"u{span.swap}").byteswap().tobytes()
        if zipped:
            stream.read(1)  # at the end, where there is no more, zipfile compares the checksum


def exactly(stream: IO[bytes], count: int) -> Iterator[bytes]:
    while count:
        piece = stream.read(min(count, PIECE))
        if len(piece) != min(count, PIECE):
            raise Bad("it ends before its last tensor does")
        count -= len(piece)
        yield piece


class Careful:
    """A file that will not be read in one go: zipfile reads as much as an archive tells it to."""

    def __init__(self, handle: IO[bytes]) -> None:
        self.handle, self.seek, self.tell, self.seekable = handle, handle.seek, handle.tell, handle.seekable

    def read(self, count: int = -1) -> bytes:
        found = self.handle.read(count if 0 <= count <= PIECE else PIECE + 1)
        if len(found) > PIECE:
            raise Bad(f"its list of members is longer than {PIECE:,} bytes")
        return found


def open_zip(handle: IO[bytes]) -> zipfile.ZipFile:
    """Open an archive and check its list of members: no two of a name, none inside another."""
    archive = zipfile.ZipFile(Careful(handle))
    names, end = set(), 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        name = printable(member.filename)
        if member.filename in names:
            raise Bad(f"its archive has two members named {name}")
        names.add(member.filename)
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Bad(f"its member {name} is encrypted, or compressed in an unusual way")
        if member.filename.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", member.filename):
            raise Bad(f"its member {name} points out of the archive")
        if member.compress_type == zipfile.ZIP_STORED and member.file_size != member.compress_size:
            raise Bad(f"its member {name} gives two sizes")
        if member.header_offset < end:
            raise Bad(f"its member {name} lies inside another one")
        end = member.header_offset + 30 + len(member.orig_filename) + member.compress_size
    if end > archive.start_dir:
        raise Bad("it has lost its end, or its sizes are not true")
    return archive


def read_npz(archive: zipfile.ZipFile) -> tuple[dict[str, Entry], dict[str, Span]]:
    """The arrays of an npz, from their headers."""
    entries, spans = {}, {}
    for name, member in ((member.filename.removesuffix(".npy"), member) for member in archive.infolist()):
        if member.file_size > 1000 * member.compress_size + PIECE:  # deflate itself ends at 1032
            raise Bad(f"{printable(name)} unpacks to 1,000 times its size", "Save it with numpy.savez.")
        with archive.open(member) as stream:
            entries[name], spans[name] = read_npy_header(name, stream, member)
    return entries, spans


def read_npy_header(name: str, stream: IO[bytes], member: zipfile.ZipInfo) -> tuple[Entry, Span]:
    name, start = printable(name), stream.read(8)
    width = {b"\x93NUMPY\1": 2, b"\x93NUMPY\2": 4, b"\x93NUMPY\3": 4}.get(start[:7], 0)
    length = int.from_bytes(stream.read(width), "little")
    if not width or length > 10_000:
        raise Bad(f"{name} is not a numpy array, or has a header of more than 10,000 bytes")
    text = stream.read(length).decode("latin1" if start[6] < 3 else "utf-8")
    # With so few brackets and no signs, nothing can be nested deep enough to trouble the parser.
    if not re.fullmatch(r"[\w\s'\"<>|=(),:{}]*", text) or text.count("(") > 1 or text.count("{") != 1:
        raise Bad(f"{name} is not an array of plain numbers")
    header = ast.literal_eval(text.strip())
    code = str(header["descr"])
    order, dtype = code[:1], CODES.get(code[1:])
    if dtype is None or order not in "<>|=":
        what = {"U": " (text)", "S": " (text)", "O": " (Python objects)"}.get(code[1:2], "")
        raise Bad(f"{name} is not an array of plain numbers but of {code!r}{what}", "Save it as numbers.")
    entry = Entry(dtype, check_shape(name, header["shape"]))
    begin, end = 8 + width + length, member.file_size
    if begin + entry.bytes != end:
        raise Bad(f"{name} claims {entry.bytes:,} bytes and has {end - begin:,}")
    swap = swap_of(dtype, {"<": "little", ">": "big"}.get(order, sys.byteorder))
    return entry, Span(begin, end, swap, member, bool(header["fortran_order"]))
