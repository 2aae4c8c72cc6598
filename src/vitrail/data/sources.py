"""From a path to a data set: labeled images in splits.

| DATA                                              | how it is read                              |
|---------------------------------------------------|---------------------------------------------|
| a folder with a folder for each class             | folders.py; a part is held out as val       |
| a folder with train/ and val/ or test/ of these   | folders.py, with these splits               |
| a .csv or .jsonl with columns path and label      | tables.py; the splits of a column `split`   |
| a .npz with x_train, y_train or train_images, ... | arrays.py                                   |
| a folder with IDX files (the format of MNIST)     | arrays.py                                   |
| the word `digits`                                 | arrays.py: the digits of scikit-learn       |
| a torch Dataset of (image, label)                 | torch_dataset.py                            |

Numbered classes get the names of a classes.json or classes.txt in the folder (class_names.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.classes import check_empty_classes, class_notes
from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.packed import PackedImage

MAX_CLASSES = 100_000


@dataclass(frozen=True, eq=False)
class Split:
    """Labeled images: files or an array."""

    labels: NDArray[np.int64]
    """(N,) class numbers; or (N, K) of 0 and 1 for multi-label images."""
    names: Sequence[str]
    """The name of each image in messages and reports."""
    paths: Sequence[Path | PackedImage] | None = None
    """The path of each image, if they are files or in a packed file."""
    images: NDArray[np.uint8] | None = None
    """(N, H, W, C), if they are in an array."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> Split:
        """The images at these indices, in this order."""
        return Split(
            self.labels[indices],
            [self.names[i] for i in indices],
            None if self.paths is None else [self.paths[i] for i in indices],
            None if self.images is None else self.images[indices],
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled images in splits."""

    name: str
    classes: list[str]
    train: Split
    val: Split | None = None
    test: Split | None = None
    notes: list[str] = field(default_factory=list)
    """Notes for the user on automatic choices and oddities, a sentence each."""
    skipped: Mapping[str, list[str]] = field(default_factory=dict)
    """The names of files and folders that are not read, by kind (folders.py)."""

    @property
    def multilabel(self) -> bool:
        """Whether an image can have several labels."""
        return self.train.labels.ndim == 2

    @property
    def channels(self) -> int | None:
        """The channels of arrays; None for files, which are read with those of the model."""
        return None if self.train.images is None else self.train.images.shape[3]

    @property
    def eval_split(self) -> Split:
        """The split that a run is evaluated on: val, or test if there is no val."""
        split = self.val or self.test
        assert split is not None, "open_dataset gives every data set one"
        return split


def open_dataset(path: Any, *, val_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Open a data set; if it has neither val nor test, hold out a part of train as val.

    Args:
        path: see the table above.
        val_fraction: the fraction of train that is held out.
        seed: of the random choice of these images.
    """
    data = read_data(path)
    check_dataset(data, printable(path))
    data = replace(data, notes=[*data.notes, *_skip_notes(data), *class_notes(data)])
    return data if data.val or data.test else hold_out_validation(data, val_fraction, seed)


def read_data(path: Any) -> Dataset:
    """The data set at a path, or of a torch Dataset, before checks and without a hold-out split."""
    from vitrail.data import arrays, class_names, folders, tables, torch_dataset

    if not isinstance(path, (str, Path)):
        return torch_dataset.read_torch_dataset(path)
    file = Path(path)
    if str(path) == "digits" and not file.exists():
        data = arrays.read_digits()
    elif file.is_dir():
        data = arrays.read_idx(file) if arrays.has_idx(file) else folders.read_folder(file)
    elif file.suffix.lower() in (".csv", ".jsonl") and file.is_file():
        data = tables.read_table(file)
    elif file.suffix.lower() == ".npz" and file.is_file():
        data = arrays.read_npz(file)
    else:
        problem = "cannot be read as data" if file.exists() else "does not exist"
        raise InputError(
            f"{printable(path)} {problem}; DATA must be a folder of images with a folder for each class, "
            "a .csv, .jsonl or .npz file, or the word digits."
        )
    if len(data.classes) > MAX_CLASSES:
        raise too_many_classes(len(data.classes), printable(path))
    return class_names.add_found_names(data, file) if file.exists() else data


def check_dataset(data: Dataset, name: str) -> None:
    """Refuse a data set without two classes or without training images."""
    if len(data.classes) < 2 and not data.multilabel:
        raise InputError(
            f"{name} has {len(data.classes)} class; training needs at least two classes with images of each."
        )
    if not len(data.train):
        raise InputError(f"{name} has no training images; check the path, or run vitrail doctor {name}.")


def _skip_notes(data: Dataset) -> list[str]:
    """A note on skipped files that the user may miss; `vitrail doctor` lists the harmless ones too."""
    from vitrail.data.folders import FAULTS

    counts = [f"{len(data.skipped[kind]):,} {what}" for kind, what in FAULTS.items() if kind in data.skipped]
    return [f"Not read: {', '.join(counts)}; vitrail doctor lists them."] if counts else []


def too_many_classes(count: int, name: str) -> InputError:
    return InputError(f"{name} has {count:,} classes, and the limit is {MAX_CLASSES:,}; check the labels.")


def hold_out_validation(data: Dataset, fraction: float, seed: int) -> Dataset:
    """Hold out a fraction of train as val: of every class alike, and reproducibly for a seed."""
    from vitrail.data.rng import random_permutation

    if not 0 < fraction < 1:
        raise InputError(f"val_fraction must be between 0 and 1, such as 0.2, not {fraction}.")
    order = random_permutation([seed, 0], len(data.train)).numpy()
    labels = data.train.labels[order]
    rank = np.zeros(len(order), dtype=np.int64)  # of an image among those with the same labels
    kinds = labels if labels.ndim == 1 else np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(kinds)
    by_kind = np.argsort(kinds, kind="stable")
    rank[by_kind] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    counts = np.where(sizes > 1, np.maximum(1, np.round(sizes * fraction)), 0)  # a single one stays in train
    out = rank < counts[kinds]
    if not out.any() or out.all():
        check_empty_classes(data)  # whose message is more specific if labels are not class numbers
        raise InputError(
            f"{printable(data.name)} has too few images for a validation set: "
            f"{len(data.train):,} in {len(data.classes):,} classes. Some class must have at least two."
        )
    val, train = np.sort(order[out]), np.sort(order[~out])
    note = f"{len(val):,} of {len(order):,} images are held out for validation (seed {seed})."
    return replace(data, train=data.train.take(train), val=data.train.take(val), notes=[*data.notes, note])
