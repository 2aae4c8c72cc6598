"""A table of pictures: CSV or JSONL with a path and a label in every row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.folders import SPLITS
from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError, printable

PATHS = ("path", "image", "file", "filename", "filepath")
LABELS = ("label", "labels", "class", "target")


def read_table(file: Path) -> Dataset:
    """Paths are relative to the table. Several labels of one picture are a list in JSONL, and joined
    by | in CSV; a column `split` says train, val or test."""
    rows = list(read_rows(file))
    if not rows:
        raise InputError("A table must have rows.", f"{printable(file)} with none", "Check the file.")
    where, what = column(rows[0], PATHS, file), column(rows[0], LABELS, file)
    labels = [as_labels(row.get(what), file, number) for number, row in enumerate(rows, 1)]
    several = any(isinstance(row.get(what), list) or "|" in str(row.get(what)) for row in rows)
    classes = sorted({label for some in labels for label in some}, key=by_number)
    index = {label: number for number, label in enumerate(classes)}
    if several:
        numbers = np.zeros((len(rows), len(classes)), dtype=np.int64)
        for row, some in enumerate(labels):
            numbers[row, [index[label] for label in some]] = 1
    else:
        numbers = np.array([index[some[0]] for some in labels], dtype=np.int64)
    paths = [file.parent / text(row.get(where), where, file, n) for n, row in enumerate(rows, 1)]
    whole = Split(numbers, [text(row[where], where, file, 0) for row in rows], paths)
    splits = [str(row.get("split") or "train").strip().lower() for row in rows]
    unknown = [word for word in dict.fromkeys(splits) if word not in SPLITS]
    if unknown:
        raise InputError(
            "A split is train, val or test.", f"{unknown[0]!r} in {printable(file)}", "Rename it."
        )
    parts = {
        name: whole.take(
            np.array([i for i, word in enumerate(splits) if SPLITS[word] == name], dtype=np.int64)
        )
        for name in dict.fromkeys(SPLITS[word] for word in splits)
    }
    if "train" not in parts:
        raise InputError(
            "A table must have rows to train on.", printable(file), "Set split to train in some."
        )
    return Dataset(file.stem, classes, parts["train"], parts.get("val"), parts.get("test"))


def read_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            if file.suffix.lower() == ".csv":
                yield from csv.DictReader(lines, strict=True)
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} is no object")
                    yield row
    except (csv.Error, ValueError, RecursionError) as error:
        raise InputError(
            "A table must be CSV or JSONL in UTF-8.", f"{printable(file)}: {error}", "Repair it."
        ) from error


def column(row: Mapping[str, Any], names: tuple[str, ...], file: Path) -> str:
    for name in names:
        if name in row:
            return name
    raise InputError(
        f"A table must have a column {' or '.join(names[:2])}.",
        f"{printable(file)} with {printable(', '.join(map(str, row)))}",
        "Name it in the first line.",
    )


def as_labels(value: Any, file: Path, number: int) -> list[str]:
    found = value if isinstance(value, list) else str("" if value is None else value).split("|")
    found = [str(one).strip() for one in found]
    if not all(found):
        raise InputError(
            "Every row must have a label.",
            f"{printable(file)}, row {number} without",
            "Fill it in, or take it out.",
        )
    return found


def text(value: Any, name: str, file: Path, number: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"Every row must have a {name}.", f"{printable(file)}, row {number} without", "Fill it in."
        )
    return value.strip()


def by_number(label: str) -> tuple[int, int, str]:
    """Labels that are numbers in the order of numbers, before words."""
    return (0, int(label), "") if label.isdecimal() and len(label) < 20 else (1, 0, label)
