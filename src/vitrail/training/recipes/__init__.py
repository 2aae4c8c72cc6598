"""Recipes: functions from a data set to everything a run needs.

The docstring of each gives the accuracy we measured, or the published one and that we have not run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vitrail.base.errors import ConfigError, suggest
from vitrail.images.formats.sources import Dataset
from vitrail.training.recipes.settings import Recipe

if TYPE_CHECKING:
    from vitrail.training.recipes.auto import RunContext


def recipe(name: str, data: Dataset, context: RunContext | None = None) -> Recipe:
    """The recipe of this name for this data; `auto` also takes the device and the user's wishes."""
    from vitrail.training.recipes.auto import auto

    functions = recipes()
    if name not in functions:
        raise ConfigError(f"unknown recipe {name!r}. {suggest(str(name), functions)}")
    return auto(data, context) if name == "auto" else functions[name](data)


def recipes() -> dict[str, Callable[[Dataset], Recipe]]:
    """All recipes by name."""
    from vitrail.training.recipes import auto, published, small

    return {
        "auto": auto.auto,
        "small": small.small,
        "digits": small.digits,
        "mnist-weak": small.mnist_weak,
        "mnist-notes": small.mnist_notes,
        "mnist": small.mnist,
        "cifar10-small": small.cifar10,
        "cifar10-tiny": small.cifar10_tiny,
        "paper-finetune": published.paper_finetune,
        "augreg": published.augreg,
        "simple-vit": published.simple_vit,
        "deit3": published.deit3,
        "mae-finetune": published.mae_finetune,
    }
