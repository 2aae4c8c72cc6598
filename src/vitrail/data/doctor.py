"""A check of a data set for `vitrail doctor`: every image is decoded completely, and no file is changed."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from vitrail.data.classes import check_empty_classes, class_counts, quoted, similar_names, without_images
from vitrail.data.content import content_keys
from vitrail.data.folders import FAULTS
from vitrail.data.holdout import hold_out_validation
from vitrail.data.sources import Dataset, Split, check_dataset, read_data
from vitrail.errors import InputError, printable
from vitrail.images.convert import to_uint8
from vitrail.images.decode import decode_image, open_image
from vitrail.images.stored import StoredImage
from vitrail.images.workers import Task, Workers, choose_workers
from vitrail.io.read import open_regular
from vitrail.weights.fingerprint import Fingerprint

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

_FEW = 10  # images of a class, below which it is hard to train and to evaluate
_SMALL = 32  # pixels along a side
_CHUNK = 32  # images that a worker checks at a time
_AHEAD = 8  # chunks that are checked ahead, for each thread


@dataclass
class DatasetReport:
    """The findings by kind. Names are those of the data set, printable."""

    images: dict[str, int] = field(default_factory=dict)
    """The number of images in each split."""
    classes: int = 0
    problems: list[str] = field(default_factory=list)
    """The reasons why training would refuse the data, a sentence each."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """The reason for each image that cannot be read, by name."""
    duplicates: list[list[str]] = field(default_factory=list)
    """Groups of images with the same pixels in one split."""
    leaked: list[list[str]] = field(default_factory=list)
    """Groups of images with the same pixels in different splits: training images leak into the evaluation."""
    conflicting_labels: list[list[str]] = field(default_factory=list)
    """Groups of images with the same pixels and different labels."""
    empty_classes: dict[str, list[str]] = field(default_factory=dict)
    """Classes without images, by split."""
    similar_classes: list[str] = field(default_factory=list)
    """Groups of classes whose names differ only in case, whitespace, separators or Unicode form."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Files and folders that are not read, by kind: see `vitrail.data.folders`."""
    small_classes: dict[str, int] = field(default_factory=dict)
    """Classes with few training images, and how many."""
    modes: dict[str, int] = field(default_factory=dict)
    """The number of images in each Pillow mode."""
    small_images: list[str] = field(default_factory=list)
    """Images with a side of fewer than 32 pixels."""
    notes: list[str] = field(default_factory=list)
    """The notes of the data set."""
    trained_on: dict[str, int] | None = None
    """The number of images in each split that a model was trained on; None if that is unknown."""

    @property
    def has_faults(self) -> bool:
        """Whether something must be repaired: training would refuse or skip data, or use wrong labels."""
        faults = (self.problems, self.corrupt, self.leaked, self.conflicting_labels, self.similar_classes)
        missing = "train" in self.empty_classes or any(kind in self.skipped for kind in FAULTS)
        return missing or any(map(bool, faults))


@dataclass(frozen=True, slots=True)
class _CheckedImage:
    """The result for one image. Its name is looked up only when it is reported."""

    split: str
    index: int
    digest: bytes = b""
    """The hash of its pixels."""
    mode: str = ""
    side: int = 0
    """The shorter side in pixels."""
    reason: str = ""
    """Why it cannot be read."""


def open_for_check(path: str | Path) -> tuple[Dataset, list[str]]:
    """A data set as training would use it, and the reasons why training would refuse it."""
    data, problems = read_data(path), []
    for verify in (lambda: check_dataset(data, printable(path)), lambda: check_empty_classes(data)):
        try:
            verify()
        except InputError as error:
            problems.append(str(error))
    if not (data.val or data.test) and len(data.train):
        try:
            return hold_out_validation(data), problems
        except InputError as error:
            problems += [str(error)] if str(error) not in problems else []
    return data, problems


def count_trained(data: Dataset, fingerprint: Fingerprint) -> dict[str, int]:
    """The number of images in each split that a model was trained on."""
    return {
        name: int(fingerprint.contains(content_keys(split, data.source_of(name))).sum())
        for name, split in data.splits.items()
    }


