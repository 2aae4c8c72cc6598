"""Names for classes that are numbered: of array files, and of folders such as 1, 2, ... 102.

A text file has one name per line, in the order of the class numbers. A JSON file has a list of names, or
names by class, {"1": "pink primrose", ...}, or classes by name as torchvision's class_to_idx.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.base.errors import InputError, VitrailError, printable
from vitrail.base.safe_files import parse_json, read_limited
from vitrail.images.classes import listed
from vitrail.images.formats.sources import MAX_CLASSES, Dataset

FILES = ("classes.json", "classes.txt")  # looked for in a folder of data, and beside a data file
_MAX_BYTES = 20_000_000

ClassNames = str | Path | Sequence[str] | Mapping[str, Any]
"""A file of names, the names in the order of the class numbers, or names by class."""


def rename_classes(data: Dataset, given: ClassNames) -> Dataset:
    """The data set with names for its classes; labels do not change."""
    where, content = "classes", given
    if isinstance(given, (str, os.PathLike)):
        where, content = printable(given), read_names(Path(given))
    names = _match_names(data, content, where)
    first = f"{printable(data.classes[0], 40)} is {printable(names[0], 40)}"
    return replace(data, classes=names, notes=[*data.notes, f"Class names are from {where}: {first}."])


def add_found_names(data: Dataset, source: Path) -> Dataset:
    """The names in classes.json or classes.txt, if the classes are only numbered; else a note."""
    folder = source if source.is_dir() else source.parent
    files = [folder / name for name in FILES if (folder / name).is_file()]
    if not files or not are_numbers(data.classes):
        return data
    try:
        return rename_classes(data, files[0])
    except VitrailError as error:
        return replace(data, notes=[*data.notes, f"{files[0].name} is not used: {error}"])


def read_names(path: Path) -> Any:
    """What a file of names holds: a list, or an object of JSON."""
    try:
        raw = read_limited(path, _MAX_BYTES, "a list of class names")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        reason = printable(error.strerror or error)
        raise InputError(f"{printable(path)} cannot be read: {reason}; check the path of classes.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{printable(path)} must be a text file in UTF-8 with one name per line.") from error
    if path.suffix.lower() == ".json":
        return parse_json(text, printable(path))
    return [line.strip() for line in text.rstrip().splitlines()]


def _match_names(data: Dataset, content: Any, where: str) -> list[str]:
    """The name of each class of the data, in its order."""
    if isinstance(content, Mapping):
        names = _by_class(data, content, where)
    elif isinstance(content, (list, tuple)):
        names = _by_number(data, list(content), where)
    else:
        raise InputError(f"{where} must hold a list of names, or an object with a name for each class.")
    wrong = [name for name in names if not isinstance(name, str) or not name.strip()]
    if wrong:
        raise InputError(f"{where} has an entry that is not a name: {printable(repr(wrong[0]), 60)}.")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(f"{where} gives two classes the same name: {listed(repeated)}; names must differ.")
    return names


def _by_class(data: Dataset, content: Mapping[str, Any], where: str) -> list[Any]:
    """From {"1": "pink primrose"} or {"pink primrose": 1}; it may name more classes than the data has."""
    if content and all(type(number) is int for number in content.values()):
        content = {str(number): name for name, number in content.items()}
    canonical = {_canonical(str(key)): name for key, name in content.items()}
    missing = [one for one in data.classes if _canonical(one) not in canonical]
    if missing:
        raise InputError(
            f"{where} has no name for {listed(missing)}: it names {len(content):,} classes, and the data has "
            f"{len(data.classes):,}."
        )
    return [canonical[_canonical(one)] for one in data.classes]


def _by_number(data: Dataset, names: list[Any], where: str) -> list[Any]:
    """From a list in the order of the class numbers, which count from 0 or from 1."""
    classes = data.classes
    if sorted(map(str, names)) == sorted(classes):
        return list(classes)  # they have these names already
    if len(names) != len(classes):
        raise InputError(
            f"{where} has {len(names):,} names, but the data has {len(classes):,} classes; give one name for "
            'each, or a JSON object such as {"3": "cat"}.'
        )
    if not are_numbers(classes):
        raise InputError(
            f"{where} is a list, and the classes of the data are not numbered: {listed(classes)}. Give a "
            f'JSON object with their names: {{"{printable(classes[0], 40)}": "new name", ...}}.'
        )
    numbers = [int(one) for one in classes]
    if sorted(numbers) not in (list(range(len(names))), list(range(1, len(names) + 1))):
        raise InputError(
            f"{where} is a list, and the classes of the data are not numbered from 0 or 1 without gaps "
            f'({min(numbers)} to {max(numbers)}). Give a JSON object such as {{"{classes[0]}": "name"}}.'
        )
    return [names[number - min(numbers)] for number in numbers]


def are_numbers(classes: Sequence[str]) -> bool:
    """Whether classes are only numbered, as in 0, 1, 2 or 001, 002, 003."""
    decimal = all(one.isascii() and one.isdecimal() and len(one) < 10 for one in classes)
    return decimal and len({int(one) for one in classes}) == len(classes) <= MAX_CLASSES


def _canonical(name: str) -> str:
    """Folders are often numbered 001, 002, ...."""
    return str(int(name)) if name.isascii() and name.isdecimal() and len(name) < 10 else name
