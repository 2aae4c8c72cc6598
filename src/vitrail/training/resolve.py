"""The settings of a run: a recipe with the user's changes, the model, and the weights to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.base.errors import ConfigError, option
from vitrail.base.fields import short_repr
from vitrail.images.augment.mixing import Mixing
from vitrail.images.formats.sources import Dataset
from vitrail.images.preprocess import Preprocess, fit_preprocess
from vitrail.model import ViT
from vitrail.model.config import STEM_STRIDES, ViTConfig
from vitrail.model.device import find_device
from vitrail.model.presets import preset
from vitrail.training.parallel import ProcessGroup, global_batch_size
from vitrail.training.recipes import recipe as recipe_for
from vitrail.training.recipes.auto import MAX_SIDE, RunContext
from vitrail.training.recipes.settings import Recipe, TrainConfig, unknown_setting
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.load import load
from vitrail.weights.model_settings import override_preprocess
from vitrail.weights.readers.pretrained import FEW_IMAGES, pretrained_note

AUTO_BATCH = "auto"
_DROPOUT_FIELDS = ("dropout", "attention_dropout", "patch_dropout", "drop_path")  # in no weight file
_PRESET_FIELDS = ("width", "depth", "heads", "head_width", "mlp_width", "patch")  # given by a model's name
_DISTILL_FIELDS = ("distill", "distill_weight", "distill_temperature")


def resolve_recipe(
    name: str,
    data: Dataset,
    from_: str | Path | None,
    changes: Mapping[str, Any],
    size: int | tuple[int, int] | None = None,
    context: RunContext | None = None,
) -> tuple[Recipe, Bundle | None]:
    """The recipe of this name with the changes applied, and the weights to start from.

    Args:
        context: what `auto` chooses by; by default what the other arguments say.
    """
    fields, model, nested, own_preprocess = split_changes(changes)
    recipe = recipe_for(name, data, context or run_context(changes, from_, size))
    base, notes = recipe.train, recipe.notes
    if from_ is not None and recipe.train_from_file:
        base, notes = _fine_tuning_settings(recipe, fields)
    if fields.get("native") is True and "mixing" not in nested and base.mixing != Mixing():
        base = replace(base, mixing=Mixing())
        notes = (*notes, "Mixup and cutmix are off, because images of different shapes cannot be mixed.")
    inner = {part: replace(getattr(base, part), **values) for part, values in nested.items()}
    settings = replace(base, **fields, **inner)
    if recipe.lr_at_batch is not None and "lr" not in fields:
        (lr, base_batch), batch = recipe.lr_at_batch, global_batch_size(data, settings, ProcessGroup())
        settings = replace(settings, lr=lr * batch / base_batch)
        scaled = f"lr {settings.lr:g} = {lr:g} x {batch} / {base_batch}"
        notes = (*notes, f"{scaled}: it is proportional to the batch size.")
    model = with_size(model, size)
    if from_ is None:
        config, preprocess = _new_model(recipe, model)
        start = None
        if data.train.paths is not None and len(data.train) < FEW_IMAGES and config.channels == 3:
            notes = (*notes, pretrained_note(len(data.train)))
    else:
        start, config = _load_start(from_, data, {**recipe.model_from_file, **model})
        preprocess = start.preprocess or recipe.preprocess
    if own_preprocess is not None:
        said: list[str] = []
        preprocess = override_preprocess(preprocess, own_preprocess, config, said) or preprocess
        notes = (*notes, *said)
    if config.classes != len(data.classes) or data.channels not in (None, config.channels):
        raise ConfigError(
            f"the model has {config.classes} classes and {config.channels} channels, and the data "
            f"{len(data.classes)} classes and {data.channels} channels; remove model.classes and "
            "model.channels from the settings."
        )
    if settings.native and data.train.paths is None:
        raise ConfigError(
            "native is for image files, and the images of an array have one shape already; remove native."
        )
    if settings.native and config.patch_dropout:
        other = f"model.patch_dropout={config.patch_dropout:g}"
        raise ConfigError(f"native and {other} exclude each other; remove one of the two.")
    if settings.native:
        with torch.device("meta"):
            ViT(config).accept_any_size()
    return Recipe(config, preprocess, settings, notes=notes), start


def run_context(
    changes: Mapping[str, Any],
    from_: str | Path | None = None,
    size: Any = None,
    minutes: float | None = None,
    gpu: bool | None = None,
) -> RunContext:
    """What the recipe `auto` chooses by, besides the data; wrong values are reported where they are used.

    Args:
        gpu: whether the run computes on a GPU; by default what the changes say.
    """
    fields, model, *_ = split_changes(changes)
    size = size if size is not None else model.get("size")
    if size is None and "@" in str(model.get("name", "")):
        size = preset(model["name"]).size
    device = str(fields.get("device", "auto"))
    if gpu is None:  # of a word that is no device, `TrainConfig` complains
        gpu = (device == "auto" or device.startswith("cuda")) and find_device(device)[0].type == "cuda"
    epochs = fields.get("epochs")
    sides = size if isinstance(size, tuple) else (size, size)
    valid = len(sides) == 2 and all(isinstance(side, int) and 0 < side <= MAX_SIDE for side in sides)
    return RunContext(
        gpu=gpu,
        from_file=from_ is not None,
        size=size if valid else None,
        epochs=epochs if isinstance(epochs, int) and epochs > 0 else None,
        minutes=minutes,
        model=bool(model),
    )


def split_changes(
    changes: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]], Mapping[str, Any] | str | None]:
    """The changes of a recipe by its parts, checked for unknown names.

    These are fields of TrainConfig, of the model, and of augment and mixing; and of the preprocessing, or
    the name of a published one.
    """
    fields = dict(changes)
    preprocess = fields.pop("preprocess", None)
    if fields.get("batch") == AUTO_BATCH:
        del fields["batch"]  # a new run chooses it (`choose_batch`), and a saved one has chosen
    model = fields.pop("model", {})
    model = {"name": model} if isinstance(model, str) else model
    nested: dict[str, Any] = {part: fields.pop(part) for part in ("augment", "mixing") if part in fields}
    for part, values in [("model", model), *nested.items()]:
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{part} must be a mapping of its fields, such as dict(...), not {short_repr(values)}."
            )
    for name in fields:
        if name not in TrainConfig.__dataclass_fields__:
            raise ConfigError(unknown_setting(name))
    return fields, dict(model), nested, preprocess


def _fine_tuning_settings(recipe: Recipe, changes: Mapping[str, Any]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The recipe's settings for a start from a weight file, and a note of those that `changes` do not set.

    Its learning rate is for training all weights alike. Where the lower blocks have less (llrd), or only few
    weights are trained, the one from scratch is kept.
    """
    own = recipe.train_from_file
    alike = changes.get("tune", own.get("tune", "full")) == "full"
    settings = {name: value for name, value in own.items() if alike or name != "lr"}
    text = ", ".join(f"{name}={value}" for name, value in settings.items() if name not in changes)
    notes = (*recipe.notes, f"The recipe's settings for a weight file: {text}.") if text else recipe.notes
    return replace(recipe.train, **settings), notes


