"""Zip archives of tensors: a safe directory, the kind of an archive, and the arrays of an npz."""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Collection
from typing import IO, Literal

from vitrail.base.errors import printable
from vitrail.weights.readers.pickles import SAVE_AGAIN
from vitrail.weights.readers.tensor_entries import CHUNK, Entry, MalformedFile, Span, check_shape, swap_size

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
