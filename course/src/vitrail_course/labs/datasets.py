"""Data sets of the labs (loading, subsets, resizing), and model and recipe settings that depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.evaluation.forward import resize_split
from vitrail.experiment.study import resolve_arm
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import Dataset, Split, open_dataset
from vitrail.images.preprocess import Preprocess
from vitrail.images.rng import random_permutation
from vitrail.training.recipes.settings import Recipe
from vitrail.training.recipes.small import choose_patch

_MAX_IMAGES = 10_000  # keeps a lab's run time in minutes
TINY_SIDE = 16  # images smaller than this get patches of 2 pixels; with 4 there would be too few tokens
_FILE_SIDE = 32  # size to which image files are resized


# ---- data -----------------------------------------------------------------------------------


def load_dataset(
    data: str | Path | None, max_train: int = _MAX_IMAGES, max_held_out: int = _MAX_IMAGES
) -> Dataset:
    """A data set with at most so many training and held-out images; scikit-learn's digits by default."""
    dataset = open_dataset("digits" if data is None else data)
    train = stratified_subset(dataset.train, max_train, seed=0)
    held_out = stratified_subset(dataset.eval_split, max_held_out, seed=0)
    return replace(dataset, train=train, val=held_out, test=None)


def stratified_subset(split: Split, count: int, seed: int) -> Split:
    """A subset of `count` images with classes as balanced as possible, determined by the seed."""
    if count >= len(split):
        return split
    order = random_permutation([seed, 1], len(split))
    labels = torch.from_numpy(split.labels)[order]
    classes = labels if labels.ndim == 1 else labels.argmax(dim=1)
    rank = torch.zeros(len(order), dtype=torch.int64)  # how many images of the same class come before
    for label in classes.unique():
        rank[classes == label] = torch.arange(int((classes == label).sum()))
    first = rank.sort(stable=True).indices[:count]
    return split.take(order[first].sort().values.numpy())


def describe_dataset(data: Dataset) -> str:
    """The name and the size of a data set, for a sentence."""
    return f"{data.name}, {len(data.train):,} training images and {len(data.eval_split):,} held-out images"


def resize_dataset(data: Dataset, size: int | tuple[int, int]) -> Dataset:
    """The data set with its image arrays resized; image files are resized when they are read."""
    channels = data.channels or 3
    target = Preprocess(size=size, mean=(0.0,) * channels, std=(1.0,) * channels)
    train, held_out = resize_split(data.train, target), resize_split(data.eval_split, target)
    return replace(data, train=train, val=held_out, test=None)


# ---- settings -------------------------------------------------------------------------------


def input_fields(data: Dataset) -> dict[str, Any]:
    """The config fields that depend on the images: size, patch and channels."""
    sides = (_FILE_SIDE, _FILE_SIDE) if data.train.images is None else data.train.images.shape[1:3]
    return {
        "size": tuple(sides),
        "patch": tuple(patch_size(side) for side in sides),
        "channels": data.channels or 3,
    }


def patch_size(side: int) -> int:
    """The patch size of the recipes, but 2 for tiny images instead of a single pixel."""
    return 2 if side < TINY_SIDE and side % 2 == 0 else choose_patch(side)


def lecture_model_fields(data: Dataset) -> dict[str, Any]:
    """The config fields for the recipe `mnist-notes`, the model of the lecture notes.

    The recipe initializes position embeddings with a large variance, which hides what training changes in
    them. Here they are as small as in the paper.
    """
    return input_fields(data) | {"position_sigma": None}


def plain_settings(data: Dataset, epochs: int, **model: Any) -> Mapping[str, Any]:
    """Changes to the recipe `small` that turn off everything that could hide the effect of an arm.

    No augmentation, no label smoothing, no drop path, and the raw weights of the last step instead of an
    average.
    """
    fields = {} if data.train.images is None else input_fields(data)  # for files, the recipe sets the size
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


def arm_recipe(data: Dataset, shared: Mapping[str, Any], arm: Mapping[str, Any]) -> Recipe:
    """The recipe of an arm, given the changes that all arms share."""
    changes = {name: value for name, value in shared.items() if name != "recipe"}
    return resolve_arm(shared["recipe"], data, arm, changes, None, 0)
