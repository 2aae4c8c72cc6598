"""From whatever was handed over to levels, in order, some of them read ahead of the model.

Nothing here holds on to more than one folder's names and a few batches of levels, however many pictures
there are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.decode import open_picture, quiet
from vitrail.data.folders import SUFFIXES
from vitrail.errors import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.preprocess import Preprocess

    Found = NDArray[np.uint8] | str
    """Levels (H, W, C), or the reason why there are none."""


@dataclass(frozen=True, eq=False)
class Source:
    """One picture that is to be read, or a path of which we know already that it cannot be."""

    name: str
    picture: Any
    """A path, a PIL image or an array."""
    reason: str = ""


def expand(given: Iterable[Any]) -> Iterator[Source]:
    """A source for each picture; a folder stands for every picture below it."""
    for number, one in enumerate(given):
        path = os.fsdecode(one) if isinstance(one, (str, os.PathLike)) else None
        if path is None:
            yield Source(f"picture {number}", one)
        elif os.path.isdir(path):
            yield from below(path)
        else:
            yield Source(path, path)


def below(folder: str) -> Iterator[Source]:
    """Every picture file below a folder, in the order of `data.folders.pictures`, one folder at a time.

    Links to folders are not followed, so there are no loops; hidden files are not seen. A folder that
    cannot be read, or in which there is nothing, is a source with a reason: silence would look like success.
    """
    waiting, empty = [folder], True
    while waiting:
        place = waiting.pop()
        try:
            files, folders = inside(place)
        except OSError as error:
            files, folders, empty = [], [], False
            yield Source(place, place, reason_of(error))
        for name in files:
            empty = False
            path = os.path.join(place, name)
            yield Source(path, path)
        waiting += [os.path.join(place, name) for name in reversed(folders)]
    if empty:
        yield Source(folder, folder, "A folder must hold pictures, and this one holds none.")


def inside(place: str) -> tuple[list[str], list[str]]:
    """Names of a folder's pictures, and of the folders in it, sorted.

    What is called like a picture and is none (a pipe, a link to nowhere) is among them: it gets its reason.
    """
    files, folders = [], []
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and not os.path.isdir(entry.path):
                files.append(entry.name)
    return sorted(files), sorted(folders)


# ---- reading --------------------------------------------------------------------------------


def levels(picture: Any, preprocess: Preprocess) -> NDArray[np.uint8]:
    """The levels that the model sees: to the bit those of training and evaluation."""
    with quiet():
        if isinstance(picture, (str, os.PathLike)):
            picture = open_picture(os.fsdecode(picture), preprocess=preprocess)
        return preprocess.pixels(picture)


def reason_of(error: Exception) -> str:
    """Why something could not be read, in a line."""
    if isinstance(error, MemoryError):  # most of these say nothing
        return f"There was not enough memory. {printable(error)}".rstrip()
    return printable(getattr(error, "strerror", None) or error, 400)


def read_ahead(
    sources: Iterable[Source], preprocess: Preprocess, *, workers: int, ahead: int
) -> Generator[tuple[str, Found]]:
    """Name and levels of each source, in order, read by threads while the caller does something else."""
    pool = ThreadPoolExecutor(workers) if workers else None

    def read(picture: Any) -> Found:
        try:
            return levels(picture, preprocess)
        except Exception as error:  # whatever it is: one picture must not end a run of a hundred thousand
            return reason_of(error)

    def begin(source: Source) -> Callable[[], Found]:
        if source.reason:
            return lambda: source.reason
        if pool is not None and isinstance(source.picture, str):
            return pool.submit(read, source.picture).result
        found = read(source.picture)  # an image in memory may be in the list twice: not for two threads
        return lambda: found

    waiting: deque[tuple[str, Callable[[], Found]]] = deque()
    try:
        for source in sources:
            waiting.append((source.name, begin(source)))
            if len(waiting) > ahead:
                name, result = waiting.popleft()
                yield name, result()
        while waiting:
            name, result = waiting.popleft()
            yield name, result()
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
