"""A table of images: a CSV or JSONL file with a path and a label in every row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.images.formats.folders import SPLITS
from vitrail.images.formats.lazy import RelativePaths
from vitrail.images.formats.sources import (
    MAX_CLASSES,
    Dataset,
    RowProgress,
    Split,
    build_dataset,
    too_many_classes,
)
from vitrail.images.formats.text_rows import Row, find_surrogate, read_rows, row_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PATH_COLUMNS = ("path", "image", "file", "filename", "filepath")
LABEL_COLUMNS = ("label", "labels", "class", "target")
_MAX_FRACTIONS = 20  # different labels that are decimal fractions; more are measurements
_REPORT = 10_000  # rows between two reports of progress
_MAX_LABELS = 2**31  # rows x classes of a multi-label table: 16 GiB


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


def read_table(file: Path, *, need_train: bool = True, progress: RowProgress = lambda rows: None) -> Dataset:
    """A data set in a table. Paths are relative to the table. Several labels of an image are a list in JSONL,
    and joined by | in CSV. The column `split` is train, val or test.

    Args:
        need_train: refuse a table without training rows.
        progress: called with the number of rows read so far.
    """
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
    if need_train and not len(parts["train"]):
        raise InputError(f"{printable(file)} has no training rows; set split to train in some of its rows.")
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
