"""`vt.train`: a recipe by its name, with the user's changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.config import ViTConfig
from vitrail.data.classes import check_gaps
from vitrail.data.sources import Dataset, open_data
from vitrail.errors import ConfigError, suggest
from vitrail.fields import as_whole, show
from vitrail.preprocess import Preprocess
from vitrail.presets import preset
from vitrail.recipes import recipe as recipe_for
from vitrail.report.run import write_report
from vitrail.training.listen import Listener, Silent
from vitrail.training.parallel import Ranks, batch_of, join
from vitrail.training.precision import choose_machine
from vitrail.training.run import Run, run
from vitrail.training.settings import MOST_SEED, Recipe, TrainConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load
from vitrail.weights.preprocessing import fitted

DROPS = ("dropout", "attention_dropout", "patch_dropout", "drop_path")  # what no weight file says
NAMED = ("width", "depth", "heads", "head_width", "mlp_width", "patch")  # what a model's name says
DISTILL = ("distill", "distill_weight", "distill_temperature")


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    recipe: str = "small",
    start: str | Path | None = None,
    teacher: str | Path | Bundle | None = None,
    size: int | tuple[int, int] | None = None,
    resume: bool = False,
    report: bool = True,
    listener: Listener | None = None,
    **changes: Any,
) -> Run:
    """Train a model on labelled pictures.

    Args:
        data: what `vitrail.data.sources.open_data` takes: a folder of pictures, a table, an array file.
        out: the run's folder; it must be empty or new, unless `resume` is given.
        recipe: where the settings come from.
        start: a weight file to start from, of any family; its head is replaced. Some recipes have other
            settings then (`small`: tune="llrd", lr=1e-4, 10 to 40 epochs); what you give goes before.
        teacher: a model to learn from besides the labels (distillation): what `vitrail.load` takes, or
            a Bundle. It must have the classes of the data. `distill` says what is learned of it.
        size: the picture's side, or (H, W), of the model and of its preprocessing. The positions of a
            file are resampled.
        resume: go on with the run in `out`, from its last whole checkpoint.
        report: at the end, judge the best weights once more and write `out`/report.html, a page to read.
        changes: fields of TrainConfig, such as epochs=10 or tune="lora"; and model=, augment=, mixing=
            with a mapping of theirs. model= may be a name, "Ti/16" or "S/16@128", of which the
            mapping has it under "name": dict(name="Ti/16", depth=6).
    """
    seed = as_whole("seed", changes.get("seed", 0), 0, MOST_SEED)
    dataset = data if isinstance(data, Dataset) else open_data(data, seed=seed)
    check_gaps(dataset)
    chosen, first = settle(recipe, dataset, start, changes, size)
    chosen = replace(chosen, train=with_teacher(chosen.train, changes, teacher is not None))
    guide = teacher if teacher is None or isinstance(teacher, Bundle) else load(teacher)
    done = run(dataset, chosen, out, start=first, teacher=guide, resume=resume, listener=listener)
    if report:
        ranks = join()
        device = choose_machine(chosen.train.precision, ranks.local).device
        write_report(done.out, done.bundle, dataset, ranks, device, listener or Silent())
    return done


def settle(
    name: str,
    data: Dataset,
    start: str | Path | None,
    changes: Mapping[str, Any],
    size: int | tuple[int, int] | None = None,
) -> tuple[Recipe, Bundle | None]:
    """The recipe with the user's changes, and the weights to start from."""
    chosen = recipe_for(name, data)
    fields = dict(changes)
    model = fields.pop("model", {})
    model = {"name": model} if isinstance(model, str) else model
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
    usual, notes = chosen.train, chosen.notes
    if start is not None and chosen.from_file:
        usual, notes = for_a_file(chosen, fields)
    inner = {part: replace(getattr(usual, part), **more) for part, more in nested.items()}
    settings = replace(usual, **fields, **inner)
    if chosen.scaled is not None and "lr" not in fields:
        settings, notes = in_proportion(settings, chosen.scaled, data, notes)
    model = sized(model, size)
    if start is None:
        config, preprocess = fresh(chosen, model)
        first = None
    else:
        first, config = from_file(start, data, {**chosen.tuned, **model})
        preprocess = first.preprocess or chosen.preprocess
    if config.classes != len(data.classes) or data.channels not in (None, config.channels):
        raise ConfigError(
            "The model must have the classes of the data, and the channels of arrays.",
            f"{config.classes} and {config.channels} for {len(data.classes)} and {data.channels}",
            "Leave model.classes and model.channels out.",
        )
    return Recipe(config, preprocess, settings, notes=notes), first


