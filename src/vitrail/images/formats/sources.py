"""From a path to a data set: labeled images in splits.

| DATA                                              | how it is read                              |
|---------------------------------------------------|---------------------------------------------|
| a folder with a folder for each class             | folders.py; holdout.py holds out a part     |
| a folder with train/ and val/ or test/ of these   | folders.py, with these splits               |
| a .csv or .jsonl with columns path and label      | tables.py; the splits of a column `split`   |
| a .npz with x_train, y_train or train_images, ... | arrays.py                                   |
| a folder with IDX files (the format of MNIST)     | arrays.py                                   |
| a packed file (`vitrail pack`)                    | packed.py                                   |
| a .tar, a folder of these, photos-{000..127}.tar  | shards.py: WebDataset's layout              |
| a .parquet or a folder of these                   | parquet.py: Hugging Face datasets' layout   |
| the word `digits`                                 | arrays.py: the digits of scikit-learn       |
| a torch Dataset of (image, label)                 | torch_dataset.py                            |

Numbered classes get the names of a classes.json or classes.txt in the folder (classes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.images.classes import MAX_CLASSES, add_found_names, class_notes
from vitrail.images.content import Progress
from vitrail.images.formats.lazy import Indices, LazySequence, RelativePaths, take_items, take_values
from vitrail.images.holdout import VAL_FRACTION, hold_out_validation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.formats.stored_images import StoredImage

_ARCHIVES = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
RowProgress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Split:
    """Labeled images: files or an array. Names and paths of very large data are read when they are needed."""

    labels: NDArray[np.int64]
    """(N,) class numbers, of a smaller type if there are very many; or (N, K) of 0 and 1 for multi-label
    images."""
    names: Sequence[str]
    """The name of each image in messages and reports."""
    paths: Sequence[Path | StoredImage] | None = None
    """The path of each image, if they are files, or its place in a packed file or a shard."""
    images: NDArray[np.uint8] | None = None
    """(N, H, W, C), if they are in an array."""
    keys: NDArray[np.uint64] | LazySequence[np.uint64] | None = None
    """(N,) the content key of each image (content.py), if they are known; lazy if there are very many."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices) -> Split:
        """The images at these indices, in this order."""
        names = take_items(self.names, indices)
        paths: Sequence[Path | StoredImage] | None = None
        if isinstance(self.paths, RelativePaths):
            paths = RelativePaths(self.paths.folder, names)
        elif self.paths is not None:
            paths = take_items(self.paths, indices)
        return Split(
            take_values(self.labels, indices),
            names,
            paths,
            None if self.images is None else take_values(self.images, indices),
            None if self.keys is None else take_values(self.keys, indices),
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
    source: str | None = None
    """The path it was read from."""
    held_out: bool = False
    """Whether val was chosen from train (holdout.py); the data has no splits of its own then."""

    @property
    def multilabel(self) -> bool:
        """Whether an image can have several labels."""
        return self.train.labels.ndim == 2

    @property
    def channels(self) -> int | None:
        """The channels of arrays; None for files, which are read with those of the model."""
        return None if self.train.images is None else self.train.images.shape[3]

    def source_of(self, split: str) -> str | None:
        """The name of a split for the cache of content keys; None if the data was not read from a path."""
        return None if self.source is None else f"{self.source}:{split}"

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that have images, by name."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {name: split for name, split in splits.items() if split}

    @property
    def eval_split(self) -> Split:
        """The split that a run is evaluated on: val, or test if there is no val."""
        split = self.val or self.test
        assert split is not None, "open_dataset gives every data set one"
        return split


def build_dataset(
    name: str,
    classes: list[str],
    splits: Mapping[str, Split],
    notes: Sequence[str] = (),
    skipped: Mapping[str, list[str]] | None = None,
) -> Dataset:
    """A data set of train, val and test; without train, the training set is empty."""
    train = splits.get("train", next(iter(splits.values())).take(np.zeros(0, dtype=np.int64)))
    return Dataset(name, classes, train, splits.get("val"), splits.get("test"), list(notes), skipped or {})


def concatenate(splits: Sequence[Split]) -> Split:
    """The images of all splits, one after the other."""
    if len(splits) == 1:
        return splits[0]
    arrays = [split.images for split in splits if split.images is not None]
    if len({array.shape[1:] for array in arrays}) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise InputError(
            f"The images of all splits must have one shape to be used together, not {shapes}; use one split."
        )
    keys = [np.asarray(split.keys) for split in splits if split.keys is not None]
    return Split(
        np.concatenate([split.labels for split in splits]),
        [name for split in splits for name in split.names],
        None if arrays else [path for split in splits for path in split.paths or ()],
        np.concatenate(arrays) if arrays else None,
        np.concatenate(keys) if len(keys) == len(splits) else None,
    )


def open_dataset(
    path: Any,
    *,
    val_fraction: float = VAL_FRACTION,
    split_seed: int = 0,
    progress: Progress = lambda done, total: None,
    on_rows: RowProgress = lambda rows: None,
) -> Dataset:
    """Open a data set; if it has neither val nor test, hold out a part of train as val (holdout.py).

    Args:
        path: see the table above.
        val_fraction: the fraction of train that is held out.
        split_seed: another number than 0 holds out other images.
        progress: called as progress(files read, files in total) while shards without an index are read, and
            while the held-out images are chosen.
        on_rows: as in `read_data`.
    """
    data = read_data(path, progress=progress, on_rows=on_rows)
    check_dataset(data, printable(path))
    data = replace(data, notes=[*data.notes, *_skip_notes(data), *class_notes(data)])
    if data.val or data.test:
        return data
    return hold_out_validation(data, val_fraction, split_seed, progress)


def open_labeled(
    path: Any, on_rows: RowProgress = lambda rows: None, *, need_readable: bool = True
) -> Dataset:
    """Open a data set to evaluate a model on: any labeled images, in the splits that the data has, if any.

    Unlike training, this needs no training set, and neither two classes nor images of each.

    Args:
        on_rows, need_readable: as in `read_data`.
    """
    data = read_data(path, need_train=False, need_readable=need_readable, on_rows=on_rows)
    if not data.splits:
        raise InputError(f"{printable(path)} has no images; check the path, or run vitrail doctor on it.")
    return replace(data, notes=[*data.notes, *_skip_notes(data)])


def read_data(
    path: Any,
    *,
    need_train: bool = True,
    need_readable: bool = True,
    progress: Progress = lambda done, total: None,
    on_rows: RowProgress = lambda rows: None,
) -> Dataset:
    """The data set at a path, or of a torch Dataset, before checks and without a hold-out split.

    Args:
        need_train: refuse classes in a folder of val or test that train does not have.
        need_readable: refuse folders that cannot be read; otherwise they are among what is skipped.
        progress: called while shards without an index are read.
        on_rows: called with the number of rows of a table that were read so far.
    """
    from vitrail.images.formats import arrays, folders, packed, parquet, shards, tables, torch_dataset

    if not isinstance(path, (str, Path)):
        return torch_dataset.read_torch_dataset(path)
    file = Path(path)
    if str(path) == "digits" and not file.exists():
        data = arrays.read_digits()
    elif shards.is_shards(path):
        data = shards.read_shards(path, progress)
    elif parquet.list_parquet(file):
        data = parquet.read_parquet(file)
    elif file.is_dir():
        idx = arrays.idx_files(file)
        data = arrays.read_idx(file, idx) if idx else folders.read_folder(file, own_classes=not need_train)
        if need_readable:
            folders.check_readable(path, data.skipped)
    elif file.suffix.lower() in (".csv", ".jsonl") and file.is_file():
        data = tables.read_table(file, on_rows)
    elif packed.is_packed(file):
        data = packed.read_packed(file)
    elif file.suffix.lower() == ".npz" and file.is_file():
        data = arrays.read_npz(file)
    else:
        if file.suffix.lower() in _ARCHIVES and file.exists():
            raise InputError(f"{printable(path)} is an archive; unpack it, and give the folder instead.")
        problem = "cannot be read as data" if file.exists() else "does not exist"
        raise InputError(
            f"{printable(path)} {problem}; data must be a folder of images with a folder for each class, "
            "a .csv, .jsonl, .npz, .parquet or packed file, tar shards, or the word digits."
        )
    if len(data.classes) > MAX_CLASSES:
        raise too_many_classes(len(data.classes), printable(path))
    data = add_found_names(data, file) if file.exists() or shards.is_shards(path) else data
    return replace(data, source=str(path))


def check_dataset(data: Dataset, name: str) -> None:
    """Refuse a data set without training images or without two classes."""
    if data.splits and not len(data.train):
        others = " and ".join(data.splits)
        raise InputError(
            f"{name} has images of {others} but none of train; add some, or run vitrail doctor {name}."
        )
    if len(data.classes) < 2 and not data.multilabel:
        raise InputError(
            f"{name} has {len(data.classes)} class; training needs at least two classes with images of each."
        )
    if not len(data.train):
        raise InputError(f"{name} has no training images; check it, or run vitrail doctor {name}.")


def _skip_notes(data: Dataset) -> list[str]:
    """A note on skipped files that the user may miss; `vitrail doctor` lists the harmless ones too."""
    from vitrail.images.formats.folders import FAULTS

    counts = [f"{len(data.skipped[kind]):,} {what}" for kind, what in FAULTS.items() if kind in data.skipped]
    return [f"Not read: {', '.join(counts)}; vitrail doctor lists them."] if counts else []


def too_many_classes(count: int, name: str) -> InputError:
    return InputError(f"{name} has {count:,} classes, and the limit is {MAX_CLASSES:,}; check the labels.")
