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
from vitrail.weights.describe import fitted
from vitrail.weights.load import load


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
    dataset = data if isinstance(data, Dataset) else open_data(data, seed=int(changes.get("seed", 0)))
    chosen = settle(recipe, dataset, start, changes)
    return run(dataset, chosen, out, start=start, resume=resume, listener=listener)


def settle(name: str, data: Dataset, start: str | Path | None, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with the user's changes."""
    chosen = recipe_for(name, data)
    fields = dict(changes)
    model = dict(fields.pop("model", None) or {})
    nested = {part: fields.pop(part) for part in ("augment", "mixing") if part in fields}
    known = list(TrainConfig.__dataclass_fields__)
    for key in fields:
        if key not in known:
            raise ConfigError(
                "A run takes the fields of TrainConfig.", f"{key}={show(fields[key])}", suggest(key, known)
            )
    settings = chosen.train
    for part, more in nested.items():
        settings = replace(settings, **{part: replace(getattr(settings, part), **more)})
    settings = replace(settings, **fields)
    config = replace(chosen.model, **model)
    preprocess = chosen.preprocess
    if start is not None:
        bundle = load(start, classes=config.classes, **({"size": model["size"]} if "size" in model else {}))
        config, preprocess = bundle.model.config, bundle.preprocess or preprocess
    elif config.pixels != preprocess.target or config.channels != preprocess.channels:
        preprocess = fitted(preprocess, config)
    return Recipe(config, preprocess, settings)
