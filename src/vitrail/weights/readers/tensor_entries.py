"""Tensors in weight files: dtype, shape and byte range of each, from a safetensors header or an npz archive.

A size claimed by a file is compared with the bytes it has before anything is allocated.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np

from vitrail.base.errors import printable

MAX_HEADER = 3 << 19  # bytes of a header or pickle: several times what the largest ViT needs
SAVE_AGAIN = "Save the state dict again: torch.save(model.state_dict(), path)."
CHUNK = 1 << 20  # bytes read at a time, and of a zip's directory: about 8,000 tensors

# Bytes per element, by torch's dtype names.
SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "bool": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
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
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


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


# ---- safetensors: a length, then JSON that accounts for every byte after it ------------------

_MAX_PARTS = 200_000  # values in a header; a tensor takes about ten
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def read_safetensors(handle: IO[bytes]) -> tuple[dict[str, Entry], dict[str, Span], dict[str, str]]:
    """Entries, byte ranges and metadata of an open file."""
    header, base, size = _read_header(handle)
    metadata = header.pop("__metadata__", {})
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise MalformedFile("its metadata are not strings by name")
    entries, ranges = {}, []
    for name, info in header.items():
        match info:
            case {"dtype": str(code), "shape": shape, "data_offsets": [int(start), int(stop)]}:
                if code not in _DTYPES or bool in (type(start), type(stop)):
                    raise MalformedFile(
                        f"{printable(name)} has an invalid dtype or offset: {printable(code)}"
                    )
                entries[name] = entry = Entry(_DTYPES[code], check_shape(printable(name), shape))
                ranges.append((start, stop, name))
                if stop - start != entry.bytes:
                    raise MalformedFile(
                        f"{printable(name)} claims {entry.bytes:,} bytes and has {stop - start:,}"
                    )
            case _:
                raise MalformedFile(f"{printable(name)} has no dtype, shape and data_offsets")
    spans, end = {}, 0
    for start, stop, name in sorted(ranges):
        if start != end:
            raise MalformedFile(f"{printable(name)} overlaps another tensor, or leaves a gap before it")
        spans[name] = Span(base + start, base + stop, swap_size(entries[name].dtype, "little"))
        end = stop
    if base + end != size:
        raise MalformedFile(f"its tensors need {base + end:,} bytes and the file has {size:,}")
    return entries, spans, metadata


def _read_header(handle: IO[bytes]) -> tuple[dict[str, Any], int, int]:
    """The JSON object, where the data after it begins, and the size of the file."""
    size = handle.seek(0, os.SEEK_END)
    handle.seek(0)
    length = int.from_bytes(handle.read(8), "little")
    if length > min(MAX_HEADER, size - 8):
        raise MalformedFile(
            f"it claims a header of {length:,} bytes, in a file of {size:,} (at most {MAX_HEADER:,})"
        )
    text = handle.read(length)
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_PARTS:
        raise MalformedFile(f"its header has more than {_MAX_PARTS:,} parts")
    header = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_integer, parse_int=_integer)
    return header, 8 + length, size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of two values under one key readers choose differently, so there may be only one."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise MalformedFile(f"its header has a duplicate name: {printable(twice, 80)}")
    "".join(part for pair in pairs for part in pair if isinstance(part, str)).encode()  # no lone surrogates
    return values


def _integer(text: str) -> int:
    if not text.isdigit() or len(text) > 20:
        raise MalformedFile(f"its header has {printable(text)} instead of an integer")
    return int(text)


# torch's dtypes by numpy's codes. Numpy has no bfloat16 and writes one as two untyped bytes (V2).
CODES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "V2": "bfloat16", "c8": "complex64", "b1": "bool",
    "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8",
}  # fmt: skip


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


def kind_of_zip(names: list[str]) -> Literal["npz", "pickle"]:
    """Whether an archive with these members is an npz or a torch.save file. Others are refused."""
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise MalformedFile("it is a TorchScript program, not weights", SAVE_AGAIN)
    if any(name.endswith("/data.pkl") for name in names):
        return "pickle"
    if other := next((name for name in names if not name.endswith(".npy")), "" if names else "it is empty"):
        raise MalformedFile(f"it is a zip archive, but not of arrays: {printable(other)}", SAVE_AGAIN)
    return "npz"


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
