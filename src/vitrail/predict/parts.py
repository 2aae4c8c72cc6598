"""Predictions and embeddings of millions of images, in parts: each complete or absent.

OUT holds manifest.json, which says of which images, by which model and how, and part-000000.csv, ... with a
fixed number of images each. A part is written aside, flushed and renamed, so a part that is there is done:
run again after a crash, on another machine or with another number of processes, only the others are made, and
the union of all parts has every image once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

from vitrail.base.errors import FileError, InputError, option, printable
from vitrail.base.safe_files import lock, open_regular, parse_json, read_limited, remove_partial, write_text
from vitrail.base.version import __version__
from vitrail.images.content import Progress as ReadProgress
from vitrail.images.formats.lazy import LARGE
from vitrail.images.formats.shards import (
    ShardImages,
    ShardNames,
    ShardTable,
    is_shards,
    list_shards,
    open_shards,
)
from vitrail.predict.engine import OnnxEngine
from vitrail.predict.image_sources import Source, expand_paths
from vitrail.predict.part_files import is_complete, write_errors, write_part
from vitrail.predict.predictor import Predictor
from vitrail.weights.bundle.digest import bundle_digest

MANIFEST, FORMAT = "manifest.json", 1
PART_SIZE = 10_000
_WORDS = {
    "list": "the list of images has changed since its first part",
    "model": "the model or its options have changed since its first part",
    "content": "its parts are of another command (vitrail predict or vitrail embed)",
    "form": "its parts have another format",
    "top": "its parts have another number of classes per image",
    "part_size": "its parts were written with another part size",
}

Progress = Callable[[int, int], None]
"""Called with the number of images done so far, and of images in total."""


@dataclass(frozen=True)
class PartOptions:
    """What is written into each part."""

    content: str
    """predict or embed."""
    form: str
    """A key of `part_files.FORMATS`."""
    top: int = 1
    part_size: int = PART_SIZE


@dataclass(frozen=True)
class PartResult:
    """What a run has done."""

    images: int
    """The images of its parts, with those of parts that were there."""
    parts: int
    found: int
    """Parts that were there already."""
    failed: int
    """Images that could not be read or predicted, as the files part-....errors list them."""


class ImageList:
    """Images in a fixed order.

    Args:
        inputs: paths of images and folders; or one path of tar shards.
        progress: called while shards without an index are read.
    """

    def __init__(self, inputs: Sequence[str], progress: ReadProgress = lambda done, total: None) -> None:
        self.table: ShardTable | None = None
        self.sources: list[Source] = []
        if len(inputs) == 1 and is_shards(inputs[0]):
            files = [file for some in list_shards(inputs[0]).values() for file in some]
            self.table = ShardTable(open_shards(files, progress))
        else:
            self.sources = list(expand_paths(inputs))
        if not len(self):
            raise InputError("There are no images to predict; check the paths.")

    def __len__(self) -> int:
        return len(self.sources) if self.table is None else len(self.table)

    def read(self, first: int, last: int) -> Iterator[Source]:
        """The images from one number up to another."""
        if self.table is None:
            yield from self.sources[first:last]
            return
        rows = range(len(self.table))
        images, names = ShardImages(self.table, rows)[first:last], ShardNames(self.table, rows)[first:last]
        for image, name in zip(images, names, strict=True):
            yield Source(f"{os.path.basename(image.file)}/{name}", image)

    def digest(self) -> str:
        """A hash of the list: of the names; of very many images in shards, of their indexes."""
        digest = hashlib.sha256(str(len(self)).encode())
        if self.table is not None and len(self.table) >= LARGE:
            digest.update(ShardNames(self.table, range(len(self.table))).identity())
        else:
            for source in self.read(0, len(self)):
                digest.update(source.name.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()


class Parts:
    """A folder of parts, new or of the same images, model and options.

    Args:
        images: all images; each process reads only those of its own parts.
    """

    def __init__(self, folder: Path, images: ImageList, predictor: Predictor, options: PartOptions) -> None:
        self.folder, self.images, self.predictor, self.options = folder, images, predictor, options
        self.count = -(-len(images) // options.part_size)
        manifest = {
            "format": FORMAT,
            "vitrail": __version__,
            "images": len(images),
            "parts": self.count,
            "list": images.digest(),
            "model": model_digest(predictor),
            **asdict(options),
        }
        if os.path.lexists(folder) and not folder.is_dir():
            raise InputError(
                f"{option('out')} must name a folder for parts, and {printable(folder)} is a file."
            )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        if not path.exists():
            if any(not name.name.startswith(".") for name in folder.iterdir()):
                raise InputError(
                    f"{option('out')} must name a new or empty folder, or one with parts of the same "
                    f"prediction, and {printable(folder)} has no {MANIFEST}; name another folder."
                )
            # Another process may be faster, and remove our temporary file: its manifest is checked below.
            with suppress(InputError, FileNotFoundError):
                write_text(path, json.dumps(manifest, indent=1) + "\n")
        _check_manifest(path, manifest)

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06}.{self.options.form}"

    def numbers(self, part: int = 1, of: int = 1) -> range:
        """The parts of one job of several, counted from 1: consecutive ones."""
        return range(self.count * (part - 1) // of, self.count * part // of)

    def waiting(self, numbers: Iterable[int]) -> list[int]:
        """The parts that are not there yet."""
        return [number for number in numbers if not is_complete(self.path(number))]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold a lock while parts are written; if no other process does, remove what killed ones left."""
        manifest = self.folder / MANIFEST
        writable = os.access(manifest, os.W_OK)  # only such can be locked exclusively on NFS
        with manifest.open("r+b" if writable else "rb") as file:
            if lock(file):
                remove_partial(self.folder)
            lock(file, shared=True, wait=True)
            yield

    def bounds(self, number: int) -> tuple[int, int]:
        """From which to which image a part goes."""
        first = number * self.options.part_size
        return first, min(first + self.options.part_size, len(self.images))

    def size(self, numbers: Iterable[int]) -> int:
        return sum(last - first for first, last in map(self.bounds, numbers))

    def write(self, numbers: Sequence[int], progress: Progress = lambda done, total: None) -> None:
        """Predict and write some parts. Images are read ahead across them."""
        sources = chain.from_iterable(self.images.read(*self.bounds(number)) for number in numbers)
        predictions = self.predictor.stream(sources)
        done, total = 0, self.size(numbers)
        for number in numbers:
            first, last = self.bounds(number)
            some = []
            for prediction in islice(predictions, last - first):
                some.append(prediction)
                done += 1
                progress(done, total)
            if len(some) < last - first:
                raise RuntimeError(f"part {number} has {len(some)} predictions for {last - first} images")
            write_errors(self.path(number), some)
            write_part(self.path(number), some, self.predictor, self.options.content, self.options.top)

    def write_missing(
        self, part: int = 1, of: int = 1, progress: Progress = lambda done, total: None
    ) -> PartResult:
        """Write the parts of one job that are not there yet, in this process."""
        numbers = self.numbers(part, of)
        with self.in_use():
            waiting = self.waiting(numbers)
            self.write(waiting, progress)
        return self.result(numbers, waiting)

    def result(self, numbers: Sequence[int], waiting: Sequence[int]) -> PartResult:
        failed = 0
        for number in numbers:
            with suppress(FileNotFoundError):
                failed += self.path(number).with_suffix(".errors").read_bytes().count(b"\n")
        return PartResult(self.size(numbers), len(numbers), len(numbers) - len(waiting), failed)


def model_digest(predictor: Predictor) -> str:
    """A hash of what the predictions depend on."""
    if predictor.bundle is not None:
        text = f"{bundle_digest(predictor.bundle)} {predictor.scale!r}"  # the scale: temperature, thresholds
        return hashlib.sha256(text.encode()).hexdigest()
    assert isinstance(predictor.engine, OnnxEngine)
    digest = hashlib.sha256()
    with open_regular(predictor.engine.path, "an ONNX file") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _check_manifest(path: Path, wanted: dict[str, object]) -> None:
    """Refuse parts of other images, another model or other options."""
    found = parse_json(read_limited(path, 1 << 20, "a manifest"), str(path))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileError(f"{printable(path)} is not a manifest of this version; name another folder.")
    for name, words in _WORDS.items():
        if found.get(name) != wanted[name]:
            raise InputError(
                f"{printable(path.parent)} cannot be continued: {words}. Name another "
                "folder, or run the command that started it."
            )
