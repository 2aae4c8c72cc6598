"""The fingerprint of a run: which images it trains on, for its model files (weights/fingerprint.py)."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.images.content import content_keys
from vitrail.images.fingerprint import Fingerprint, fingerprint_of, read_fingerprint
from vitrail.images.formats.sources import Dataset
from vitrail.training.callbacks import Callback
from vitrail.training.open_data import ReadingReporter
from vitrail.training.parallel import ProcessGroup
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.readers.files import write_npz

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    more = {"images": np.array(fingerprint.describe()), "contents": _digest(keys)}
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
    if contents is not None and not np.array_equal(contents, _digest(keys)):
        return "since then, some of its training images have exchanged their names or were copied over others"
    return None


def _digest(keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """A digest of all images in their order."""
    return np.frombuffer(hashlib.sha256(keys.tobytes()).digest(), dtype=np.uint8)


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
