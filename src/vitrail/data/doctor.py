"""What is wrong with a data set: every picture decoded in full, none of them changed."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from vitrail.data.decode import open_picture
from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError, printable
from vitrail.preprocess import levels

FEW = 10  # pictures of a class, below which it is hard to learn and to judge
SMALL = 32  # pixels along a side


@dataclass
class Findings:
    """What was found, by kind; names are those of the data set, fit to be shown."""

    pictures: dict[str, int] = field(default_factory=dict)
    """How many in each split."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Why each cannot be read."""
    twice: list[list[str]] = field(default_factory=list)
    """Pictures whose pixels are the same, within a split."""
    leaked: list[list[str]] = field(default_factory=list)
    """Pictures whose pixels are the same, in two splits: what is judged was learned from."""
    disputed: list[list[str]] = field(default_factory=list)
    """Pictures whose pixels are the same, under other labels."""
    few: dict[str, int] = field(default_factory=dict)
    """Classes with few pictures to learn from."""
    modes: dict[str, int] = field(default_factory=dict)
    """How many pictures of each of Pillow's modes."""
    small: list[str] = field(default_factory=list)
    """Pictures with a side of few pixels."""

    @property
    def ill(self) -> bool:
        """Whether something must be repaired: files that cannot be read, answers that are known."""
        return bool(self.corrupt or self.leaked or self.disputed)


@dataclass(frozen=True)
class Seen:
    """One picture, looked at."""

    split: str
    name: str
    label: str
    pixels: bytes = b""
    """A hash of its pixels."""
    mode: str = ""
    side: int = 0
    reason: str = ""


def examine(data: Dataset, workers: int = 2, ahead: Callable[[int], None] = lambda done: None) -> Findings:
    """Look at every picture of a data set. `ahead` is told how many are done."""
    found = Findings()
    same: dict[bytes, list[Seen]] = defaultdict(list)
    for done, one in enumerate(look_at_all(data, workers), 1):
        found.pictures[one.split] = found.pictures.get(one.split, 0) + 1
        if one.reason:
            found.corrupt[one.name] = one.reason
        else:
            same[one.pixels].append(one)
            found.modes[one.mode] = found.modes.get(one.mode, 0) + 1
            if one.side < SMALL and data.train.paths is not None:
                found.small.append(one.name)
        ahead(done)
    for some in same.values():
        if len(some) > 1:
            sort_same(found, some)
    counts = Counter(int(label) for label in data.train.labels) if not data.several else Counter()
    if not data.several:
        few = {name: counts[number] for number, name in enumerate(data.classes) if counts[number] < FEW}
        found.few = {printable(name): count for name, count in few.items()}
    return found


def sort_same(found: Findings, some: list[Seen]) -> None:
    names = [f"{one.split}: {one.name}" for one in some]
    if len({one.split for one in some}) > 1:
        found.leaked.append(names)
    if len({one.label for one in some}) > 1:
        found.disputed.append([f"{name} ({one.label})" for name, one in zip(names, some, strict=True)])
    if len({one.split for one in some}) == 1 and len({one.label for one in some}) == 1:
        found.twice.append(names)


def look_at_all(data: Dataset, workers: int) -> Iterator[Seen]:
    splits = {"train": data.train, "val": data.val, "test": data.test}
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for name, split in splits.items():
            if split is not None:
                for first in range(0, len(split), 256):  # a few at a time: a data set may be large
                    numbers = range(first, min(first + 256, len(split)))
                    yield from pool.map(lambda i, n=name, s=split: look_at(n, s, i), numbers)


def look_at(split_name: str, split: Split, index: int) -> Seen:
    """One picture, decoded in full; pixels are compared upright and in colour, whatever the file."""
    name, label = printable(split.names[index]), str(split.labels[index].tolist())
    if split.images is not None:
        array = split.images[index]
        return Seen(
            split_name, name, label, digest(array), f"{array.shape[2]} channels", min(array.shape[:2])
        )
    assert split.paths is not None
    try:
        image = open_picture(split.paths[index])
        array = levels(image, 3)
    except (InputError, OSError) as error:
        return Seen(split_name, name, label, reason=printable(error))
    return Seen(split_name, name, label, digest(array), image.mode, min(array.shape[:2]))


def digest(array: object) -> bytes:
    import numpy as np

    pixels = np.ascontiguousarray(array)
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
