"""The rows of a CSV or JSONL file, each with the line of the file in which it begins."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.decode import open_regular
from vitrail.errors import InputError, printable

UTF16 = (b"\xff\xfe", b"\xfe\xff")  # the byte order marks; those of UTF-32 begin or end like them

Row = dict[str, Any]


def read_rows(file: Path, columns: Sequence[Sequence[str]]) -> Iterator[tuple[int, Row]]:
    """Every row as (line number, values by column).

    Args:
        columns: what a table must have: of each of these, one.
    """
    lines = text_lines(file)
    if file.suffix.lower() == ".csv":
        return csv_rows(file, lines, columns)
    return json_rows(file, lines, columns)


def fault(file: Path, line: int, what: str) -> InputError:
    return InputError(f"{printable(file)}, line {line:,}: {what}")


def check_columns(file: Path, line: int, names: Collection[str], columns: Sequence[Sequence[str]]) -> None:
    for either in columns:
        if not set(either) & set(names):
            there = printable(", ".join(names))
            raise fault(file, line, f"there is no column {' or '.join(either[:2])}, but: {there or 'none'}.")


def text_lines(file: Path) -> Iterator[str]:
    """The lines of a text file in UTF-8, with or without a byte order mark; they end in LF, CR or both."""
    with open_regular(file) as raw:
        if raw.read(2) in UTF16:
            raise InputError(f"{printable(file)} is encoded in UTF-16; save it as UTF-8.")
        raw.seek(0)
        # Bytes that are no UTF-8 become lone surrogates, so that the line in which they are is known.
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        for number, line in enumerate(text, 1):
            if "\0" in line:
                raise fault(
                    file, number, "it holds a NUL byte, which no text does; save the table as UTF-8 again."
                )
            if not line.isascii() and (place := not_unicode(line)) is not None:
                byte = ord(line[place]) - 0xDC00
                raise fault(
                    file,
                    number,
                    f"the byte 0x{byte:02x} after {place} characters is not UTF-8; save the table as UTF-8.",
                )
            yield line


def not_unicode(text: str) -> int | None:
    """The place of the first lone surrogate, which no encoding can write; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


# ---- CSV ------------------------------------------------------------------------------------


def csv_rows(file: Path, lines: Iterator[str], columns: Sequence[Sequence[str]]) -> Iterator[tuple[int, Row]]:
    """Rows by the names in the header; every row has as many values as the header."""
    header: list[str] | None = None
    rows = 0
    for number, values in records(file, lines):
        if header is None:
            header = column_names(file, number, values)
            check_columns(file, number, header, columns)
            continue
        if len(values) != len(header):
            count = f"{len(values)} value{'s' * (len(values) != 1)}"
            raise fault(
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


def column_names(file: Path, number: int, values: list[str]) -> list[str]:
    """The header; blanks around a name do not count, and nor does its case."""
    names = [value.strip().lower() for value in values]
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise fault(
            file, number, f"the header names the column {printable(twice[0])!r} twice; rename one of them."
        )
    if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
        raise fault(
            file, number, f"the header is {printable(values[0])!r}; separate the columns with commas."
        )
    return names


def records(file: Path, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Values of every record that is not blank, with the line in which it begins: quotes may hold lines."""
    reader = csv.reader(lines, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise csv_fault(file, begin, reader.line_num, str(error)) from error
        if len(values) > 1 or (values and values[0].strip()):
            yield begin, values


def csv_fault(file: Path, begin: int, line: int, reason: str) -> InputError:
    """Python's reason in words that help; it names no line."""
    if "end of data" in reason:
        return fault(file, begin, "a quote is opened here and never closed.")
    if "field limit" in reason:
        most = csv.field_size_limit()
        return fault(
            file, begin, f"a value has more than {most:,} characters; perhaps a quote is never closed."
        )
    if "expected after" in reason:
        where = f" The quoted value begins in line {begin:,}." if begin != line else ""
        return fault(file, line, f"text follows a closing quote; write a quote inside a value as two.{where}")
    return fault(file, line, f"this is not CSV: {printable(reason)}.")


# ---- JSONL ----------------------------------------------------------------------------------


def json_rows(
    file: Path, lines: Iterator[str], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[int, Row]]:
    """The object in every line that is not blank."""
    rows = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip("\r\n"), object_pairs_hook=unrepeated)
        except json.JSONDecodeError as error:
            where = f"column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
            raise fault(
                file, number, f"this is not JSON ({where}); every line must be one object."
            ) from error
        except RecursionError as error:
            raise fault(file, number, "its brackets are nested too deeply.") from error
        except ValueError as error:  # a key twice, or a number of thousands of digits
            raise fault(file, number, f"{printable(error)}.") from error
        if not isinstance(row, dict):
            raise fault(
                file,
                number,
                'the line is not an object; write it as {"path": "cat/1.jpg", "label": "cat"}.',
            )
        if not rows:
            check_columns(file, number, row, columns)
        rows += 1
        yield number, row
    if not rows:
        raise InputError(f"{printable(file)} has no rows; add a line for each image.")


def unrepeated(pairs: list[tuple[str, Any]]) -> Row:
    """An object; JSON lets a key come twice, and the first value would be lost without a word."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {printable(twice)!r} comes twice")
    return found