def check_images(
    data: Dataset,
    workers: int | Literal["auto"] = "auto",
    progress: Callable[[int], None] = lambda done: None,
) -> DatasetReport:
    """Check every image of a data set. `progress` is called with the number of images checked so far."""
    report = DatasetReport(classes=len(data.classes), notes=list(data.notes))
    by_digest: dict[bytes, list[_CheckedImage]] = defaultdict(list)
    splits = splits_of(data)
    for done, image in enumerate(_check_images(splits, workers), 1):
        report.images[image.split] = report.images.get(image.split, 0) + 1
        if image.reason:
            report.corrupt[_name_of(splits, image)] = image.reason
        else:
            by_digest[image.digest].append(image)
            report.modes[image.mode] = report.modes.get(image.mode, 0) + 1
            if image.side < _SMALL and data.train.paths is not None:
                report.small_images.append(_name_of(splits, image))
        if done % _CHUNK == 0:
            progress(done)
    for images in by_digest.values():
        if len(images) > 1:
            _report_duplicates(report, images, data)
    _report_classes(report, data)
    report.skipped = {kind: [printable(name) for name in names] for kind, names in data.skipped.items()}
    return report


def _report_classes(report: DatasetReport, data: Dataset) -> None:
    for split, names in without_images(data).items() if data.train else ():
        report.empty_classes[split] = [printable(name) for name in names]
    report.similar_classes = [quoted(names) for names in similar_names(data.classes)]
    counts = class_counts(data.train, len(data.classes)).tolist()
    few = {name: count for name, count in zip(data.classes, counts, strict=True) if 0 < count < _FEW}
    report.small_classes = {printable(name): count for name, count in few.items()}


def splits_of(data: Dataset) -> dict[str, Split]:
    """The splits that a data set has, by name."""
    splits = {"train": data.train, "val": data.val, "test": data.test}
    return {name: split for name, split in splits.items() if split is not None}


def _name_of(splits: dict[str, Split], image: _CheckedImage) -> str:
    return printable(splits[image.split].names[image.index])


def _report_duplicates(report: DatasetReport, images: list[_CheckedImage], data: Dataset) -> None:
    """Report images with the same pixels: across splits, with different labels, or as plain duplicates."""
    splits = splits_of(data)
    names = [f"{image.split}: {_name_of(splits, image)}" for image in images]
    labels = [_label_names(data, splits[image.split], image.index) for image in images]
    leaked, disputed = len({image.split for image in images}) > 1, len(set(labels)) > 1
    if leaked:
        report.leaked.append(names)
    if disputed:
        report.conflicting_labels.append(
            [f"{name} ({label})" for name, label in zip(names, labels, strict=True)]
        )
    if not leaked and not disputed:
        report.duplicates.append(names)


def _label_names(data: Dataset, split: Split, index: int) -> str:
    """The names of the classes of an image."""
    label = split.labels[index]
    numbers = np.flatnonzero(label) if data.multilabel else [label]
    return printable(", ".join(data.classes[number] for number in numbers) or "none")


def _check_images(splits: dict[str, Split], workers: int | Literal["auto"]) -> Iterator[_CheckedImage]:
    """Check every image in order, in chunks: a task for each would cost as much as a small image."""
    files = sum(len(split) for split in splits.values() if split.paths is not None)
    running = Workers(choose_workers(workers, files))
    tasks = (
        Task(_check_image, [(name, index, images[index]) for index in range(first, last)])
        for name, split in splits.items()
        if (images := split.images if split.paths is None else split.paths) is not None
        for first in range(0, len(split), _CHUNK)
        for last in (min(first + _CHUNK, len(split)),)
    )
    try:
        for results in running.map(tasks, _AHEAD * max(1, running.plan.count)):
            yield from results.unpack()
    finally:
        running.close()


def _check_image(split: str, index: int, image: Path | StoredImage | NDArray[np.uint8]) -> _CheckedImage:
    """Decode one image completely. Pixels are compared upright and in RGB, whatever the file format."""
    if isinstance(image, np.ndarray):
        return _CheckedImage(split, index, _digest(image), f"{image.shape[2]} channels", min(image.shape[:2]))
    try:
        if isinstance(image, StoredImage):
            opened: Image = open_image(image)
        else:
            with open_regular(image) as file:
                if not file.read(1):
                    return _CheckedImage(split, index, reason="The file is empty (0 bytes).")
                file.seek(0)
                opened = decode_image(file, "this file")
        array = to_uint8(opened, 3)
    except OSError as error:
        return _CheckedImage(split, index, reason=f"{printable(error.strerror or error)}.")
    except Exception as error:  # one image must not stop the check of the others
        return _CheckedImage(split, index, reason=printable(error, 400))
    return _CheckedImage(split, index, _digest(array), opened.mode, min(array.shape[:2]))


def _digest(array: object) -> bytes:
    pixels = np.ascontiguousarray(array)
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(pixels.data)  # not a copy: images are large
    return digest.digest()
