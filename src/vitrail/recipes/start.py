"""`vt.train`: a recipe by its name, with the user's changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.data.sources import Dataset, open_data
from vitrail.errors import ConfigError, suggest
from vitrail.fields import show
from vitrail.recipes import recipe as recipe_for
from vitrail.training.listen import Listener
from vitrail.training.run import Run, run
from vitrail.training.settings import Recipe, TrainConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.describe import fitted
from vitrail.weights.load import load

DROPS = ("dropout", "attention_dropout", "patch_dropout", "drop_path")  # what no weight file says


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    recipe: str = "small",
    start: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **changes: Any,
) -> Run:
    """Train a model on labelled pictures.

    Args:
        data: what `vitrail.data.sources.open_data` takes: a folder of pictures, a table, an array file.
        out: the run's folder; it must be empty or new, unless `resume` is given.
        recipe: where the settings come from.
        start: a weight file to start from, of any family; its head is replaced.
        resume: go on with the run in `out`, from its last whole checkpoint.
        changes: fields of TrainConfig, such as epochs=10; and model=, augment=, mixing= with a
            mapping of theirs.
    """
    seed = changes.get("seed", 0)
    dataset = data if isinstance(data, Dataset) else open_data(data, seed=seed if type(seed) is int else 0)
    chosen, first = settle(recipe, dataset, start, changes)
    return run(dataset, chosen, out, start=first, resume=resume, listener=listener)


def settle(
    name: str, data: Dataset, start: str | Path | None, changes: Mapping[str, Any]
) -> tuple[Recipe, Bundle | None]:
    """The recipe with the user's changes, and the weights to start from."""
    chosen = recipe_for(name, data)
    fields = dict(changes)
    model = fields.pop("model", {})
    nested = {part: fields.pop(part) for part in ("augment", "mixing") if part in fields}
    for part, more in [("model", model), *nested.items()]:
        if not isinstance(more, Mapping):
            raise ConfigError(f"{part} must be a mapping of its fields.", show(more), "Such as dict(...).")
    known = list(TrainConfig.__dataclass_fields__)
    for key in fields:
        if key not in known:
            raise ConfigError(
                "A run takes the fields of TrainConfig.", f"{key}={show(fields[key])}", suggest(key, known)
            )
    inner = {part: replace(getattr(chosen.train, part), **more) for part, more in nested.items()}
    settings = replace(chosen.train, **fields, **inner)
    preprocess, first = chosen.preprocess, None
    if start is None:
        config = replace(chosen.model, **model)
        if config.pixels != preprocess.target or config.channels != preprocess.channels:
            preprocess = fitted(preprocess, config)
    else:
        drops = {key: value for key, value in model.items() if key in DROPS}
        facts = {key: value for key, value in model.items() if key not in DROPS}
        first = load(start, **{"classes": len(data.classes), "channels": data.channels, **facts})
        config, preprocess = replace(first.model.config, **drops), first.preprocess or preprocess
    if config.classes != len(data.classes) or data.channels not in (None, config.channels):
        raise ConfigError(
            "The model must have the classes of the data, and the channels of arrays.",
            f"{config.classes} and {config.channels} for {len(data.classes)} and {data.channels}",
            "Leave model.classes and model.channels out.",
        )
    return Recipe(config, preprocess, settings), first
