"""The data of a run, with the validation set that its settings ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.data.class_names import ClassNames, rename_classes
from vitrail.data.classes import check_empty_classes
from vitrail.data.holdout import VAL_FRACTION
from vitrail.data.sources import Dataset, open_dataset
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
        callback: receives a message now and then while many files are read.
    """
    split = {name: settings.get(name, default) for name, default in SPLIT_FIELDS.items()}
    report = ReadingReporter(callback, "to choose the validation set")
    dataset = data if isinstance(data, Dataset) else open_dataset(data, **split, progress=report)
    dataset = dataset if classes is None else rename_classes(dataset, classes)
    check_empty_classes(dataset)
    unused = [name for name, default in SPLIT_FIELDS.items() if split[name] != default]
    if unused and (isinstance(data, Dataset) or not dataset.held_out):
        note = f"Not used, since the data has its own validation or test set: {', '.join(unused)}."
        dataset = replace(dataset, notes=[*dataset.notes, note])
    return dataset


class ReadingReporter:
    """A message about the files that were read, every ten seconds.

    Args:
        purpose: why they are read, for the message.
    """

    def __init__(self, callback: Callback, purpose: str) -> None:
        self.callback, self.purpose, self.last = callback, purpose, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self.last > _REPORT_SECONDS:
            self.last = time.monotonic()
            self.callback.on_message(f"Read {done:,} of {total:,} files {self.purpose}.")
