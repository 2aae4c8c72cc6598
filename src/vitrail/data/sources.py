"""From a path to labelled images: what kind of data lies there, and how it falls into splits.

| what lies there                                   | how it is read                              |
|---------------------------------------------------|---------------------------------------------|
| a folder with a folder for each class             | folders.py; some are held out for val       |
| a folder with train/ and val/ or test/ of those   | folders.py, as they are                     |
| a .csv or .jsonl with columns path and label      | tables.py; a column `split` is kept         |
| a .npz with x_train, y_train or train_images, ... | arrays.py                                   |
| a folder with IDX files (MNIST and its kin)       | arrays.py                                   |
| the word `digits`                                 | arrays.py: scikit-learn's 1,797 small digits |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.data.classes import check_gaps, class_notes
from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_CLASSES = 100_000


@dataclass(frozen=True, eq=False)
class Split:
    """Some pictures, and what each shows."""

    labels: NDArray[np.int64]
    """(N,) the number of the class; or (N, K) of 0 and 1 where a picture can show several."""
    names: Sequence[str]
    """What each is called in messages and reports."""
    paths: Sequence[Path] | None = None
    """Where each is, if they are files."""
    images: NDArray[np.uint8] | None = None
    """(N, H, W, C), if they are in memory."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: NDArray[np.int64]) -> Split:
        """These of them, in this order."""
        return Split(
            self.labels[which],
            [self.names[i] for i in which],
            None if self.paths is None else [self.paths[i] for i in which],
            None if self.images is None else self.images[which],
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled pictures in splits."""

    name: str
    classes: list[str]
    train: Split
    val: Split | None = None
    test: Split | None = None
    notes: list[str] = field(default_factory=list)
    """What was decided on the way, a sentence each."""
    skipped: Mapping[str, list[str]] = field(default_factory=dict)
    """Names of what lies in a folder of images and is not read, by kind (folders.py)."""

    @property
    def several(self) -> bool:
        """Whether a picture can show several classes."""
        return self.train.labels.ndim == 2

    @property
    def channels(self) -> int | None:
        """Of arrays; files are read with as many as the model has."""
        return None if self.train.images is None else self.train.images.shape[3]

    @property
    def held_out(self) -> Split:
        """What a run is judged by: val, or test where there is no val."""
        found = self.val or self.test
        assert found is not None, "open_data gives every data set one"
        return found


def open_data(path: str | Path, *, val_share: float = 0.2, seed: int = 0) -> Dataset:
    """Labelled pictures at a path, with some held out to judge by.

    Args:
        val_share: how much of train is held out where the data has neither val nor test.
        seed: decides which.
    """
    found = read_data(path)
    check(found, printable(path))
    found = replace(found, notes=[*found.notes, *skip_notes(found), *class_notes(found)])
    return found if found.val or found.test else hold_out(found, val_share, seed)


def read_data(path: str | Path) -> Dataset:
    """Labelled images at a path as they are, before anything is checked or held out."""
    from vitrail.data import arrays, folders, tables

    place = Path(path)
    if str(path) == "digits" and not place.exists():
        found = arrays.read_digits()
    elif place.is_dir():
        found = arrays.read_idx(place) if arrays.has_idx(place) else folders.read_folder(place)
    elif place.suffix.lower() in (".csv", ".jsonl") and place.is_file():
        found = tables.read_table(place)
    elif place.suffix.lower() == ".npz" and place.is_file():
        found = arrays.read_npz(place)
    else:
        what = "cannot be read as data" if place.exists() else "does not exist"
        raise InputError(
            f"{printable(path)} {what}; DATA must be a folder of images with a folder for each class, "
            "a .csv, .jsonl or .npz file, or the word digits."
        )
    if len(found.classes) > MOST_CLASSES:
        raise too_many(len(found.classes), printable(path))
    return found


def check(data: Dataset, name: str) -> None:
    """At least two classes, at least one image."""
    if len(data.classes) < 2 and not data.several:
        raise InputError(
            f"{name} has {len(data.classes)} class; training needs at least two classes with images of each."
        )
    if not len(data.train):
        raise InputError(f"{name} holds no images to train on; check the path, and vitrail doctor {name}.")


def skip_notes(data: Dataset) -> list[str]:
    """What is not read and its owner may miss; what is harmless is the doctor's affair."""
    from vitrail.data.folders import FAULTS

    found = [f"{len(data.skipped[kind]):,} {what}" for kind, what in FAULTS.items() if kind in data.skipped]
    return [f"Not read: {', '.join(found)}; vitrail doctor names them."] if found else []


def too_many(count: int, name: str) -> InputError:
    return InputError(
        f"{name} has {count:,} classes, and at most {MOST_CLASSES:,} are possible; check the labels."
    )


def hold_out(data: Dataset, share: float, seed: int) -> Dataset:
    """Hold out a share of train as val: of every class alike, and the same ones for the same seed."""
    from vitrail.data.chance import shuffle

    if not 0 < share < 1:
        raise InputError(f"val_share must lie between 0 and 1, such as 0.2, and is {share}.")
    order = shuffle([seed, 0], len(data.train)).numpy()
    labels = data.train.labels[order]
    rank = np.zeros(len(order), dtype=np.int64)  # how many of the same kind come before
    kinds = labels if labels.ndim == 1 else np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(kinds)
    by_kind = np.argsort(kinds, kind="stable")
    rank[by_kind] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    wanted = np.where(sizes > 1, np.maximum(1, np.round(sizes * share)), 0)  # a single one is to learn from
    out = rank < wanted[kinds]
    if not out.any() or out.all():
        check_gaps(data)  # which says more, where labels are not numbers of classes
        raise InputError(
            f"{printable(data.name)} has too few images to hold some out for validation: "
            f"{len(data.train):,} in {len(data.classes):,} classes. Use at least two of a class."
        )
    val, train = np.sort(order[out]), np.sort(order[~out])
    note = f"{len(val):,} of {len(order):,} images are held out for validation (seed {seed})."
    return replace(data, train=data.train.take(train), val=data.train.take(val), notes=[*data.notes, note])
