"""The rows of a CSV or JSONL file, each with the line number at which it starts."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import open_regular

_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # the byte order marks; those of UTF-32 start like these

Row = dict[str, Any]


def read_rows(file: Path, columns: Sequence[Sequence[str]]) -> Iterator[tuple[int, Row]]:
    """All rows as (line number, values by column).

    Args:
        columns: groups of column names; the table must have one of each group.
    """
    lines = _text_lines(file)
    if file.suffix.lower() == ".csv":
        return _csv_rows(file, lines, columns)
    return _json_rows(file, lines, columns)


def row_error(file: Path, line: int, what: str) -> InputError:
    """An error in a line of a table."""
    return InputError(f"{printable(file)}, line {line:,}: {what}")


def _check_columns(file: Path, line: int, names: Collection[str], columns: Sequence[Sequence[str]]) -> None:
    for group in columns:
        if not set(group) & set(names):
            present = printable(", ".join(names))
            missing = " or ".join(group[:2])
            raise row_error(file, line, f"the column {missing} is missing; found: {present or 'none'}.")


def _text_lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, with or without a byte order mark; lines end in LF, CR or both."""
    with open_regular(file) as raw:
        if raw.read(2) in _UTF16:
            raise InputError(f"{printable(file)} is encoded in UTF-16; save it as UTF-8.")
        raw.seek(0)
        # Bytes that are not UTF-8 become lone surrogates, so that their line number is known.
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        for number, line in enumerate(text, 1):
            if "\0" in line:
                raise row_error(file, number, "it contains a NUL byte; save the table as UTF-8 text.")
            if not line.isascii() and (position := find_surrogate(line)) is not None:
                byte = ord(line[position]) - 0xDC00
                raise row_error(
                    file,
                    number,
                    f"the byte 0x{byte:02x} after {position} characters is not UTF-8; save it as UTF-8.",
                )
            yield line


def find_surrogate(text: str) -> int | None:
    """The position of the first lone surrogate, which cannot be encoded; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


# ---- CSV ------------------------------------------------------------------------------------


def _csv_rows(
    file: Path, lines: Iterator[str], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[int, Row]]:
    """The rows of a CSV file, by the names in the header; each has as many values as the header."""
    header: list[str] | None = None
    rows = 0
    for number, values in _records(file, lines):
        if header is None:
            header = _column_names(file, number, values)
            _check_columns(file, number, header, columns)
            continue
        if len(values) != len(header):
            count = f"{len(values)} value{'s' * (len(values) != 1)}"
            raise row_error(
                file,
                number,
                f"the row has {count}, and the header has {len(header)} columns; "
                "put a value that contains a comma in quotes.",
            )
        rows += 1
        yield number, dict(zip(header, values, strict=True))
    if header is None:
        raise InputError(f"{printable(file)} is empty; its first line must name the columns: path and label.")
    if not rows:
        raise InputError(f"{printable(file)} has no rows after its header; add a row for each image.")


def _column_names(file: Path, number: int, values: list[str]) -> list[str]:
    """The column names of a header, stripped and in lower case."""
    names = [value.strip().lower() for value in values]
    duplicates = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if duplicates:
        raise row_error(
            file,
            number,
            f"the header names the column {printable(duplicates[0])!r} twice; rename one of them.",
        )
    if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
        raise row_error(
            file, number, f"the header is {printable(values[0])!r}; separate the columns with commas."
        )
    return names


def _records(file: Path, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """The values of each record that is not blank, with its first line; quoted values may span lines."""
    reader = csv.reader(lines, strict=True)
    while True:
        start = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _csv_error(file, start, reader.line_num, str(error)) from error
        if len(values) > 1 or (values and values[0].strip()):
            yield start, values


def _csv_error(file: Path, start: int, line: int, reason: str) -> InputError:
    """Python's reason in words that help, with the line number, which Python does not give."""
    if "end of data" in reason:
        return row_error(file, start, "a quote is opened here and never closed.")
    if "field limit" in reason:
        most = csv.field_size_limit()
        return row_error(
            file, start, f"a value has more than {most:,} characters; perhaps a quote is never closed."
        )
    if "expected after" in reason:
        where = f" The quoted value begins in line {start:,}." if start != line else ""
        return row_error(
            file, line, f"text follows a closing quote; write a quote inside a value as two.{where}"
        )
    return row_error(file, line, f"this is not CSV: {printable(reason)}.")


# ---- JSONL ----------------------------------------------------------------------------------


def _json_rows(
    file: Path, lines: Iterator[str], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[int, Row]]:
    """The objects of a JSONL file, one in each line that is not blank."""
    rows = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip("\r\n"), object_pairs_hook=_unique_keys)
        except json.JSONDecodeError as error:
            where = f"column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
            raise row_error(
                file, number, f"this is not JSON ({where}); every line must be one object."
            ) from error
        except RecursionError as error:
            raise row_error(file, number, "its brackets are nested too deeply.") from error
        except ValueError as error:  # a duplicate key, or a number with thousands of digits
            raise row_error(file, number, f"{printable(error)}.") from error
        if not isinstance(row, dict):
            raise row_error(
                file,
                number,
                'the line is not an object; write it as {"path": "cat/1.jpg", "label": "cat"}.',
            )
        if not rows:
            _check_columns(file, number, row, columns)
        rows += 1
        yield number, row
    if not rows:
        raise InputError(f"{printable(file)} has no rows; add a line for each image.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    """An object without duplicate keys, of which JSON would silently use the last."""
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {printable(duplicate)!r} appears twice")
    return row
