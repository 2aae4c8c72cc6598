"""A model judged on a data set: one pass over the pictures, then everything that follows from it.

found = vt.evaluate("pets.safetensors", "pets/", probe=["knn"])
found.scores.top1, found.calibration.temperature, found.probes
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.loader import Corrupt
from vitrail.data.sources import Dataset, Split, open_data
from vitrail.errors import InputError, printable, suggest
from vitrail.evaluation.calibration import Calibration, calibrate, check_precision
from vitrail.evaluation.forward import BATCH, outputs_of
from vitrail.evaluation.metrics import Scores, real_accuracy, real_labels, score
from vitrail.evaluation.probes import (
    Labelled,
    Layers,
    Row,
    check_layers,
    check_probes,
    collector,
    parts_of,
    unpack,
)
from vitrail.evaluation.probes import probe as run_probes
from vitrail.fields import show
from vitrail.memory import check_fits, forward_bytes
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load
from vitrail.weights.table import listed

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = 64 << 30  # of features in memory
MOST_BATCH = 1_000_000
WORDNET = re.compile(r"n\d{8}")

Ahead = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Real:
    """Accuracy by ImageNet-ReaL labels, and the number of pictures that have any."""

    accuracy: float
    count: int


@dataclass(frozen=True)
class Evaluation:
    """What was found out about a model."""

    data: str
    split: str
    pictures: int
    """In the split; `scores.count` could be read."""
    classes: list[str]
    scores: Scores | None
    """None for a model without a head."""
    calibration: Calibration | None = None
    """None where a picture can show several classes."""
    real: Real | None = None
    probes: list[Row] = field(default_factory=list)
    corrupt: dict[str, str] = field(default_factory=dict)
    """Pictures that could not be read, and why; they count for nothing."""
    notes: list[str] = field(default_factory=list)
    """What was decided on the way, a sentence each."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return asdict(self)


def evaluate(
    bundle: Bundle | str | Path,
    data: Dataset | str | Path,
    *,
    split: str | None = None,
    batch: int = BATCH,
    workers: int = 2,
    real: str | Path | Sequence[Sequence[int]] | None = None,
    probe: Sequence[str] = (),
    layers: Layers = None,
    precision: float = 0.95,
    ahead: Ahead = lambda part, done, of: None,
) -> Evaluation:
    """Judge a model on a data set. Pictures that cannot be read are named and left out.

    Args:
        bundle: a model, or what `vitrail.load` takes.
        data: a data set, or what `open_data` takes.
        split: train, val or test; when not given, test, or val where there is no test.
        batch, workers: how many pictures go through at once, and threads that read them. They change
            no result, and nor does the number of processes, where torch.distributed has started some.
        real: a file with ImageNet-ReaL labels, or the labels.
        probe: any of knn, linear, fewshot, which are fitted on train.
        layers: blocks whose features are probed, from 0, or "all"; the last when not given.
        precision: what the threshold for an answer is to give.
        ahead: told what is going on: (split, pictures done, pictures in all).
    """
    start = time.perf_counter()
    names = check_probes([probe] if isinstance(probe, str) else probe)
    check_precision(precision)
    if not isinstance(batch, int) or not 1 <= batch <= MOST_BATCH:
        raise InputError(f"batch must be a whole number from 1 to {MOST_BATCH:,}, not {show(batch)}.")
    bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
    data = data if isinstance(data, Dataset) else open_data(data)
    word, pictures = choose_split(data, split)
    check_model(bundle, data, names)
    notes = list(data.notes)
    columns = match_classes(bundle, data.classes, notes) if bundle.model.config.classes else None
    truth = None if real is None else real_labels(real, pictures.names, bundle.model.config.classes, notes)
    wanted = check_layers(layers, bundle.model.config.depth) if names else []
    corrupt = Corrupt("skip")
    how: dict[str, Any] = {"batch": batch, "workers": workers, "corrupt": corrupt, "ahead": ahead}

    logits, features, kept = one_pass(bundle, pictures, wanted, word, **how)
    if not kept.any():
        got = f"{len(kept):,} in {word} of {printable(data.name)}, none of which could"
        raise InputError("There must be pictures that can be read.", got, first_reason(corrupt))
    scores = calibration = None
    if columns is not None:
        ours = logits.numpy()[:, columns]
        scores = score(ours, pictures.labels, data.classes, kept, pictures.names)
        if not data.several:
            stored = dict(bundle.card.metrics)
            calibration = calibrate(ours[kept], pictures.labels[kept], precision, stored)
            if not calibration.fitted:
                notes.append("The temperature stays 1: these pictures hold nothing to fit it by.")
    rows = []
    if names:
        known = data.train
        _, learnt, readable = one_pass(bundle, known, wanted, "train", **how)
        train = Labelled(learnt[readable], torch.from_numpy(known.labels)[readable])
        test = Labelled(features[kept], torch.from_numpy(pictures.labels)[kept])
        if word == "train":
            notes.append("The probes are judged by the pictures they were fitted on.")
        rows = run_probes(names, train, test, len(data.classes), wanted, device_of(bundle))
    return Evaluation(
        data=data.name,
        split=word,
        pictures=len(pictures),
        classes=list(data.classes),
        scores=scores,
        calibration=calibration,
        real=None if truth is None else Real(*real_accuracy(logits.numpy(), truth, kept)),
        probes=rows,
        corrupt=corrupt.names,
        notes=notes,
        seconds=time.perf_counter() - start,
    )


