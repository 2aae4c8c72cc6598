"""A table of images: a CSV or JSONL file with a path and a label in every row."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import open_regular
from vitrail.images.classes import MAX_CLASSES
from vitrail.images.formats.folders import SPLITS
from vitrail.images.formats.lazy import RelativePaths
from vitrail.images.formats.sources import (
    Dataset,
    RowProgress,
    Split,
    build_dataset,
    too_many_classes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # the byte order marks; those of UTF-32 start like these
_PATH_COLUMNS = ("path", "image", "file", "filename", "filepath")
LABEL_COLUMNS = ("label", "labels", "class", "target")
_MAX_FRACTIONS = 20  # different labels that are decimal fractions; more are measurements
_REPORT = 10_000  # rows between two reports of progress
_MAX_LABELS = 2**31  # rows x classes of a multi-label table: 16 GiB

Row = dict[str, Any]


class _BadValue(ValueError):
    """A value that cannot be used; the caller adds the line number."""


class _Labels:
    """The labels of a table: classes are numbered as they appear, and texts that repeat are parsed once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.rows: list[tuple[int, ...]] = []
        self.multilabel = False
        self._parsed: dict[str, tuple[int, ...]] = {}

    def add(self, value: Any, column: str) -> None:
        """Add the labels of a row."""
        known = self._parsed.get(value) if isinstance(value, str) else None
        if known is None:
            labels = _parse_labels(value, column)
            known = tuple(self.numbers.setdefault(label, len(self.numbers)) for label in labels)
            self.multilabel |= isinstance(value, list) or "|" in str(value)
            if isinstance(value, str):
                self._parsed[value] = known
        self.rows.append(known)


def read_table(file: Path, progress: RowProgress) -> Dataset:
    """A data set in a table. Paths are relative to the table. Several labels of an image are a list in JSONL,
    and joined by | in CSV. The column `split` is train, val or test."""
    notes: list[str] = []
    names: list[str] = []
    labels = _Labels()
    splits: list[str] = []
    columns: list[str] = []
    for line, row in read_rows(file, (_PATH_COLUMNS, LABEL_COLUMNS)):
        if not columns:
            columns = [_find_column(row, group, notes) for group in (_PATH_COLUMNS, LABEL_COLUMNS)]
        try:
            names.append(_parse_path(row.get(columns[0]), columns[0]))
            labels.add(row.get(columns[1]), columns[1])
            splits.append(_parse_split(row.get("split")))
        except _BadValue as error:
            raise row_error(file, line, f"{error}.") from error
        if len(names) % _REPORT == 0:
            progress(len(names))
    classes, numbers = _encode_labels(file, labels)
    without_split = splits.count("")
    if 0 < without_split < len(splits):
        notes.append(f"{without_split:,} rows of {printable(file.name)} have no split: they go to train.")
    images = Split(numbers, names, RelativePaths(file.parent, names))
    of_row = np.array([split or "train" for split in splits])
    parts = {name: images.take(np.flatnonzero(of_row == name)) for name in ("train", "val", "test")}
    return build_dataset(file.stem, classes, {name: part for name, part in parts.items() if len(part)}, notes)


def _find_column(row: Row, names: tuple[str, ...], notes: list[str]) -> str:
    """The first of these columns that the table has; a note if it has several of them."""
    present = [name for name in names if name in row]
    if len(present) > 1:
        notes.append(f"The column {present[0]} is used, and not {present[1]}.")
    return present[0]


def _encode_labels(file: Path, labels: _Labels) -> tuple[list[str], NDArray[np.int64]]:
    """The sorted classes, and the labels as class numbers (N,), or as rows (N, K) of 0 and 1."""
    classes = sorted(labels.numbers, key=numeric_order)
    _check_not_regression(file, classes, len(labels.rows))
    if len(classes) > MAX_CLASSES:
        raise too_many_classes(len(classes), printable(file))
    sorted_number = np.zeros(len(classes), dtype=np.int64)  # of each class, by its number of appearance
    sorted_number[[labels.numbers[label] for label in classes]] = np.arange(len(classes))
    if not labels.multilabel:
        return classes, sorted_number[np.array([row[0] for row in labels.rows], dtype=np.int64)]
    if len(labels.rows) * len(classes) > _MAX_LABELS:
        raise InputError(
            f"{printable(file)} has {len(labels.rows):,} rows and {len(classes):,} classes, too many for a "
            "multi-label table; check its labels."
        )
    numbers = np.zeros((len(labels.rows), len(classes)), dtype=np.int64)
    for i, row in enumerate(labels.rows):
        numbers[i, sorted_number[list(row)]] = 1
    return classes, numbers


