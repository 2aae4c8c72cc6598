"""The validation set of data that has none: chosen by the content of each image.

An image is held out if its content key (content.py), as a fraction of 2^64, is below `val_fraction`. So the
choice depends neither on the seed of a run, nor on names or folders, nor on the other images: adding an image
moves no other one, and equal images land in the same set. Three rules come before it:

- a class with a single image trains on it;
- a class with two or more of which none is held out gives its lowest key to validation;
- a class with two or more of which all are held out gives its highest key to training.

In multi-label data they hold for each label. Equal images count as one, and follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.base.fields import as_integer, is_real, short_repr
from vitrail.images.classes import check_empty_classes, class_counts
from vitrail.images.content import Progress, content_keys
from vitrail.images.formats.lazy import LazySequence, Selection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.formats.sources import Dataset

VAL_FRACTION = 0.2
_MAX_SEED = 2**63 - 1


def hold_out_validation(
    data: Dataset,
    fraction: float = VAL_FRACTION,
    split_seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Dataset:
    """Hold out a part of train as val.

    Args:
        fraction: the expected fraction of the images.
        split_seed: 0 compares the keys themselves; another number draws another set.
        progress: called as progress(files read, files in total).
    """
    if not is_real(fraction) or not 0 < fraction < 1:
        raise InputError(f"val_fraction must be between 0 and 1, such as 0.2, not {short_repr(fraction)}.")
    as_integer("split_seed", split_seed, 0, _MAX_SEED)
    train, keys = data.train, data.train.keys
    if isinstance(keys, LazySequence):
        numbers = partial(_draw_blocks, keys, split_seed)
        out = choose_in_blocks(numbers, train.labels, class_counts(train, len(data.classes)), fraction)
    else:
        keys = content_keys(train, data.source, progress)
        train = replace(train, keys=keys)
        out = choose_held_out(_draw(keys, split_seed), train.labels, fraction)
    if not out.any() or out.all():
        check_empty_classes(data)  # whose message is more specific if labels are not class numbers
        different = len(np.unique(np.asarray(keys)))
        equal = f" ({different:,} different)" if different < len(train) else ""
        raise InputError(
            f"{printable(data.name)} has too few images for a validation set: {len(train):,}{equal} in "
            f"{len(data.classes):,} classes. Some class must have at least two different images."
        )
    chosen, others = Selection(out), Selection(~out)
    redrawn = f", split_seed {split_seed}" if split_seed else ""
    note = (
        f"{len(chosen):,} of {len(out):,} images are held out for validation, chosen by their content "
        f"(val_fraction {fraction:g}{redrawn})."
    )
    del out  # a byte for each image
    val, train = train.take(chosen), train.take(others)
    return replace(data, train=train, val=val, notes=[*data.notes, note], held_out=True)


def _draw_blocks(keys: LazySequence[np.uint64], split_seed: int) -> Iterator[NDArray[np.uint64]]:
    return (_draw(block, split_seed) for block in keys.blocks())


def _draw(keys: NDArray[np.uint64], split_seed: int) -> NDArray[np.uint64]:
    """The number that decides for each key; equal keys have equal numbers."""
    if not split_seed:
        return keys
    import torch

    from vitrail.images.rng import random_integers

    numbers = random_integers([split_seed, torch.from_numpy(keys.view(np.int64))], 1)[:, 0]
    return numbers.numpy().view(np.uint64)


def choose_held_out(
    numbers: NDArray[np.uint64], labels: NDArray[np.int64], fraction: float
) -> NDArray[np.bool_]:
    """(N,) which images are held out.

    Args:
        numbers: (N,) uniform over all uint64, equal for equal images.
        labels: (N,) class numbers, or (N, K) of 0 and 1.
    """
    if not labels.size:
        return np.zeros(len(labels), dtype=bool)
    contents, content_of = np.unique(numbers, return_inverse=True)  # in ascending order
    out = contents < np.uint64(int(fraction * 2**64))
    rows, classes = np.nonzero(labels) if labels.ndim == 2 else (np.arange(len(labels)), labels)
    pairs = np.unique(classes.astype(np.int64) * len(contents) + content_of[rows])
    owner, content = np.divmod(pairs, len(contents))  # by class, each from its lowest to its highest
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    several = np.diff(starts, append=len(pairs)) > 1
    alone = np.zeros(len(contents), dtype=bool)
    alone[content[starts[~several]]] = True
    out &= ~alone
    without_val = several & (_count(out, content, starts) == 0)
    lowest = np.minimum.reduceat(np.where(alone[content], len(contents), content), starts)[without_val]
    out[lowest[lowest < len(contents)]] = True
    without_train = several & (_count(~out, content, starts) == 0)
    out[np.maximum.reduceat(content, starts)[without_train]] = False
    return out[content_of]


# ---- very many images -------------------------------------------------------------------------


def choose_in_blocks(
    numbers: Callable[[], Iterable[NDArray[np.uint64]]],
    labels: NDArray[np.int64],
    counts: NDArray[np.int64],
    fraction: float,
) -> NDArray[np.bool_]:
    """The same choice as `choose_held_out` for labels (N,), without sorting all numbers.

    The three rules can only matter to a class that is all on one side, and to classes that share images with
    such a class. Only these are looked at as a whole.

    Args:
        numbers: returns all numbers in blocks; called a few times.
        counts: (K,) the number of images of each class.
    """
    out = np.empty(len(labels), dtype=bool)
    held_out = np.zeros(len(counts), dtype=np.int64)
    for first, block in _with_starts(numbers()):
        part = block < np.uint64(int(fraction * 2**64))
        out[first : first + len(block)] = part
        held_out += np.bincount(labels[first : first + len(block)][part], minlength=len(counts))
    special = (counts > 0) & ((held_out == 0) | (held_out == counts))
    shared = np.zeros(0, dtype=np.uint64)
    while special.any():
        rows, found = _rows_of(numbers(), labels, special, shared)
        before, shared = (int(special.sum()), len(shared)), np.unique(found)
        special[labels[rows]] = True
        if (int(special.sum()), len(shared)) == before:  # they share images with no other class
            out[rows] = choose_held_out(found, labels[rows], fraction)
            break
    return out


def _rows_of(
    blocks: Iterable[NDArray[np.uint64]],
    labels: NDArray[np.int64],
    special: NDArray[np.bool_],
    also: NDArray[np.uint64],
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """The rows of some classes, and those with some numbers; and their numbers."""
    rows, found = [], []
    for first, block in _with_starts(blocks):
        chosen = special[labels[first : first + len(block)]]
        if len(also):
            chosen |= also[np.searchsorted(also, block).clip(max=len(also) - 1)] == block
        rows.append(first + np.flatnonzero(chosen))
        found.append(block[chosen])
    return np.concatenate(rows), np.concatenate(found)


def _with_starts(blocks: Iterable[NDArray[np.uint64]]) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    first = 0
    for block in blocks:
        yield first, block
        first += len(block)


def _count(
    chosen: NDArray[np.bool_], content: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many of the contents of each class are chosen."""
    return np.add.reduceat(chosen[content].astype(np.int64), starts)
