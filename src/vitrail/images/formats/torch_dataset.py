"""A torch Dataset as data: its images are read once, as uint8 pixels; augmentation is the recipe's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.base.fields import short_repr
from vitrail.base.machine import memory_limit
from vitrail.images.formats.arrays import build_split, numbered_classes
from vitrail.images.formats.sources import Dataset, Split

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SPLITS = ("train", "val", "test")


def read_torch_dataset(given: Any) -> Dataset:
    """A data set of (image, label) pairs, or a mapping of them: {"train": ..., "val": ...}.

    An image is a PIL image, a uint8 array (H, W) or (H, W, C), or a tensor (C, H, W) of uint8 or of floats
    from 0 to 1. torchvision's ImageFolder is read by its files, so that images may differ in size. A pair of
    arrays or tensors, (images, labels), is read like a Dataset of their rows; labels may be names.
    """
    parts = dict(given) if isinstance(given, Mapping) else {"train": given}
    parts = {name: Arrays(*part) if _are_arrays(part) else part for name, part in parts.items()}
    _number_labels([part for part in parts.values() if isinstance(part, Arrays)])
    unknown = [name for name in parts if name not in _SPLITS]
    if unknown or "train" not in parts:
        raise InputError(
            'several Datasets must be given as {"train": ..., "val": ..., "test": ...} with at least train, '
            f"not with the keys {printable(', '.join(map(str, parts)))}."
        )
    splits = {name: _read_split(part, name) for name, part in parts.items()}
    kinds = {split.paths is None for split in splits.values()}
    if len(kinds) > 1:
        raise InputError("train, val and test must all be ImageFolders, or none of them.")
    train = parts["train"]
    data = numbered_classes(type(train).__name__, splits, [])
    names = _class_names(train)
    if names is not None and len(names) >= len(data.classes):
        data = replace(data, classes=names)
    if getattr(train, "transform", None) is not None and splits["train"].paths is not None:
        note = "The transform of the Dataset is not used; preprocessing and augmentation are the recipe's."
        data = replace(data, notes=[*data.notes, note])
    return data


class Arrays:
    """A pair of arrays or tensors, of images and of labels, as a Dataset."""

    def __init__(self, images: Any, labels: Any) -> None:
        if len(images) != len(labels):
            raise InputError(
                f"(images, labels) must have one label for each image, not {len(images):,} images and "
                f"{len(labels):,} labels."
            )
        self.images, self.labels = images, labels
        self.classes: list[str] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.labels[index]


def _number_labels(parts: Sequence[Arrays]) -> None:
    """Labels that are names become numbers, in the order of the alphabet and the same in all parts."""
    labels = [np.asarray(part.labels) for part in parts]
    texts = [one.dtype.kind in "UO" and all(isinstance(text, str) for text in one.flat) for one in labels]
    if not parts or not all(texts):
        return
    classes = sorted({str(name) for one in labels for name in one})
    numbers = {name: number for number, name in enumerate(classes)}
    for part, one in zip(parts, labels, strict=True):
        part.labels, part.classes = np.array([numbers[str(name)] for name in one]), classes


def _are_arrays(given: Any) -> bool:
    """Whether it is (images, labels), and not a list of two samples."""
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    return pair and getattr(given[0], "ndim", 0) >= 3 and getattr(given[1], "ndim", 0) in (1, 2)


def _class_names(dataset: Any) -> list[str] | None:
    """The `classes` of a Dataset, also through torch.utils.data.Subset."""
    for _ in range(10):
        names = getattr(dataset, "classes", None)
        if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
            return list(names)
        dataset = getattr(dataset, "dataset", None)
    return None


def _read_split(dataset: Any, split: str) -> Split:
    _check_kind(dataset)
    samples = getattr(dataset, "samples", None)
    if isinstance(samples, list) and samples and all(map(_is_sample, samples)):
        paths = [Path(path) for path, _ in samples]
        labels = np.array([label for _, label in samples], dtype=np.int64)
        return Split(labels, [str(path) for path in paths], paths)
    return _read_items(dataset, split)


def _is_sample(one: Any) -> bool:
    pair = isinstance(one, tuple) and len(one) == 2
    return pair and isinstance(one[0], (str, Path)) and type(one[1]) is int


def _check_kind(dataset: Any) -> None:
    """Refuse what is not a map-style Dataset, with what to do instead."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(dataset, DataLoader):
        raise InputError(
            "a DataLoader gives batches that are shuffled and transformed already; pass its Dataset: "
            "vt.train(loader.dataset, ...)."
        )
    has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_items:
        raise InputError(
            f"{type(dataset).__name__} has no length and no items by index, which the order and the exact "
            "resume of a run need; use a map-style Dataset of (image, label), or write the images into a "
            "folder for each class and pass that folder."
        )
    if not len(dataset):
        raise InputError("the Dataset has no images.")


def _read_items(dataset: Any, split: str) -> Split:
    """All images in memory, as one array."""
    where = f"{type(dataset).__name__} ({split})"
    count = len(dataset)
    images: list[NDArray[np.uint8]] = []
    labels: list[NDArray[Any]] = []
    for index in range(count):
        item = dataset[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InputError(f"item {index} of {where} must be (image, label), not {short_repr(item)}.")
        pixels = _to_pixels(item[0], f"image {index} of {where}")
        if images and pixels.shape != images[0].shape:
            first, now = images[0].shape, pixels.shape
            raise InputError(
                f"the images of {where} differ in size: {first} and {now} (H, W, C); resize them in the "
                "Dataset, or pass the folder or a .csv of the image files instead, which are resized."
            )
        limit, needed = memory_limit(), pixels.nbytes * count
        if not images and limit is not None and needed > limit // 2:
            raise InputError(
                f"the images of {where} take {needed / 2**30:.1f} GiB in memory; write them into a folder "
                "for each class and pass that folder, which is read image by image."
            )
        images.append(pixels)
        labels.append(np.asarray(item[1]))
    if len({label.shape for label in labels}) > 1:
        raise InputError(f"the labels of {where} differ in shape; give a class number for each image.")
    return build_split(np.stack(images), np.stack(labels), where, split)


def _to_pixels(image: Any, where: str) -> NDArray[np.uint8]:
    """One image as uint8 (H, W, C)."""
    from PIL import Image

    from vitrail.images.pixels import array_to_uint8

    if isinstance(image, Image.Image):
        image = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    return np.ascontiguousarray(array_to_uint8(image, where))
