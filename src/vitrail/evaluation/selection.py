"""What is evaluated: which images of the data, which classes, and their ImageNet-ReaL labels.

All labeled images, unless the data has splits: then test, or val if there is no test. Classes are matched to
the model's by name. The data may lack some of them; the model can still predict these, which is a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.safe_files import parse_json, read_limited
from vitrail.images.classes import ClassNames, class_counts, relabel, rename_classes
from vitrail.images.formats.sources import Dataset, Split, concatenate, open_labeled
from vitrail.images.holdout import hold_out_validation
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.labels import map_classes, match_labels
from vitrail.weights.families.match import join_names

SPLITS = ("train", "val", "test", "all")
_MAX_BYTES = 10_000_000  # of a file of ReaL labels
_IMAGENET_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")  # the number of a validation image
Progress = Callable[[str, int, int | None], None]
"""Called with a split, the number of images done, and the number of images in it; or, while a table is read,
with "reading rows", the number of rows, and None."""


@dataclass(frozen=True)
class Selection:
    """Images to evaluate a model on."""

    data: str
    split: str
    images: Split
    train: Split
    """The training images, for probes."""
    classes: list[str]
    """The classes of the labels."""
    columns: list[int] | None
    """The model's output for each class; None for a model without a head."""
    notes: list[str]
    source: str | None
    """The path of the data set and the split, for the cache of content keys."""


def select_images(
    bundle: Bundle,
    data: Any,
    split: str | None = None,
    mapping: Mapping[str, str] | None = None,
    probes: Sequence[str] = (),
    names: ClassNames | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Selection:
    """Open the data, choose a split, and match its classes to the model's.

    Args:
        data: an open Dataset, or what `open_dataset` takes.
        split: train, val, test or all. Of data without splits, training's held-out images are val.
        mapping: from names of the data's classes to names of the model's.
        probes: the probes that will be fitted on the training images.
        names: for numbered classes of the data.
        progress: called while the rows of a table, or files to hold out, are read.
    """
    if split is not None and split not in SPLITS:
        raise InputError(f"Unknown split {split!r}. {suggest(split, SPLITS)}")
    opened = data
    if not isinstance(data, Dataset):
        opened = open_labeled(data, lambda rows: progress("reading rows", rows, None))
        if not (opened.val or opened.test) and (split in ("train", "val") or probes):  # as in training
            opened = hold_out_validation(opened, progress=partial(progress, "reading files"))
    opened = opened if names is None else rename_classes(opened, names)
    choices = [*opened.splits, "all"]
    name = split or next(name for name in ("test", "val", "all") if name in choices)
    if name not in choices:
        raise InputError(f"{printable(opened.name)} has no split {name!r}. {suggest(name, choices)}")
    images = concatenate(list(opened.splits.values())) if name == "all" else opened.splits[name]
    _check_model(bundle, opened, images, probes)
    notes, train = list(opened.notes), opened.train
    source = opened.source_of(name)
    if not bundle.model.config.classes:
        if mapping:
            raise InputError("map renames classes for a model's head, and this model has none; leave it out.")
        return Selection(opened.name, name, images, train, list(opened.classes), None, notes, source)
    needed = [images, train] if probes else [images]
    classes, numbers, columns = _match_classes(bundle, opened.classes, needed, mapping or {}, notes)
    images = relabel(images, numbers, len(classes))
    train = relabel(train, numbers, len(classes)) if probes else train
    return Selection(opened.name, name, images, train, classes, columns, notes, source)


def _match_classes(
    bundle: Bundle,
    classes: Sequence[str],
    splits: Sequence[Split],
    mapping: Mapping[str, str],
    notes: list[str],
) -> tuple[list[str], list[int], list[int]]:
    """The classes to evaluate, the number among them of each class of the data, and the model's outputs."""
    labels, outputs = bundle.labels, bundle.model.config.classes
    names = map_classes(classes, mapping, labels, outputs)
    if not mapping and len(names) == outputs:
        with suppress(InputError):
            return list(classes), list(range(outputs)), match_labels(labels, outputs, names, notes)
    used = np.sum([class_counts(split, len(classes)) for split in splits], axis=0) > 0
    present = list(dict.fromkeys(name for name, is_used in zip(names, used.tolist(), strict=True) if is_used))
    found = dict(zip(present, match_labels(labels, outputs, present, notes, subset=True), strict=True))
    every = [str(number) for number in range(outputs)] if labels is None else list(labels)
    missing = [name for number, name in enumerate(every) if number not in set(found.values())]
    if missing:
        notes.append(
            f"The data has images of {outputs - len(missing):,} of the model's {outputs:,} classes, and none "
            f"of: {join_names(missing)}."
        )
    return every, [found.get(name, -1) for name in names], list(range(outputs))


def _check_model(bundle: Bundle, data: Dataset, images: Split, probes: Sequence[str]) -> None:
    config = bundle.model.config
    if bundle.preprocess is None:
        raise InputError(f"Only models for images can be evaluated; this one takes {config.input}.")
    channels = None if images.images is None else images.images.shape[3]
    if channels not in (None, config.channels):
        raise InputError(
            f"The images of {printable(data.name)} have {channels} channels and the model takes "
            f"{config.channels}; load the model with channels={channels}."
        )
    if not config.classes and not probes:
        raise InputError("A model without a head can only be probed; request the probe knn or linear.")
    if data.multilabel and probes:
        raise InputError(
            f"Probes need exactly one class per image, and {printable(data.name)} is multi-label; evaluate "
            "it without probes."
        )
    if probes and not data.train:
        raise InputError(
            f"Probes are fitted on training images, and {printable(data.name)} has none; add them as train."
        )


# ---- ImageNet-ReaL ------


def read_real_labels(
    real: str | Path | Sequence[Sequence[int]], names: Sequence[str], classes: int, notes: list[str]
) -> list[list[int]]:
    """Every class that annotators saw in each image (Beyer et al. 2020, "Are we done with ImageNet?").

    Rows are matched to images by the number in a file's name, otherwise by order.
    """
    rows: Any = real
    if isinstance(real, (str, Path)):
        rows = parse_json(read_limited(real, _MAX_BYTES, "a file of ReaL labels"), str(real))
    if not isinstance(rows, Sequence) or not all(_are_classes(row, classes) for row in rows):
        raise InputError(
            f"ReaL labels must be a list of class indices below {classes:,} for each image; use the "
            "published real.json, with a model for the classes of ImageNet."
        )
    matches = [_IMAGENET_NAME.search(name) for name in names]
    indices = [int(match[1]) - 1 for match in matches if match]
    if len(indices) == len(names) and 0 <= min(indices) <= max(indices) < len(rows):
        return [list(rows[index]) for index in indices]
    if len(rows) != len(names):
        raise InputError(
            f"The {len(rows):,} rows of ReaL labels cannot be matched to {len(names):,} images without "
            "ImageNet's file names; use ImageNet's validation set."
        )
    notes.append("ReaL labels were matched to the images by order.")
    return [list(row) for row in rows]


def _are_classes(row: Any, classes: int) -> bool:
    return isinstance(row, Sequence) and all(type(label) is int and 0 <= label < classes for label in row)
