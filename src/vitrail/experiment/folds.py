"""Cross-validation: k runs, each evaluated on the part of the images that the others are trained on.

With few images, the accuracy on a single validation set says little: another fifth of the images may give
several percent more or less. Here every image is predicted once, by a model that was not trained on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import FileError, InputError, MissingExtra, option, printable
from vitrail.base.fields import as_integer
from vitrail.base.safe_files import PARTIAL, write_text
from vitrail.base.summary import Summary
from vitrail.experiment.interval import check_extra, fraction_interval
from vitrail.images.classes import check_empty_classes
from vitrail.images.content import content_keys
from vitrail.images.formats.sources import Dataset, concatenate, open_dataset
from vitrail.training.callbacks import Callback
from vitrail.training.console_lines import show_run
from vitrail.training.parallel import init_process_group
from vitrail.training.run_directory import environment
from vitrail.training.start import train
from vitrail.views.folds_page import folds_page
from vitrail.views.html_page import check_extras, write_page

_RECORD, _REPORT = "folds.json", "report.html"


@dataclass(frozen=True)
class Fold:
    """One run of a cross-validation."""

    number: int
    """From 1."""
    train_images: int
    val_images: int
    accuracy: float
    """On the images of this fold, after the last epoch; no epoch is selected by it."""
    loss: float
    out: str


@dataclass(frozen=True, repr=False)
class CrossValidation(Summary):
    """The results of all folds."""

    out: Path
    data: str
    folds: list[Fold]
    unused_test_images: int
    """The data's own test set is in no fold."""
    environment: Mapping[str, Any] = field(default_factory=environment)

    def summary(self) -> dict[str, str]:
        """The folder, the mean accuracy and its spread."""
        low, high = self.interval
        accuracy = f"{self.mean:.2%}, 95% interval {low:.2%} to {high:.2%}"
        return {"folder": str(self.out), "folds": str(len(self.folds)), "mean accuracy": accuracy}

    @property
    def mean(self) -> float:
        """The mean accuracy of the folds."""
        return fmean(fold.accuracy for fold in self.folds)

    @property
    def deviation(self) -> float:
        """The standard deviation of the accuracy between folds."""
        return stdev(fold.accuracy for fold in self.folds)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean, by Wilson's score with the variance between folds. The
        folds share most of their training images, so that it is a little too narrow."""
        images = sum(fold.val_images for fold in self.folds)
        found = fraction_interval([fold.accuracy for fold in self.folds], images)
        assert found is not None
        return found

    def as_json(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("mean", "deviation", "interval")}
        derived["count"] = len(self.folds)
        return {**derived, **{name: value for name, value in asdict(self).items() if name != "out"}}


def cross_validate(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    folds: int = 5,
    resume: bool = False,
    verbose: bool = True,
    callback: Callback | None = None,
    **options: Any,
) -> CrossValidation:
    """Train one model for each fold, and average their accuracies.

    The images of the training and validation sets are divided by class and content: the same images give the
    same folds, and copies of an image are in one fold. A test set stays out.

    Args:
        data: what `vitrail.train` takes.
        out: a folder, new or empty unless `resume` is set. It gets a run directory for each fold, folds.json
            and report.html.
        folds: how many, at least 2.
        resume: run only what is missing; an unfinished fold is resumed.
        verbose: show each run, as `vitrail.train` does.
        callback: receives the events of all runs.
        options: what `vitrail.train` takes, such as epochs=10 or from_="weights.safetensors".
    """
    count = as_integer("folds", folds, 2, 100)
    if options.get("minutes") is not None:
        raise InputError(
            f"{option('folds')} and {option('minutes')} exclude each other: all folds must have the same "
            "number of epochs, which the time would decide; set the number of epochs instead."
        )
    if init_process_group().count > 1:
        raise InputError("cross-validation runs in one process; start it without torchrun.")
    check_extra()
    folder = Path(out)
    dataset = data if isinstance(data, Dataset) else open_dataset(data)
    check_empty_classes(dataset)
    images = concatenate([split for split in (dataset.train, dataset.val) if split])
    keys = content_keys(images, dataset.source_of("folds"))
    images = replace(images, keys=keys)  # for the fingerprint of each fold
    numbers = assign_folds(keys, images.labels, count)
    if not np.bincount(numbers, minlength=count).all():
        raise InputError(
            f"{printable(dataset.name)} has {len(images):,} images, too few different ones for {count} "
            "folds; use fewer folds."
        )
    _prepare_folder(folder, resume, count)
    done = []
    for number in range(count):
        held_out = numbers == number
        part = replace(
            dataset,
            train=images.take(np.flatnonzero(~held_out)),
            val=images.take(np.flatnonzero(held_out)),
            test=None,
            notes=[],
        )
        path = folder / f"fold-{number + 1}"
        with show_run(callback, verbose) as log:
            log.on_message(f"Fold {number + 1} of {count}.")
            shared: dict[str, Any] = {"report": False, "verbose": False, "callback": log, **options}
            row = train(part, out=path, resume=path.exists(), **shared).metrics[-1]
        sizes, scores = (len(part.train), int(held_out.sum())), (row["val_accuracy"], row["val_loss"])
        done.append(Fold(number + 1, *sizes, *scores, path.name))
    result = CrossValidation(folder, dataset.name, done, len(dataset.test or ()))
    write_text(folder / _RECORD, json.dumps(result.as_json(), indent=2), overwrite=True)
    try:
        check_extras()
        write_page(folder / _REPORT, folds_page(result.as_json()), overwrite=True)
    except MissingExtra:
        (callback or Callback()).on_message("No report: install vitrail[inspect].")
    return result


def assign_folds(keys: NDArray[np.uint64], labels: NDArray[np.int64], folds: int) -> NDArray[np.int64]:
    """(N,) the fold of each image, from 0: every class, in the order of its keys, is dealt out in turn.

    Args:
        keys: (N,) of the contents; equal images are in one fold.
        labels: (N,) class numbers, or (N, K) of 0 and 1, of which equal rows count as a class.
    """
    kinds = labels if labels.ndim == 1 else np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((keys, kinds))
    _, first, content = np.unique(keys[order], return_index=True, return_inverse=True)
    turn = np.empty(len(first), dtype=np.int64)
    turn[np.argsort(first)] = np.arange(len(first)) % folds  # contents in the order of class and key
    numbers = np.empty(len(keys), dtype=np.int64)
    numbers[order] = turn[content.reshape(-1)]
    return numbers


def _prepare_folder(folder: Path, resume: bool, folds: int) -> None:
    """Create the folder, or check that it is that of a cross-validation with as many folds."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    names = {name for name in names if not (resume and PARTIAL.fullmatch(name))}
    ours = {_RECORD, _REPORT, *(f"fold-{number + 1}" for number in range(folds))}
    record = folder / _RECORD
    if (names and not resume) or names - ours or (folder.exists() and not folder.is_dir()):
        advice = "" if resume else f", or add {option('resume', True)}"
        raise FileError(
            f"{option('out')} must be a new or empty folder, or that of a cross-validation with {folds} "
            f"folds, and {printable(folder)} is not; choose another folder{advice}."
        )
    if record.exists():
        before = json.loads(record.read_text()).get("count", folds)
        if before != folds:
            raise InputError(
                f"{printable(folder)} is a cross-validation with {before} folds, not {folds}; use "
                f"{option('folds', before)}, or choose another folder."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_text(record, json.dumps({"count": folds}), overwrite=True)
