"""Recipes: a function from a data set to everything a run needs. Each says what it was measured to give."""

from __future__ import annotations

from collections.abc import Callable

from vitrail.data.sources import Dataset
from vitrail.errors import ConfigError, suggest
from vitrail.training.settings import Recipe


def recipe(name: str, data: Dataset) -> Recipe:
    """The recipe of this name for this data."""
    found = recipes()
    if name not in found:
        raise ConfigError("The recipe must be one there is.", repr(name), suggest(str(name), found))
    return found[name](data)


def recipes() -> dict[str, Callable[[Dataset], Recipe]]:
    from vitrail.recipes import small

    return {"small": small.small, "digits": small.digits, "cifar10-small": small.cifar10}
