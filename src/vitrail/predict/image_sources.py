"""Read images from paths, folders and memory, in order and ahead of the model.

Memory holds the names of one folder and a few batches of pixels, however many images there are.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitrail.base.errors import printable
from vitrail.images.decode import read_pixels
from vitrail.images.formats.folders import SUFFIXES
from vitrail.images.formats.stored_images import StoredImage
from vitrail.images.workers import MIN_IMAGES, Task, Workers, choose_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.preprocess import Preprocess

    PixelsOrReason = NDArray[np.uint8] | str
    """uint8 pixels (H, W, C), or the reason why there are none."""

EMPTY_FOLDER = "The folder contains no images."


@dataclass(frozen=True, eq=False)
class Source:
    """An image to read, or a path that is known to be unreadable."""

    name: str
    image: Any
    """A path, an image in a larger file, a PIL image or an array."""
    reason: str = ""
    """Why it cannot be read, if that is already known."""


def expand_paths(images: Iterable[Any]) -> Iterator[Source]:
    """Yield a source for each image; a folder stands for every image below it. A source stays as it is."""
    for number, image in enumerate(images):
        if isinstance(image, Source):
            yield image
            continue
        path = os.fsdecode(image) if isinstance(image, (str, os.PathLike)) else None
        if path is None:
            yield Source(f"image {number}", image)
        elif os.path.isdir(path):
            yield from _walk_folder(path)
        else:
            yield Source(path, path)


def _walk_folder(folder: str) -> Iterator[Source]:
    """Yield every image file below a folder, in order of names, the files of a folder before its subfolders.

    Anything named like an image is included, even a pipe or a broken link: reading it gives the reason.
    Links to folders are not followed, so there are no loops, and hidden files are skipped. An unreadable or
    empty folder becomes a source with a reason, so that it is not mistaken for success.
    """
    waiting, empty = [folder], True
    while waiting:
        current = waiting.pop()
        files, folders = [], []
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    is_image = os.path.splitext(entry.name)[1].lower() in SUFFIXES
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif is_image and not os.path.isdir(entry.path):
                        files.append(entry.path)
        except OSError as error:
            empty = False
            yield Source(current, current, describe_error(error))
            continue
        for path in sorted(files):
            empty = False
            yield Source(path, path)
        waiting += sorted(folders, reverse=True)
    if empty:
        yield Source(folder, folder, EMPTY_FOLDER)


# ---- reading --------------------------------------------------------------------------------


def describe_error(error: Exception) -> str:
    """One line that says why an image could not be read."""
    if isinstance(error, MemoryError):  # its message is often empty
        return f"There was not enough memory. {printable(error)}".rstrip()
    return printable(getattr(error, "strerror", None) or error, 400)


def read_or_describe(image: Any, preprocess: Preprocess) -> PixelsOrReason:
    """The uint8 pixels that the model sees, bit-equal to those of training and evaluation; or the reason why
    there are none."""
    try:
        return read_pixels(image, preprocess, limit_memory=True)
    except Exception as error:  # one bad image must not end a run over a hundred thousand
        return describe_error(error)


def prefetch(
    sources: Iterable[Source],
    preprocess: Preprocess,
    *,
    workers: int | Literal["auto"],
    ahead: int,
    busy: bool,
) -> Generator[tuple[str, PixelsOrReason]]:
    """Yield the name and pixels of each source in order; files are read by workers ahead of the caller.

    Args:
        busy: whether the model is computed on the CPU, too.
    """
    remaining = iter(sources)
    first = list(islice(remaining, MIN_IMAGES))  # how many there are, without taking them all
    size = math.prod(preprocess.target) * preprocess.channels
    running = Workers(choose_workers(workers, len(first), image_bytes=size, busy=busy), image_bytes=size)
    waiting: deque[list[tuple[str, PixelsOrReason | None]]] = deque()

    def tasks() -> Iterator[Task]:
        everything = chain(first, remaining)
        while chunk := list(islice(everything, running.chunk)):
            known: list[tuple[str, PixelsOrReason | None]] = []
            files = []
            for source in chunk:
                result: PixelsOrReason | None = source.reason or None
                if result is None and isinstance(source.image, (str, StoredImage)):
                    files.append((source.image, preprocess))
                elif result is None:  # PIL images are not thread-safe, and one may be in the list twice
                    result = read_or_describe(source.image, preprocess)
                known.append((source.name, result))
            waiting.append(known)
            yield Task(read_or_describe, files)

    try:
        with closing(running.map(tasks(), -(-ahead // running.chunk))) as results:
            for part in results:
                read = iter(part)
                for name, known in waiting.popleft():
                    yield name, next(read) if known is None else known
    finally:
        running.close()
