"""The data of a run, with the validation set that its settings ask for."""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.base.progress import ProgressBars
from vitrail.images.classes import ClassNames, check_empty_classes, rename_classes
from vitrail.images.content import content_keys
from vitrail.images.fingerprint import Fingerprint, fingerprint_of, read_fingerprint
from vitrail.images.formats.sources import Dataset, open_dataset
from vitrail.images.holdout import VAL_FRACTION
from vitrail.training.callbacks import Callback
from vitrail.training.parallel import ProcessGroup
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.readers.files import write_npz

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLIT_FIELDS = {"val_fraction": VAL_FRACTION, "split_seed": 0}  # of TrainConfig, with their defaults
_REPORT_SECONDS = 10.0  # between two messages while files are read


def open_training_data(
    data: Any, classes: ClassNames | None, settings: Mapping[str, Any], callback: Callback
) -> Dataset:
    """Open the data and check its classes.

    Args:
        data: an open Dataset, or what `open_dataset` takes.
        classes: names for numbered classes.
        settings: fields of TrainConfig that are given; those of the validation set are used.
        callback: receives a message now and then while many rows or files are read.
    """
    split = {name: settings.get(name, default) for name, default in SPLIT_FIELDS.items()}
    given = isinstance(data, Dataset)
    with ReadingReporter(callback, "to choose the validation set") as report:
        dataset = data if given else open_dataset(data, **split, progress=report, on_rows=report.on_rows)
    dataset = dataset if classes is None else rename_classes(dataset, classes)
    check_empty_classes(dataset)
    unused = [name for name, default in SPLIT_FIELDS.items() if split[name] != default]
    if unused and (given or not dataset.held_out):
        note = f"Not used, since the data has its own validation or test set: {', '.join(unused)}."
        dataset = replace(dataset, notes=[*dataset.notes, note])
    return dataset


class ReadingReporter:
    """How many rows and files were read: a bar if the callback shows bars, or a message every ten seconds.

    Args:
        purpose: why files are read, for the message.
    """

    def __init__(self, callback: Callback, purpose: str) -> None:
        self.callback, self.purpose, self.last = callback, purpose, time.monotonic()
        self.bars = ProgressBars(enabled=getattr(callback, "shows_bars", False))

    def __enter__(self) -> ReadingReporter:
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.close()

    def on_rows(self, done: int) -> None:
        """Rows of a table, of which nobody knows how many there are."""
        self._report("reading rows", done, None, f"Read {done:,} rows of the table.")

    def __call__(self, done: int, total: int) -> None:
        self._report("reading files", done, total, f"Read {done:,} of {total:,} files {self.purpose}.")

    def _report(self, name: str, done: int, total: int | None, message: str) -> None:
        if self.bars.enabled:
            self.bars(name, done, total)
        elif time.monotonic() - self.last > _REPORT_SECONDS:
            self.last = time.monotonic()
            self.callback.on_message(message)


# ---- the fingerprint: which images a run trains on ------------------------------------------

FILE_NAME = "fingerprint.npz"
MAX_IMAGES = 1 << 24  # a filter of 30 MB in every model file


def run_fingerprint(out: Path, data: Dataset, start: Bundle | None, callback: Callback) -> Fingerprint | None:
    """The fingerprint of a run, read from its directory or computed and written there.

    It includes the images that the weights it starts from were trained on. Of very many images there is none.
    """
    saved, _ = _read(out / FILE_NAME)
    if saved is not None:
        return saved
    if len(data.train) > MAX_IMAGES:
        callback.on_message(
            f"The model's files do not record which images it was trained on: {len(data.train):,} are more "
            f"than {MAX_IMAGES:,}. vitrail evaluate cannot tell then whether it has seen an image."
        )
        return None
    with ReadingReporter(callback, "for the fingerprint") as report:
        keys = content_keys(data.train, data.source_of("train"), report)
    fingerprint = fingerprint_of(keys) | (start.fingerprint if start else None)
    digest = np.frombuffer(hashlib.sha256(keys.tobytes()).digest(), dtype=np.uint8)  # also of their order
    more = {"images": np.array(fingerprint.describe()), "contents": digest}
    write_npz(out / FILE_NAME, {**fingerprint.arrays(), **more})
    return fingerprint


def check_contents(out: Path, data: Dataset, ranks: ProcessGroup, callback: Callback) -> None:
    """Check that the training images are those that the run in `out` started with, and not only by name.

    Keys of files come from the cache where size and times are as before; only others are read.
    """
    changed = ranks.from_main(_changed_contents(out, data, callback) if ranks.is_main else None)
    if changed is not None:
        raise InputError(
            f"a run resumes with the images it started with: {changed}. Restore the files, or start another "
            "run in a new folder."
        )


def _changed_contents(out: Path, data: Dataset, callback: Callback) -> str | None:
    saved, contents = _read(out / FILE_NAME)
    if saved is None or len(data.train) > MAX_IMAGES:
        return None
    with ReadingReporter(callback, "to check that they are those of the run") as report:
        keys = content_keys(data.train, data.source_of("train"), report)
    new = np.flatnonzero(~saved.contains(keys))
    if len(new):
        name = printable(data.train.names[int(new[0])])
        others = f" and {len(new) - 1:,} more" if len(new) > 1 else ""
        return f"since then, the contents of {name}{others} have changed under the same name"
    if contents is not None and contents.tobytes() != hashlib.sha256(keys.tobytes()).digest():
        return "since then, some of its training images have exchanged their names or were copied over others"
    return None


def _read(path: Path) -> tuple[Fingerprint | None, NDArray[Any] | None]:
    """The fingerprint in a file and the digest of the images in their order, which older files lack.

    Both are None if there is no file or it is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        counts = arrays.pop("images").tolist()
        shapes = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
        return read_fingerprint(counts, shapes, arrays.__getitem__), arrays.get("contents")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None, None
