"""Reading files that a user names: regular files only, with size limits, and strict JSON."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.base.errors import FileError, InputError, printable


def open_regular(path: str | Path, what: str = "this") -> BinaryIO:
    """Open a regular file for reading. A pipe or a device is refused: it could block or never end.

    Args:
        what: what the file should be, for the message: "an image", "a weight file".
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise InputError(f"{printable(path)} is {kind}, and {what} must be a regular file.")


def read_limited(path: str | Path, most: int, what: str = "this") -> bytes:
    """Read a regular file of at most `most` bytes."""
    with open_regular(path, what) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FileError(f"{printable(path)} is larger than {most:,} bytes, too large for {what}.")
    return data


def parse_json(text: str | bytes, name: str, *, allow_nan: bool = False) -> Any:
    """Parse JSON without duplicate keys. Errors name the line and column.

    Args:
        name: the name of the text in messages, such as its path.
        allow_nan: accept NaN and Infinity, as Python's json writes them.
    """
    try:
        constant = float if allow_nan else _refuse_constant
        return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=constant)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise FileError(f"{printable(name)} is not valid JSON: {error.msg} at {position}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{printable(name)} is not valid JSON: {printable(error)}.") from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one key, parsers choose differently."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return values


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
