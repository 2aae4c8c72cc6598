"""What is odd about the classes of a data set: no images, or names that are almost the same."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.data.sources import Dataset, Split

MOST_EMPTY = 0.5  # the fraction of classes without a training image above which a run is refused
NAMED = 5


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """The first names, fit to be shown, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(printable(name, 40) for name in names[:most]) + more


def class_counts(split: Split, classes: int) -> NDArray[np.int64]:
    """(K,) how many images of a split show each class."""
    if split.labels.ndim == 2:
        return split.labels.sum(axis=0)
    return np.bincount(split.labels, minlength=classes)


def without_images(data: Dataset) -> dict[str, list[str]]:
    """The classes that have no image, of each split that has images at all, and of train."""
    splits = {"train": data.train, "val": data.val, "test": data.test}
    found: dict[str, list[str]] = {}
    trained = class_counts(data.train, len(data.classes)) > 0
    for name, split in splits.items():
        if split is not None and (len(split) or name == "train"):
            empty = class_counts(split, len(data.classes)) == 0
            if name != "train":
                empty &= trained  # of the others it is said that they have no training image
            if empty.any():
                found[name] = [data.classes[number] for number in np.flatnonzero(empty)]
    return found


def alike(classes: Sequence[str]) -> list[list[str]]:
    """Groups of names that are the same but for case, blanks, Unicode form, or _ - and space in them."""
    groups = defaultdict(list)
    for name in classes:
        groups[plain(name)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def plain(name: str) -> str:
    text = unicodedata.normalize("NFKC", name)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf").strip()  # Cf: those without a width
    if re.fullmatch(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?", text):
        return repr(float(text))  # 1, 01 and 1.0
    if len(text) == 1:
        return text  # handwritten letters: a and A are two classes
    return re.sub(r"(?<=\w)[\s_-]+(?=\w)", " ", text).casefold()


def quoted(names: Sequence[str]) -> str:
    """Names in quotes; where they would look the same, their letters by number."""
    same = len({unicodedata.normalize("NFKC", name) for name in names}) < len(names)
    shown = [printable(ascii(name) if same else repr(name), 40) for name in names[:NAMED]]
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return " = ".join(shown) + more


def class_notes(data: Dataset) -> list[str]:
    """A sentence on each odd thing, for whoever is about to train or evaluate."""
    notes = []
    for split, names in without_images(data).items():
        have = f"{len(names):,} of {len(data.classes):,} classes have" if len(names) > 1 else "One class has"
        kind = "training image" if split == "train" else f"image in {split}"
        hint = f" {remedy(data)}" if split == "train" else ""
        notes.append(f"{have} no {kind}: {listed(names)}.{hint}")
    groups = alike(data.classes)
    if groups:
        more = f", and {len(groups) - 3:,} more groups" if len(groups) > 3 else ""
        shown = "; ".join(quoted(names) for names in groups[:3])
        notes.append(f"These are separate classes, and perhaps should not be: {shown}{more}.")
    return notes


def remedy(data: Dataset) -> str:
    if data.train.images is None:
        return "Add images of these classes, or remove the classes."
    if data.several:
        return "Remove the columns of labels that are 0 throughout."
    return "Number the classes without gaps: labels = numpy.unique(labels, return_inverse=True)[1]."


def check_gaps(data: Dataset) -> None:
    """Refuse to train where most classes have no training image: their labels are not class numbers."""
    empty = without_images(data).get("train", [])
    if len(data.train) and len(empty) > MOST_EMPTY * len(data.classes):
        lost = set(empty)
        used = [name for name in data.classes if name not in lost]
        raise InputError(
            f"{len(empty):,} of the {len(data.classes):,} classes of {printable(data.name)} have no training "
            f"image; those that have: {listed(used) or 'none'}. {remedy(data)}"
        )
