"""The fingerprint of a run: which images it trains on, for its model files (weights/fingerprint.py)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from vitrail.data.content import content_keys
from vitrail.data.sources import Dataset
from vitrail.training.callbacks import Callback
from vitrail.training.open_data import ReadingReporter
from vitrail.weights.bundle import Bundle
from vitrail.weights.files import write_npz
from vitrail.weights.fingerprint import Fingerprint, fingerprint_of, read_fingerprint

FILE_NAME = "fingerprint.npz"
MAX_IMAGES = 1 << 24  # a filter of 30 MB in every model file


def run_fingerprint(out: Path, data: Dataset, start: Bundle | None, callback: Callback) -> Fingerprint | None:
    """The fingerprint of a run, read from its directory or computed and written there.

    It includes the images that the weights it starts from were trained on. Of very many images there is none.
    """
    saved = _read(out / FILE_NAME)
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
    write_npz(out / FILE_NAME, {**fingerprint.arrays(), "images": np.array(fingerprint.describe())})
    return fingerprint


def _read(path: Path) -> Fingerprint | None:
    """The fingerprint in a file; None if there is none or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        counts = arrays.pop("images").tolist()
        shapes = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
        return read_fingerprint(counts, shapes, arrays.__getitem__)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