def _check_not_regression(file: Path, classes: list[str], rows: int) -> None:
    """Refuse labels that are measurements: decimal fractions, too many of them to be names of classes.

    Integers are class numbers however many they are, and so are 1.0 and 2.0; a few fractions, such as
    versions or grades, are names.
    """
    if len(classes) <= _MAX_FRACTIONS and 2 * len(classes) <= rows:
        return
    try:
        values = [float(label) for label in classes]
    except ValueError:
        return
    fractions = [
        label for label, value in zip(classes, values, strict=True) if math.isfinite(value) and value % 1
    ]
    if 2 * len(fractions) > len(classes):
        shown = ", ".join(printable(label, 20) for label in fractions[:3])
        raise InputError(
            f"{printable(file)} has {len(classes):,} different numbers as labels ({shown}, ...): that is "
            "regression, and Vitrail trains classifiers. Replace them by a few classes, such as low, medium "
            "and high."
        )


# ---- values ---------------------------------------------------------------------------------


def _parse_path(value: Any, name: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _BadValue(f"the {name} is missing; fill it in, or remove the row")
    if not isinstance(value, str):
        raise _BadValue(f"the {name} must be a string, not {_json_type(value)}")
    return _check_text(value.strip(), name)


def _parse_labels(value: Any, name: str) -> list[str]:
    """The classes of a row: a string or an integer, or a list of these (multi-label)."""
    if isinstance(value, str):
        value = value.split("|") if "|" in value else [value]
    labels = []
    for one in value if isinstance(value, list) else [value]:
        if one is None or (isinstance(one, str) and not one.strip()):
            raise _BadValue(f"a {name} is missing or empty; fill it in, or remove the row")
        if isinstance(one, bool) or not isinstance(one, str | int):
            hint = "; Vitrail trains classifiers, not regression" if isinstance(one, float) else ""
            raise _BadValue(
                f"a {name} must be a string or an integer, or a list of these for a multi-label "
                f"image, not {_json_type(one)}{hint}"
            )
        labels.append(_check_text(str(one).strip(), name))
    return labels


def _parse_split(value: Any) -> str:
    """train, val or test, or "" where there is none."""
    word = "" if value is None else value.strip().lower() if isinstance(value, str) else None
    if word is None or (word and word not in SPLITS):
        shown = repr(printable(value)) if isinstance(value, str) else _json_type(value)
        raise _BadValue(f"the split is {shown}; it must be train, val or test")
    return SPLITS[word] if word else ""


def _check_text(text: str, name: str) -> str:
    """Refuse text that JSON can hold, but a file name or a weight file cannot."""
    if "\0" in text:
        raise _BadValue(f"the {name} contains a NUL character")
    if not text.isascii() and find_surrogate(text) is not None:
        raise _BadValue(f"the {name} contains a lone surrogate, which is not a character")
    return text


def _json_type(value: Any) -> str:
    """The type of a JSON value, for messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "NaN or infinity" if not math.isfinite(value) else f"the number {value:g}"
    if isinstance(value, int):
        return "a number"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "null"


def numeric_order(label: str) -> tuple[int, int, str]:
    """A sort key: numeric labels in numeric order, then the others."""
    return (0, int(label), label) if label.isdecimal() and len(label) < 20 else (1, 0, label)


# ---- rows -----------------------------------------------------------------------------------


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
                file, number, 'the line is not an object; write it as {"path": "cat/1.jpg", "label": "cat"}.'
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