def device_of(bundle: Bundle) -> torch.device:
    return next(bundle.model.parameters()).device


def first_reason(corrupt: Corrupt) -> str:
    return next((f"The first: {reason}" for reason in corrupt.names.values()), "Check the data.")


# ---- the pass -------------------------------------------------------------------------------


def one_pass(
    bundle: Bundle,
    pictures: Split,
    layers: Sequence[int],
    word: str,
    *,
    batch: int,
    workers: int,
    corrupt: Corrupt,
    ahead: Ahead,
) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
    """Logits (N, K), features (N, layers, parts, D) where layers are wanted, and which were read (N,)."""
    model, config = bundle.model, bundle.model.config
    assert bundle.preprocess is not None
    numbers = config.classes + len(layers) * len(parts_of(config)) * config.width
    if 4 * numbers * len(pictures) > MOST_BYTES:
        got = f"{numbers:,} numbers for each of {len(pictures):,} pictures"
        raise InputError("Features must fit in memory.", got, "Probe fewer layers, or fewer pictures.")
    if device_of(bundle).type == "cpu":
        count = min(batch, len(pictures))
        do = "use a smaller --batch or --size"
        check_fits(forward_bytes(config, count), config, count, "An evaluation", do)
    together = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    rows, kept = outputs_of(
        model,
        pictures,
        bundle.preprocess,
        compute=collector(model, layers) if layers else None,
        batch=batch,
        rank=rank,
        ranks=ranks,
        workers=workers,
        corrupt=corrupt,
        ahead=lambda done: ahead(word, min(done * ranks, len(pictures)), len(pictures)),
    )
    if ranks > 1:
        rows, kept = add_up(rows, kept, numbers if layers else config.classes, corrupt, device_of(bundle))
    logits, features = unpack(rows, config, layers) if layers else (rows, rows[:, :0])
    return logits, features, kept.numpy() > 0


def add_up(
    rows: Tensor, kept: Tensor, numbers: int, corrupt: Corrupt, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What all processes found; every one of them gets the whole."""
    if rows.shape[1] != numbers:  # a process without a batch does not know how wide a row is
        rows = torch.zeros(len(rows), numbers)
    found = []
    for tensor in (rows, kept):
        there = tensor.to(device)
        dist.all_reduce(there)
        found.append(there.cpu())
    named: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(named, corrupt.names)
    for names in named:
        corrupt.names |= names
    return found[0], found[1]


# ---- does the model fit the data? -----------------------------------------------------------


def choose_split(data: Dataset, split: str | None) -> tuple[str, Split]:
    """The split that was asked for; without a wish test, or val."""
    there = {word: getattr(data, word) for word in ("train", "val", "test") if getattr(data, word)}
    word = split if split is not None else "test" if "test" in there else "val"
    if word not in there:
        got = f"{word!r}, which {printable(data.name)} does not have"
        raise InputError("The split must be one that holds pictures.", got, suggest(word, there))
    return word, there[word]


def check_model(bundle: Bundle, data: Dataset, probes: Sequence[str]) -> None:
    config = bundle.model.config
    if bundle.preprocess is None:
        raise InputError("The model must take pictures.", f"one that takes {config.input}", "Use another.")
    if data.channels not in (None, config.channels):
        raise InputError(
            f"The pictures must have the model's {config.channels} channels.",
            f"{data.channels} in {printable(data.name)}",
            f"Load the model with channels={data.channels}.",
        )
    if not config.classes and not probes:
        raise InputError("A model without a head can only be probed.", "no probe", "Ask for knn or linear.")
    if data.several and probes:
        raise InputError(
            "Probes need one class for each picture.",
            f"{printable(data.name)}, where a picture can show several",
            "Leave out the probes.",
        )


def match_classes(bundle: Bundle, classes: Sequence[str], notes: list[str]) -> list[int]:
    """The model's class for each class of the data: by name where both have names, else by number."""
    count, labels = bundle.model.config.classes, bundle.labels
    if count != len(classes):
        raise InputError(
            "The model must have the classes of the data.",
            f"a model of {count:,} for data of {len(classes):,}",
            "Train a head for these, or load the model with classes=0 and probe its features.",
        )
    numbers = list(range(count))
    if labels is None or list(labels) == list(classes):
        return numbers
    if sorted(labels) == sorted(classes) and len(set(labels)) == count:
        notes.append("The data has the model's classes in another order; they are matched by name.")
        return [labels.index(name) for name in classes]
    # ImageNet's folders are called n01440764 and so on, and their order is that of its classes.
    coded = all(map(WORDNET.fullmatch, classes)) and not any(map(WORDNET.fullmatch, labels))
    if coded or list(classes) == [str(number) for number in numbers]:
        first = f"{printable(classes[0])} is {printable(labels[0])}"
        notes.append(f"The data's classes have no names; they are matched by number: {first}.")
        return numbers
    ours, theirs = ([n for n in a if n not in set(b)] for a, b in ((labels, classes), (classes, labels)))
    raise InputError(
        "The model must have the classes of the data.",
        f"in the model alone {listed(ours) or 'a name twice'}, in the data alone {listed(theirs) or 'none'}",
        "Rename the data's classes, or the model's labels.",
    )
