"""The header of a safetensors file: a length, then JSON that accounts for every byte after it."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import IO, Any

from vitrail.base.errors import printable
from vitrail.weights.readers.npz import MAX_HEADER, Entry, MalformedFile, Span, check_shape, swap_size

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
