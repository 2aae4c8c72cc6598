"""A check of a data set for `vitrail doctor`: every image is decoded completely, and no file is changed."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import open_regular
from vitrail.images.classes import check_empty_classes, class_counts, quoted, similar_names, without_images
from vitrail.images.content import content_keys
from vitrail.images.decode import decode_image, open_image
from vitrail.images.fingerprint import Fingerprint
from vitrail.images.formats.folders import FAULTS
from vitrail.images.formats.lazy import RelativePaths
from vitrail.images.formats.sources import Dataset, Split, check_dataset, read_data
from vitrail.images.formats.stored_images import StoredImage
from vitrail.images.holdout import hold_out_validation
from vitrail.images.pixels import to_uint8
from vitrail.images.workers import Task, Workers, choose_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

_FEW = 10  # images of a class, below which it is hard to train and to evaluate
_SMALL = 32  # pixels along a side
_CHUNK = 32  # images that a worker checks at a time
_AHEAD = 8  # chunks that are checked ahead, for each thread

StageProgress = Callable[[str, int, int | None], None]
"""Called with what is done, how many rows or files of it are done, and how many there are, if known."""


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
    """Files and folders that are not read, by kind: see `vitrail.images.formats.folders`."""
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

    near_leaks: list[list[str]] | None = None
    """Pairs of images that look the same, in different splits; None if no model has compared them."""
    near_duplicates: list[list[str]] | None = None
    """The same in one split."""
    label_errors: list[dict[str, Any]] | None = None
    """Images whose label is probably wrong, with the suggested class and its probability."""
    outliers: list[str] | None = None
    """Images that are unlike all others."""

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


def open_for_check(
    path: str | Path, progress: StageProgress = lambda stage, done, total: None
) -> tuple[Dataset, list[str]]:
    """A data set as training would use it, and the reasons why training would refuse it."""
    data = read_data(
        path,
        need_readable=False,  # they are reported
        progress=partial(progress, "reading shards"),
        on_rows=lambda rows: progress("reading rows", rows, None),
    )
    problems: list[str] = []
    for verify in (lambda: check_dataset(data, printable(path)), lambda: check_empty_classes(data)):
        try:
            verify()
        except InputError as error:
            problems.append(str(error))
    if not (data.val or data.test) and len(data.train):
        try:
            reading = partial(progress, "reading files")
            return hold_out_validation(data, progress=reading), problems
        except InputError as error:
            problems += [str(error)] if str(error) not in problems else []
    return data, problems


def count_trained(
    data: Dataset, fingerprint: Fingerprint, progress: StageProgress = lambda stage, done, total: None
) -> dict[str, int]:
    """The number of images in each split that a model was trained on."""
    return {
        name: int(fingerprint.contains(keys).sum())
        for name, split in data.splits.items()
        for keys in [content_keys(split, data.source_of(name), partial(progress, f"reading {name}"))]
    }


def check_images(
    data: Dataset,
    workers: int | Literal["auto"] = "auto",
    progress: StageProgress = lambda stage, done, total: None,
) -> DatasetReport:
    """Check every image of a data set."""
    report = DatasetReport(classes=len(data.classes), notes=list(data.notes))
    splits, equal = data.splits, _EqualImages()
    total = sum(map(len, splits.values()))
    for done, image in enumerate(_check_images(splits, workers), 1):
        report.images[image.split] = report.images.get(image.split, 0) + 1
        if image.reason:
            report.corrupt[printable(splits[image.split].names[image.index])] = image.reason
        else:
            equal.add(done - 1, image.digest)
            report.modes[image.mode] = report.modes.get(image.mode, 0) + 1
            if image.side < _SMALL and data.train.paths is not None:
                report.small_images.append(printable(splits[image.split].names[image.index]))
        if done % _CHUNK == 0:
            progress("decoding images", done, total)
    starts = np.cumsum([0, *map(len, splits.values())])
    for numbers in equal.groups():
        owners = np.searchsorted(starts, numbers, side="right") - 1
        places = [
            (list(splits)[n], number - int(starts[n])) for n, number in zip(owners, numbers, strict=True)
        ]
        _report_duplicates(report, places, data)
    _report_classes(report, data)
    report.skipped = {kind: [printable(name) for name in names] for kind, names in data.skipped.items()}
    return report


class _EqualImages:
    """Finds images with equal pixels, with 24 bytes for each image: there may be many millions."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._digests = bytearray()

    def add(self, number: int, digest: bytes) -> None:
        """Add an image by the SHA-256 of its pixels, of which 128 bits are kept."""
        self._numbers.append(number)
        self._digests += digest[:16]

    def groups(self) -> list[list[int]]:
        """The numbers of equal images, in ascending order; the group of the first image comes first."""
        digests = np.frombuffer(self._digests, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort(digests.T)  # stable, so that equal images keep their order
        new = (digests[order][1:] != digests[order][:-1]).any(axis=1)
        numbers = np.frombuffer(self._numbers, dtype=np.int64)[order]
        groups = np.split(numbers, np.flatnonzero(new) + 1) if not new.all() else []
        return sorted(group.tolist() for group in groups if len(group) > 1)


def _report_classes(report: DatasetReport, data: Dataset) -> None:
    for split, names in without_images(data).items() if data.train else ():
        report.empty_classes[split] = [printable(name) for name in names]
    report.similar_classes = [quoted(names) for names in similar_names(data.classes)]
    counts = class_counts(data.train, len(data.classes)).tolist()
    few = {name: count for name, count in zip(data.classes, counts, strict=True) if 0 < count < _FEW}
    report.small_classes = {printable(name): count for name, count in few.items()}


def _report_duplicates(report: DatasetReport, images: list[tuple[str, int]], data: Dataset) -> None:
    """Report images with the same pixels: across splits, with different labels, or as plain duplicates."""
    names = [f"{split}: {printable(data.splits[split].names[index])}" for split, index in images]
    labels = [_label_names(data, data.splits[split], index) for split, index in images]
    leaked, disputed = len({split for split, _ in images}) > 1, len(set(labels)) > 1
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
    """Check every image in order; a file that several rows of a table name is decoded once."""
    tables = [split.names for split in splits.values() if isinstance(split.paths, RelativePaths)]
    repeated = {name for name, count in Counter(chain.from_iterable(tables)).items() if count > 1}

    def rows() -> Iterator[tuple[str, int, str]]:
        """The split and the index of each image, and the name of its file if it is repeated."""
        for name, split in splits.items():
            for index in range(len(split)):
                file = split.names[index] if repeated else ""
                yield name, index, file if file in repeated else ""

    def images() -> Iterator[tuple[str, int, Any]]:
        seen: set[str] = set()
        for name, index, file in rows():
            if file not in seen:
                source: Any = splits[name].paths or splits[name].images
                yield name, index, source[index]
            if file:
                seen.add(file)

    remaining = images()
    chunks = iter(lambda: list(islice(remaining, _CHUNK)), [])  # a task costs as much as a small image
    tasks = (Task(_check_image, chunk) for chunk in chunks)
    running = Workers(choose_workers(workers, sum(len(split) for split in splits.values() if split.paths)))
    known: dict[str, _CheckedImage] = {}
    try:
        checked = chain.from_iterable(running.map(tasks, _AHEAD * max(1, running.plan.count)))
        for name, index, file in rows():
            image = replace(known[file], split=name, index=index) if file in known else next(checked)
            if file:
                known[file] = image
            yield image
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
        reason = printable(error, 400).replace(
            printable(image), "The image"
        )  # so that equal reasons are grouped
        return _CheckedImage(split, index, reason=reason)
    return _CheckedImage(split, index, _digest(array), opened.mode, min(array.shape[:2]))


def _digest(array: object) -> bytes:
    pixels = np.ascontiguousarray(array)
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(pixels.data)  # not a copy: images are large
    return digest.digest()
