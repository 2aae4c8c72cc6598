"""The classes of a data set: checks, and names for classes that are only numbered.

Array files and folders such as 1, 2, ... 102 have numbers for names. A text file has one name per line, in
the order of the class numbers. A JSON file has a list of names, or names by class, {"1": "pink primrose"}, or
classes by name as torchvision's class_to_idx.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, VitrailError, printable
from vitrail.base.safe_files import parse_json, read_limited
from vitrail.images.formats.lazy import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.formats.sources import Dataset, Split

MAX_CLASSES = 100_000
FILES = ("classes.json", "classes.txt")  # of names, looked for in a folder of data, and beside a data file
_MAX_BYTES = 20_000_000  # of such a file
_MAX_EMPTY = 0.5  # the fraction of classes without training images above which a run is refused
_SHOWN = 5


def listed(names: Sequence[str], most: int = _SHOWN) -> str:
    """The first names, printable, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(printable(name, 40) for name in names[:most]) + more


def class_counts(split: Split, classes: int) -> NDArray[np.int64]:
    """(K,) the number of images of each class in a split."""
    if split.labels.ndim == 2:
        return split.labels.sum(axis=0)
    if len(split) <= BLOCK:
        return np.bincount(split.labels, minlength=classes)
    blocks = (split.labels[first : first + BLOCK] for first in range(0, len(split), BLOCK))
    return np.sum([np.bincount(block, minlength=classes) for block in blocks], axis=0)


def without_images(data: Dataset) -> dict[str, list[str]]:
    """The classes without images, by split; of the training set, and of each other split that has images."""
    splits = {"train": data.train, "val": data.val, "test": data.test}
    missing: dict[str, list[str]] = {}
    trained = class_counts(data.train, len(data.classes)) > 0
    for name, split in splits.items():
        if split is not None and (len(split) or name == "train"):
            filled = trained if name == "train" else class_counts(split, len(data.classes)) > 0
            empty = ~filled & (trained | (name == "train"))  # the others are reported for train
            if empty.any():
                missing[name] = [data.classes[number] for number in np.flatnonzero(empty)]
    return missing


def similar_names(classes: Sequence[str]) -> list[list[str]]:
    """Groups of names that differ only in case, whitespace, Unicode form, or in _ - and space."""
    groups = defaultdict(list)
    for name in classes:
        groups[_canonical_name(name)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def _canonical_name(name: str) -> str:
    """The same text for names that a person would take for the same."""
    text = unicodedata.normalize("NFKC", name)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf").strip()  # Cf: zero width
    if re.fullmatch(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?", text):
        return repr(float(text))  # 1, 01 and 1.0
    if len(text) == 1:
        return text  # handwritten letters: a and A are two classes
    return re.sub(r"(?<=\w)[\s_-]+(?=\w)", " ", text).casefold()


def quoted(names: Sequence[str]) -> str:
    """Names in quotes; escaped where they would look the same."""
    same = len({unicodedata.normalize("NFKC", name) for name in names}) < len(names)
    shown = [printable(ascii(name) if same else repr(name), 40) for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return " = ".join(shown) + more


def class_notes(data: Dataset) -> list[str]:
    """A note on each oddity of the classes, shown before training or evaluation."""
    notes = []
    for split, names in without_images(data).items():
        have = f"{len(names):,} of {len(data.classes):,} classes have" if len(names) > 1 else "One class has"
        kind = "training image" if split == "train" else f"image in {split}"
        hint = f" {_remedy(data)}" if split == "train" else ""
        notes.append(f"{have} no {kind}: {listed(names)}.{hint}")
    groups = similar_names(data.classes)
    if groups:
        more = f", and {len(groups) - 3:,} more groups" if len(groups) > 3 else ""
        shown = "; ".join(quoted(names) for names in groups[:3])
        notes.append(
            f"These are separate classes with similar names: {shown}{more}. Merge them if they are the same."
        )
    return notes


def _remedy(data: Dataset) -> str:
    if data.train.images is None:
        return "Add images of these classes, or remove the classes."
    if data.multilabel:
        return "Remove the label columns that are always 0."
    return "Number the classes without gaps: labels = numpy.unique(labels, return_inverse=True)[1]."


def check_empty_classes(data: Dataset) -> None:
    """Refuse to train if most classes have no training image: such labels are rarely class numbers."""
    empty = without_images(data).get("train", [])
    if len(data.train) and len(empty) > _MAX_EMPTY * len(data.classes):
        without = set(empty)
        used = [name for name in data.classes if name not in without]
        raise InputError(
            f"{len(empty):,} of the {len(data.classes):,} classes of {printable(data.name)} have no training "
            f"image; classes with images: {listed(used) or 'none'}. {_remedy(data)}"
        )


def relabel(split: Split, numbers: Sequence[int], count: int) -> Split:
    """A split with other class numbers; two classes with the same new number become one.

    Args:
        numbers: the new number of each class; -1 for a class without images in this split.
        count: the number of new classes.
    """
    new = np.array(numbers, dtype=np.int64)
    if split.labels.ndim == 1:
        return replace(split, labels=new[split.labels])
    labels = np.zeros((len(split), count), dtype=np.int64)
    for old, number in enumerate(new.tolist()):
        if number >= 0:
            labels[:, number] |= split.labels[:, old]
    return replace(split, labels=labels)


# ---- names for numbered classes -------------------------------------------------------------

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
