"""The data of a run, with the validation set that its settings ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.base.progress import ProgressBars
from vitrail.images.classes import ClassNames, check_empty_classes, rename_classes
from vitrail.images.formats.sources import Dataset, open_dataset
from vitrail.images.holdout import VAL_FRACTION
from vitrail.training.callbacks import Callback

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
    with ReadingReporter(callback, "to choose the validation set") as report:
        given = isinstance(data, Dataset)
        dataset = data if given else open_dataset(data, **split, progress=report, on_rows=report.on_rows)
    dataset = dataset if classes is None else rename_classes(dataset, classes)
    check_empty_classes(dataset)
    unused = [name for name, default in SPLIT_FIELDS.items() if split[name] != default]
    if unused and (isinstance(data, Dataset) or not dataset.held_out):
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
