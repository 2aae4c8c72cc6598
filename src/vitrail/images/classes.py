"""Checks of the classes of a data set: classes without images, and names that are almost the same."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.images.formats.lazy import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.formats.sources import Dataset, Split

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