# ---- the model ------------------------------------------------------------------------------


def with_size(model: Mapping[str, Any], size: int | tuple[int, int] | None) -> dict[str, Any]:
    """The model's fields with the size, which may be given in one place only."""
    if size is None:
        return dict(model)
    if "size" in model or "@" in str(model.get("name", "")):
        other = " and ".join(f"{k}={short_repr(v)}" for k, v in model.items())
        raise ConfigError(
            f"the image size is given twice: by size={short_repr(size)} and by the model's {other}; remove "
            "one."
        )
    return {**model, "size": size}


def named_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's fields, with those of a preset instead of its name."""
    fields = dict(model)
    if (name := fields.pop("name", None)) is None:
        return fields
    named = preset(name)
    given = (*_PRESET_FIELDS, "size") if "@" in name else _PRESET_FIELDS
    return {**{field: getattr(named, field) for field in given}, "embedding": "linear", **fields}


def _new_model(recipe: Recipe, model: Mapping[str, Any]) -> tuple[ViTConfig, Preprocess]:
    """The recipe's model with the changes applied, and preprocessing that fits it.

    A name gives width, depth, heads and patch, linear embedding, and the size if it has "@"; the recipe gives
    the rest. Its convolutional stem is dropped where a patch is not a multiple of its stride.
    """
    fields = named_fields(model)
    if fields.get("position", recipe.model.position) != recipe.model.position:
        fields.setdefault("position_sigma", None)  # the recipe's was for its own kind of positions
    patch, stride = fields.get("patch", recipe.model.patch), STEM_STRIDES.get(recipe.model.embedding, 1)
    sides = patch if isinstance(patch, tuple) else (patch,)
    if not all(isinstance(side, int) and side % stride == 0 for side in sides):
        fields.setdefault("embedding", "linear")
    config, preprocess = replace(recipe.model, **fields), recipe.preprocess
    if config.pixels != preprocess.target or config.channels != preprocess.channels:
        preprocess = fit_preprocess(preprocess, config)
    return config, preprocess


def _load_start(from_: str | Path, data: Dataset, model: Mapping[str, Any]) -> tuple[Bundle, ViTConfig]:
    """The model of a weight file with a head for this data, and its config with the dropout fields."""
    if "name" in model:
        raise ConfigError(
            f"{option('from', from_)} and {option('model', model['name'])} exclude each other; remove "
            f"{option('model')} to start from the file, or {option('from')} to train a new model."
        )
    dropout = {key: value for key, value in model.items() if key in _DROPOUT_FIELDS}
    overrides = {key: value for key, value in model.items() if key not in _DROPOUT_FIELDS}
    start = load(from_, **{"classes": data.classes, "channels": data.channels, **overrides})
    return start, replace(start.model.config, **dropout)


# ---- the teacher ----------------------------------------------------------------------------


def resolve_distillation(settings: TrainConfig, changes: Mapping[str, Any], has_teacher: bool) -> TrainConfig:
    """With a teacher, distillation is hard by default; without one, none of its fields may be set."""
    if has_teacher and settings.distill == "none" and "distill" not in changes:
        return replace(settings, distill="hard")
    if has_teacher and settings.distill == "none":
        raise ConfigError("distill='none' excludes a teacher; remove one of the two.")
    set_alone = [name for name in _DISTILL_FIELDS if changes.get(name, "none") != "none"]
    if not has_teacher and (set_alone or settings.distill != "none"):
        name = [*set_alone, "distill"][0]
        raise ConfigError(
            f"{name}={short_repr(getattr(settings, name))} needs a teacher; add "
            f"{option('teacher', 'FILE')}, or remove {name}."
        )
    return settings
