"""A table of images: CSV or JSONL with a path and a label in every row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.folders import SPLITS
from vitrail.data.rows import Row, fault, not_unicode, read_rows
from vitrail.data.sources import MOST_CLASSES, Dataset, Split, too_many
from vitrail.errors import InputError, printable

PATHS = ("path", "image", "file", "filename", "filepath")
LABELS = ("label", "labels", "class", "target")
MOST_MARKS = 2**31  # rows x classes of a multi-label table: 16 GiB


class BadValue(ValueError):
    """A value that will not do; whoever reads the row knows the line."""


def read_table(file: Path) -> Dataset:
    """Paths are relative to the table. Several labels of one image are a list in JSONL, and joined
    by | in CSV; a column `split` says train, val or test."""
    rows = list(read_rows(file, (PATHS, LABELS)))
    notes: list[str] = []
    where, what = (column(rows[0][1], names, notes) for names in (PATHS, LABELS))
    names: list[str] = []
    labels: list[list[str]] = []
    splits: list[str] = []
    for line, row in rows:
        try:
            names.append(as_path(row.get(where), where))
            labels.append(as_labels(row.get(what), what))
            splits.append(as_split(row.get("split")))
        except BadValue as error:
            raise fault(file, line, f"{error}.") from error
    several = any(isinstance(row.get(what), list) or "|" in str(row.get(what)) for _, row in rows)
    classes, numbers = number_labels(file, labels, several)
    unsaid = splits.count("")
    if 0 < unsaid < len(splits):
        notes.append(f"{unsaid:,} rows of {printable(file.name)} name no split: they are training images.")
    whole = Split(numbers, names, [file.parent / name for name in names])
    parts = {name: whole.take(rows_of(splits, name)) for name in ("train", "val", "test")}
    if not len(parts["train"]):
        raise InputError(
            f"{printable(file)} has no rows to train on; set split to train in some of its rows."
        )
    val, test = (parts[name] if len(parts[name]) else None for name in ("val", "test"))
    return Dataset(file.stem, classes, parts["train"], val, test, notes)


def column(row: Row, names: tuple[str, ...], notes: list[str]) -> str:
    """The first of these names that the table has; a note where it has several of them."""
    found = [name for name in names if name in row]
    if len(found) > 1:
        notes.append(f"The column {found[0]} is used, and not {found[1]}.")
    return found[0]


def rows_of(splits: list[str], name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rows of a split; those that name none are train's."""
    found = [i for i, word in enumerate(splits) if SPLITS[word or "train"] == name]
    return np.array(found, dtype=np.int64)


def number_labels(
    file: Path, labels: list[list[str]], several: bool
) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int64]]]:
    """The classes in order, and the labels as their numbers: (N,), or (N, K) of 0 and 1."""
    classes = sorted({label for some in labels for label in some}, key=by_number)
    if len(classes) > MOST_CLASSES:
        raise too_many(len(classes), printable(file))
    index = {label: number for number, label in enumerate(classes)}
    if not several:
        return classes, np.array([index[some[0]] for some in labels], dtype=np.int64)
    if len(labels) * len(classes) > MOST_MARKS:
        raise InputError(
            f"{printable(file)} has {len(labels):,} rows and {len(classes):,} classes, too many for a "
            "multi-label table; check its labels."
        )
    numbers = np.zeros((len(labels), len(classes)), dtype=np.int64)
    for row, some in enumerate(labels):
        numbers[row, [index[label] for label in some]] = 1
    return classes, numbers


# ---- values ---------------------------------------------------------------------------------


def as_path(value: Any, name: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadValue(f"there is no {name}; fill it in, or remove the row")
    if not isinstance(value, str):
        raise BadValue(f"the {name} must be a string, and not {described(value)}")
    return writable(value.strip(), name)


def as_labels(value: Any, name: str) -> list[str]:
    """The classes of a row: a string or a whole number, or a list of these (multi-label)."""
    if isinstance(value, str):
        value = value.split("|") if "|" in value else [value]
    found = []
    for one in value if isinstance(value, list) else [value]:
        if one is None or (isinstance(one, str) and not one.strip()):
            raise BadValue(f"there is no {name}, or an empty one; fill it in, or remove the row")
        if isinstance(one, bool) or not isinstance(one, str | int):
            raise BadValue(
                f"a {name} must be a string or a whole number, or a list of these for a multi-label "
                f"image, and not {described(one)}"
            )
        found.append(writable(str(one).strip(), name))
    return found


def as_split(value: Any) -> str:
    """A word of SPLITS, or nothing."""
    word = "" if value is None else value.strip().lower() if isinstance(value, str) else None
    if word is None or (word and word not in SPLITS):
        shown = repr(printable(value)) if isinstance(value, str) else described(value)
        raise BadValue(f"the split is {shown}; it must be train, val or test")
    return word


def writable(text: str, name: str) -> str:
    """Text that a file's name and a weight file can hold; JSON can say what neither can."""
    if "\0" in text:
        raise BadValue(f"the {name} holds a NUL character")
    if not text.isascii() and not_unicode(text) is not None:
        raise BadValue(f"the {name} holds half of a surrogate pair, which is no character")
    return text


def described(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "NaN or infinity" if not math.isfinite(value) else f"the number {value:g}"
    if isinstance(value, int):
        return "a number"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "null"


def by_number(label: str) -> tuple[int, int, str]:
    """Labels that are numbers in the order of numbers, before words."""
    return (0, int(label), label) if label.isdecimal() and len(label) < 20 else (1, 0, label)
