"""What is wrong with a data set: every image decoded in full, none of them changed."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitrail.data.classes import alike, check_gaps, class_counts, quoted, without_images
from vitrail.data.decode import decode, open_regular, quiet
from vitrail.data.folders import FAULTS
from vitrail.data.sources import Dataset, Split, check, hold_out, read_data
from vitrail.errors import InputError, printable
from vitrail.preprocess import levels

FEW = 10  # images of a class, below which it is hard to learn and to evaluate
SMALL = 32  # pixels along a side
PIECE, AHEAD = 32, 8  # images that a thread takes at once, and pieces for each thread that wait


@dataclass
class Findings:
    """What was found, by kind; names are those of the data set, fit to be shown."""

    pictures: dict[str, int] = field(default_factory=dict)
    """How many in each split."""
    classes: int = 0
    problems: list[str] = field(default_factory=list)
    """Why training would refuse the data, a sentence each."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Why each cannot be read."""
    twice: list[list[str]] = field(default_factory=list)
    """Images whose pixels are the same, within a split."""
    leaked: list[list[str]] = field(default_factory=list)
    """Images whose pixels are the same, in two splits: the test is on what was trained on."""
    disputed: list[list[str]] = field(default_factory=list)
    """Images whose pixels are the same, under other labels."""
    absent: dict[str, list[str]] = field(default_factory=dict)
    """Classes without an image, by split."""
    alike: list[str] = field(default_factory=list)
    """Classes whose names differ only in case, blanks, separators or Unicode form, a group each."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """What lies in the folders and is not read, by kind: see `vitrail.data.folders`."""
    few: dict[str, int] = field(default_factory=dict)
    """Classes with few training images."""
    modes: dict[str, int] = field(default_factory=dict)
    """How many images of each of Pillow's modes."""
    small: list[str] = field(default_factory=list)
    """Images with a side of few pixels."""
    notes: list[str] = field(default_factory=list)
    """What was decided when the data was read, a sentence each."""

    @property
    def ill(self) -> bool:
        """Whether something must be repaired: what training refuses, drops, or learns wrongly."""
        faults = (self.problems, self.corrupt, self.leaked, self.disputed, self.alike)
        lost = "train" in self.absent or any(kind in self.skipped for kind in FAULTS)
        return lost or any(map(bool, faults))


@dataclass(frozen=True, slots=True)
class Seen:
    """One image, looked at. Its name is made when it is needed: most are fine, and never named."""

    split: str
    index: int
    pixels: bytes = b""
    """A hash of its pixels."""
    mode: str = ""
    side: int = 0
    reason: str = ""


def open_to_examine(path: str | Path) -> tuple[Dataset, list[str]]:
    """A data set as training would have it, and why training would refuse it, a sentence each."""
    data, problems = read_data(path), []
    for verify in (lambda: check(data, printable(path)), lambda: check_gaps(data)):
        try:
            verify()
        except InputError as error:
            problems.append(str(error))
    if not (data.val or data.test) and len(data.train):
        try:
            return hold_out(data, 0.2, 0), problems
        except InputError as error:
            problems += [str(error)] if str(error) not in problems else []
    return data, problems


def examine(data: Dataset, workers: int = 2, ahead: Callable[[int], None] = lambda done: None) -> Findings:
    """Look at every image of a data set. `ahead` is told how many are done."""
    found = Findings(classes=len(data.classes), notes=list(data.notes))
    same: dict[bytes, list[Seen]] = defaultdict(list)
    splits = splits_of(data)
    for done, one in enumerate(look_at_all(splits, workers), 1):
        found.pictures[one.split] = found.pictures.get(one.split, 0) + 1
        if one.reason:
            found.corrupt[name_of(splits, one)] = one.reason
        else:
            same[one.pixels].append(one)
            found.modes[one.mode] = found.modes.get(one.mode, 0) + 1
            if one.side < SMALL and data.train.paths is not None:
                found.small.append(name_of(splits, one))
        if done % PIECE == 0:
            ahead(done)
    for some in same.values():
        if len(some) > 1:
            sort_same(found, some, data)
    examine_classes(found, data)
    found.skipped = {kind: [printable(name) for name in names] for kind, names in data.skipped.items()}
    return found


def examine_classes(found: Findings, data: Dataset) -> None:
    for split, names in without_images(data).items():
        found.absent[split] = [printable(name) for name in names]
    found.alike = [quoted(names) for names in alike(data.classes)]
    counts = class_counts(data.train, len(data.classes)).tolist()
    few = {name: count for name, count in zip(data.classes, counts, strict=True) if 0 < count < FEW}
    found.few = {printable(name): count for name, count in few.items()}


def splits_of(data: Dataset) -> dict[str, Split]:
    splits = {"train": data.train, "val": data.val, "test": data.test}
    return {name: split for name, split in splits.items() if split is not None}


def name_of(splits: dict[str, Split], one: Seen) -> str:
    return printable(splits[one.split].names[one.index])


def sort_same(found: Findings, some: list[Seen], data: Dataset) -> None:
    splits = splits_of(data)
    names = [f"{one.split}: {name_of(splits, one)}" for one in some]
    labels = [label_of(data, splits[one.split], one.index) for one in some]
    if len({one.split for one in some}) > 1:
        found.leaked.append(names)
    if len(set(labels)) > 1:
        found.disputed.append([f"{name} ({label})" for name, label in zip(names, labels, strict=True)])
    if len({one.split for one in some}) == 1 and len(set(labels)) == 1:
        found.twice.append(names)


def label_of(data: Dataset, split: Split, index: int) -> str:
    """The classes of an image by name."""
    label = split.labels[index]
    numbers = np.flatnonzero(label) if data.several else [label]
    return printable(", ".join(data.classes[number] for number in numbers) or "none")


def look_at_all(splits: dict[str, Split], workers: int) -> Iterator[Seen]:
    """Every image in order, in pieces: a task for each image would cost as much as a small image."""
    workers = max(1, workers)
    waiting: deque[Future[list[Seen]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for name, split in splits.items():
                for first in range(0, len(split), PIECE):
                    numbers = range(first, min(first + PIECE, len(split)))
                    waiting.append(pool.submit(look_at_some, name, split, numbers))
                    if len(waiting) > AHEAD * workers:
                        yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def look_at_some(name: str, split: Split, numbers: range) -> list[Seen]:
    with quiet():  # once for all of them: changing the filters of warnings takes time
        return [look_at(name, split, index) for index in numbers]


def look_at(split_name: str, split: Split, index: int) -> Seen:
    """One image, decoded in full; pixels are compared upright and in colour, whatever the file."""
    if split.images is not None:
        array = split.images[index]
        mode = f"{array.shape[2]} channels"
        return Seen(split_name, index, digest(array), mode, min(array.shape[:2]))
    assert split.paths is not None
    try:
        with open_regular(split.paths[index]) as file:
            if not file.read(1):
                return Seen(split_name, index, reason="The file is empty (0 bytes).")
            file.seek(0)
            image = decode(file, "this file")
        array = levels(image, 3)
    except OSError as error:
        return Seen(split_name, index, reason=f"{printable(error.strerror or error)}.")
    except Exception as error:  # whatever it is: one image must not end the examination of the others
        return Seen(split_name, index, reason=printable(error, 400))
    return Seen(split_name, index, digest(array), image.mode, min(array.shape[:2]))


def digest(array: object) -> bytes:
    pixels = np.ascontiguousarray(array)
    found = hashlib.sha256(repr(pixels.shape).encode())
    found.update(pixels.data)  # not a copy of it: images are large
    return found.digest()