def for_a_file(chosen: Recipe, said: Mapping[str, Any]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The recipe's settings for a start from a weight file, and a note of those that the user leaves to it.

    Its rate is for all weights: where few of them learn, it stays what it is from scratch.
    """
    few = said.get("tune", "full") not in ("full", "llrd")
    others = {name: value for name, value in chosen.from_file.items() if not (few and name == "lr")}
    ours = ", ".join(f"{name}={value}" for name, value in others.items() if name not in said)
    notes = (*chosen.notes, f"From a weight file the recipe has: {ours}.") if ours else chosen.notes
    return replace(chosen.train, **others), notes


def in_proportion(
    settings: TrainConfig, scaled: tuple[float, int], data: Dataset, notes: tuple[str, ...]
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The rate for the batch that steps will have, and a note of it besides the others."""
    (rate, usual), batch = scaled, batch_of(data, settings, Ranks())
    settings = replace(settings, lr=rate * batch / usual)
    said = f"lr {settings.lr:g} = {rate:g} x {batch} / {usual}: it grows with the batch."
    return settings, (*notes, said)


# ---- the model ------------------------------------------------------------------------------


def sized(model: Mapping[str, Any], size: int | tuple[int, int] | None) -> dict[str, Any]:
    """The model's fields with the size, which may be said in one place only."""
    if size is None:
        return dict(model)
    if "size" in model or "@" in str(model.get("name", "")):
        raise ConfigError(
            "The size of the pictures must be given once.",
            f"size={show(size)}, and " + " and ".join(f"{k}={show(v)}" for k, v in model.items()),
            "Leave out --size, or the other.",
        )
    return {**model, "size": size}


def fresh(chosen: Recipe, model: Mapping[str, Any]) -> tuple[ViTConfig, Preprocess]:
    """The recipe's model with the user's changes, and pictures that fit it.

    A name says width, depth, heads and patch, and the size if it has "@"; the recipe all else.
    """
    fields = dict(model)
    if (name := fields.pop("name", None)) is not None:
        named = preset(name)
        said = (*NAMED, "size") if "@" in name else NAMED
        fields = {**{field: getattr(named, field) for field in said}, **fields}
    if fields.get("position", chosen.model.position) != chosen.model.position:
        fields.setdefault("position_sigma", None)  # the recipe's was for its own kind of positions
    config, preprocess = replace(chosen.model, **fields), chosen.preprocess
    if config.pixels != preprocess.target or config.channels != preprocess.channels:
        preprocess = fitted(preprocess, config)
    return config, preprocess


def from_file(start: str | Path, data: Dataset, model: Mapping[str, Any]) -> tuple[Bundle, ViTConfig]:
    """A file's model for this data, and its config with what no file says."""
    if "name" in model:
        raise ConfigError(
            "A model comes from a file or is a new one by its name.",
            f"--from {show(str(start))} and --model {show(model['name'])}",
            "Leave out --model to start from the file, or --from to start anew.",
        )
    drops = {key: value for key, value in model.items() if key in DROPS}
    facts = {key: value for key, value in model.items() if key not in DROPS}
    first = load(start, **{"classes": len(data.classes), "channels": data.channels, **facts})
    return first, replace(first.model.config, **drops)


# ---- the teacher ----------------------------------------------------------------------------


def with_teacher(settings: TrainConfig, said: Mapping[str, Any], taught: bool) -> TrainConfig:
    """Where there is a teacher and nothing is said, the classes it would name are learned."""
    if taught and settings.distill == "none" and "distill" not in said:
        return replace(settings, distill="hard")
    if taught and settings.distill == "none":
        raise ConfigError(
            "A teacher is there to be learned from.",
            "distill='none' with a teacher",
            "Leave out the one or the other.",
        )
    alone = [name for name in DISTILL if said.get(name, "none") != "none"]
    if not taught and (alone or settings.distill != "none"):
        name = [*alone, "distill"][0]
        raise ConfigError(
            f"{name} needs a teacher.",
            f"{name}={show(getattr(settings, name))} without one",
            "Give --teacher FILE (in Python teacher=), or leave it out.",
        )
    return settings
