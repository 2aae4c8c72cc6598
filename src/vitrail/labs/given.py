"""What a lab is given: data, opened and cut to what a lab can manage, in words, enlarged; and what a model
and a study take from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.augment import Augment
from vitrail.data.chance import shuffle
from vitrail.data.mixing import Mixing
from vitrail.data.sources import Dataset, Split, open_data
from vitrail.evaluation.forward import sized
from vitrail.labs.study import settled
from vitrail.preprocess import Preprocess
from vitrail.recipes.small import patch_for
from vitrail.training.settings import Recipe

MOST = 10_000  # pictures: more would make a lab long
TINY = 16  # a side below this gets patches of 2 pixels: with 4, there would be hardly any
FILE_SIDE = 32  # of pictures that come as files


# ---- data -----------------------------------------------------------------------------------


def opened(data: str | Path | None, train: int = MOST, held_out: int = MOST) -> Dataset:
    """The data of a lab, scikit-learn's digits where none is given: at most so many to learn from, and to
    judge by."""
    found = open_data("digits" if data is None else data)
    ours, theirs = part_of(found.train, train, seed=0), part_of(found.held_out, held_out, seed=0)
    return replace(found, train=ours, val=theirs, test=None)


def part_of(split: Split, count: int, seed: int) -> Split:
    """So many of the pictures, every class as often as it can be; the same ones for the same seed."""
    if count >= len(split):
        return split
    order = shuffle([seed, 1], len(split))
    labels = torch.from_numpy(split.labels)[order]
    kinds = labels if labels.ndim == 1 else labels.argmax(dim=1)
    turn = torch.zeros(len(order), dtype=torch.int64)  # how many of the same class come before
    for kind in kinds.unique():
        turn[kinds == kind] = torch.arange(int((kinds == kind).sum()))
    first = turn.sort(stable=True).indices[:count]
    return split.take(order[first].sort().values.numpy())


def described(data: Dataset) -> str:
    """The data in a few words, for a sentence."""
    return f"{data.name}, {len(data.train):,} pictures to learn from and {len(data.held_out):,} held out"


def enlarged(data: Dataset, size: int | tuple[int, int]) -> Dataset:
    """Pictures in arrays at another size, once and for all; files come at the size that is asked for."""
    to = Preprocess(size=size, mean=(0.0,) * (data.channels or 3), std=(1.0,) * (data.channels or 3))
    return replace(data, train=sized(data.train, to), val=sized(data.held_out, to), test=None)


# ---- what follows from it -------------------------------------------------------------------


def fields_for(data: Dataset) -> dict[str, Any]:
    """What a model takes from the pictures: their size, their channels, and patches that fit."""
    sides = (FILE_SIDE, FILE_SIDE) if data.train.images is None else data.train.images.shape[1:3]
    return {
        "size": tuple(sides),
        "patch": tuple(patch_of(side) for side in sides),
        "channels": data.channels or 3,
    }


def patch_of(side: int) -> int:
    """As recipes have it, but 2 for the tiniest pictures: a single pixel is no part of a picture."""
    return 2 if side < TINY and side % 2 == 0 else patch_for(side)


def of_the_notes(data: Dataset) -> dict[str, Any]:
    """The same for the recipe `mnist-notes`, whose large first positions hide what learning makes of them:
    here they are as small as the paper's."""
    return fields_for(data) | {"position_sigma": None}


def plainly(data: Dataset, epochs: int, **model: Any) -> Mapping[str, Any]:
    """Changes to the recipe `small` that leave only the model and AdamW: nothing that hides what an arm does.

    Pictures come as they are, the weights that are judged are the last ones, and no block is left out.
    """
    fields = {} if data.train.images is None else fields_for(data)  # files as large as the recipe has them
    return {
        "recipe": "small",
        "epochs": epochs,
        "ema": None,
        "smoothing": 0.0,
        "augment": vars(Augment()),
        "mixing": vars(Mixing()),
        "save_every": epochs,
        "evaluate_every": epochs,
        "model": {"drop_path": 0.0, **fields, **model},
    }


def recipe_of(data: Dataset, shared: Mapping[str, Any], arm: Mapping[str, Any]) -> Recipe:
    """All settings of an arm of a study with these changes."""
    changes = {name: value for name, value in shared.items() if name != "recipe"}
    return settled(shared["recipe"], data, arm, changes, None, 0)
