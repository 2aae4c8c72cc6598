"""What the settings beside the weights say: sizes, labels and preprocessing.

The sizes in a config.json must agree with the tensors. The preprocessing comes from the settings, from the
model's family, or from the user.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.base.errors import ConfigError, FileError, VitrailError, printable, setting, suggest
from vitrail.base.fields import short_repr
from vitrail.images.preprocess import Preprocess, default_preprocess, fit_preprocess
from vitrail.images.published_preprocess import (
    PUBLISHED,
    complete_hf,
    from_hf,
    from_timm,
    published_preprocess,
)
from vitrail.model.config import ViTConfig, format_sides
from vitrail.weights.families.match import join_names
from vitrail.weights.readers.folder import ModelFiles

# Our fields by transformers' or timm's names. The tensors show all of these.
_SIZES = {
    **{"hidden_size": "width", "embed_dim": "width", "num_features": "width"},
    **{"num_hidden_layers": "depth", "depth": "depth"},
    **{"num_attention_heads": "heads", "num_heads": "heads"},
    **{"intermediate_size": "mlp_width", "num_channels": "channels", "in_chans": "channels"},
    **{"patch_size": "patch", "image_size": "size", "img_size": "size"},
    **{"num_register_tokens": "registers", "reg_tokens": "registers", "num_classes": "classes"},
}


def check_sizes(
    path: str, settings: Mapping[str, Any], config: ViTConfig, overrides: Collection[str]
) -> None:
    """Refuse settings that contradict the weights, except for fields that the user gives."""
    for prefix, part in _size_parts(settings).items():
        for name, field in _SIZES.items():
            value = part.get(name)
            if value is None or field in overrides or (name, value) == ("num_classes", 0):
                continue
            stored = {"patch": config.patch_pixels, "size": config.pixels, "mlp_width": config.F}.get(
                field, getattr(config, field)
            )
            if _as_side(value) != _as_side(stored):
                raise FileError(
                    f"{path}: config.json has {prefix}{name}={short_repr(value)}, but the weights have "
                    f"{short_repr(stored)}. Correct it, or pass the weight file instead of its folder."
                )


def _size_parts(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The objects of a config.json that hold sizes of the image model, by the prefix of their keys.

    Settings of other libraries than transformers (model_type) and timm (model_args) are not checked.
    """
    if isinstance(timm := settings.get("model_args"), dict):
        return {
            "model_args.": timm,
            "": {name: settings.get(name) for name in ("num_features", "num_classes")},
        }
    if "model_type" not in settings:
        return {}
    for name in ("vision_config_dict", "vision_config"):  # of two, transformers uses the first of these
        if isinstance(settings.get(name), dict):
            return {f"{name}.": settings[name]}
    return {"": settings}


def _as_side(value: Any) -> Any:
    """One number for all sides, if they are equal."""
    if isinstance(value, (list, tuple)):
        return value[0] if value and all(side == value[0] for side in value) else tuple(value)
    return value if not isinstance(value, bool) else None


def read_labels(settings: Mapping[str, Any], config: ViTConfig, notes: list[str]) -> list[str] | None:
    """transformers' id2label or timm's label_names, if they name every class.

    LABEL_0, LABEL_1, ... are not names. Names that do not fit the classes are not used; a note reports it.
    """
    timm = settings.get("pretrained_cfg")
    names = settings.get("id2label", settings.get("label_names"))
    if names is None and isinstance(timm, dict):
        names = timm.get("label_names")
    if names is None or not config.classes:
        return None
    if isinstance(names, list):
        names = {str(number): name for number, name in enumerate(names)}
    classes = [str(number) for number in range(config.classes)]
    if not isinstance(names, dict):
        what = f"they are {short_repr(names)}, not names by number"
    elif all(name == f"LABEL_{number}" for number, name in names.items()):
        return None
    else:
        missing = [number for number in classes if not isinstance(names.get(number), str)]
        unexpected = [number for number in names if number not in classes]
        if not missing and not unexpected:
            return [names[number] for number in classes]
        what = "has no name for" if missing else "names"
        what = (
            f"id2label {what} class {join_names(missing or unexpected)}, and the model has {config.classes} "
            f"classes, 0 to {config.classes - 1}"
        )
    notes.append(f"The labels in config.json were not used: {what}.")
    return None


_NAMES = ("architecture", "architectures", "model_type", "tag", "hf_hub_id", "_name_or_path")


def model_names(path: Path, settings: Mapping[str, Any]) -> Iterator[tuple[set[str], str]]:
    """The words of each name of a model, in lower case, and where it has this name.

    The names in transformers' or timm's config.json come first, then its path. The words of
    "deit_tiny_patch16_224" are deit, tiny and patch.
    """
    named: list[tuple[str, Any]] = []
    timm = settings.get("pretrained_cfg")
    for part in (settings, timm if isinstance(timm, Mapping) else {}):
        for key in _NAMES:
            value = part.get(key)
            for name in value if isinstance(value, list) else [value]:
                named.append((f"config.json, {key}", name))
    if not path.is_dir():
        named.append(("the name of the file", path.name))
    if path.is_dir() or path.stem in ("model", "pytorch_model"):  # a usual name: the folder's tells more
        folder = path.absolute() if path.is_dir() else path.absolute().parent
        named.append(("the name of the folder", folder.name))
    for where, name in named:
        if isinstance(name, str):
            yield set(re.findall("[a-z]+", name.lower())), f"{where}: {printable(name)[:80]}"


# Published for weights whose tensors look the same as those of the first.
_SAME_TENSORS = {"augreg": "deit", "google": "deit"}
_FIELDS = tuple(field.name for field in dataclasses.fields(Preprocess))
_TIMM_KEYS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


class FoundPreprocess(NamedTuple):
    """A preprocessing, and where it comes from."""

    preprocess: Preprocess | None
    origin: str
    guess: str = ""
    """If it is a guess: what was assumed, what else it may be, and how to choose."""


def find_preprocess(files: ModelFiles, family: str, config: ViTConfig, notes: list[str]) -> FoundPreprocess:
    """From the settings beside the weights, or the published preprocessing of the family.

    Args:
        family: the name of the published preprocessing that most files of the family have.
    """
    if config.input != "image":
        return FoundPreprocess(None, "")
    settings = files.settings or files.settings_beside(notes)
    other, said_by = _SAME_TENSORS.get(family, "") if config.channels == 3 else "", ""
    if other:
        for words, where in model_names(files.path, settings.get("config.json", {})):
            if not said_by and words & {family, other}:
                family, said_by = family if family in words else other, where
    published = _published(family, config)
    try:
        preprocess, origin = _from_settings(settings, published, notes) if settings else (None, "")
        if preprocess is not None:
            if not files.settings:
                origin += " beside the file"
                notes.append(f"The preprocessing is that of {origin}.")
            if preprocess.target != config.pixels:
                old, new = format_sides(preprocess.target), format_sides(config.pixels)
                notes.append(f"The preprocessing beside the weights is for {old} pixels; scaled to {new}.")
            return FoundPreprocess(fit_preprocess(preprocess, config), origin)
        reason = "The file has no preprocessing"
    except VitrailError as error:
        reason = f"The preprocessing in the folder was not used ({error})"
    origin, used = f"published for {family}", f"the one published for {family} is used"
    used += f": {_describe_values(published)}"
    if config.channels != 3:
        origin = used = "pixels are mapped to -1 ... 1"
    elif said_by:
        origin, used = f"{origin}, known from {said_by}", f"{used} (known from {said_by})"
    notes.append(f"{reason}; {used}.")
    if not other or said_by:
        return FoundPreprocess(published, origin)
    notes.append(_guess_note(published, other, config))
    return FoundPreprocess(published, f"{origin}, a guess (see the notes)", " ".join(notes[-2:]))


def _describe_values(preprocess: Preprocess) -> str:
    """Mean and std, which matter most; each as one number if the channels have the same."""
    shown = [
        str(values[0]) if len(set(values)) == 1 else f"({', '.join(map(str, values))})"
        for values in (preprocess.mean, preprocess.std)
    ]
    return f"mean {shown[0]}, std {shown[1]}"


def _guess_note(used: Preprocess, other: str, config: ViTConfig) -> str:
    """A note for an ambiguous preprocessing: how the other one differs, and how to choose it."""
    published = _published(other, config)
    values = _describe_values(published)
    if (published.resize, published.interpolation) != (used.resize, used.interpolation):
        values += f" ({published.describe()[1]})"
    return (
        f"That is a guess: files of {other} look the same and have {values}; if this is one, "
        f"give {setting('preprocess', other)}. The wrong one costs accuracy: of 1,000 ImageNet "
        "images, DeiT-Ti classified 796 correctly with mean and std of ImageNet and short side 256, and 766 "
        "with mean and std 0.5 and short side 248."
    )


def _published(family: str, config: ViTConfig) -> Preprocess:
    """The family's published preprocessing; there is none for other than three channels."""
    if config.channels == 3:
        return fit_preprocess(published_preprocess(family, max(config.pixels)), config)
    return default_preprocess(config)


def _from_settings(
    settings: Mapping[str, Any], published: Preprocess, notes: list[str]
) -> tuple[Preprocess | None, str]:
    """From preprocessor_config.json, completed by the published one, from timm's pretrained_cfg, or from
    OpenCLIP's preprocess_cfg; and which of them."""
    if "preprocessor_config.json" in settings:
        completed, added = complete_hf(settings["preprocessor_config.json"], published)
        preprocess = from_hf(completed)
        if added:
            values = ", ".join(f"{name}={short_repr(completed[name])}" for name in added)
            notes.append(
                f"preprocessor_config.json has no {', '.join(added)}; the model's own size and the usual "
                f"values of its family are used: {values}."
            )
        return preprocess, "preprocessor_config.json"
    timm = settings.get("config.json", {}).get("pretrained_cfg")
    if isinstance(timm, dict) and any(timm.get(key) for key in _TIMM_KEYS):
        return from_timm(timm), "config.json (pretrained_cfg)"
    if isinstance(spec := settings.get("open_clip_config.json", {}).get("preprocess_cfg"), dict):
        return _from_open_clip(spec, published), "open_clip_config.json (preprocess_cfg)"
    return None, ""


def _from_open_clip(spec: Mapping[str, Any], published: Preprocess) -> Preprocess:
    """The preprocessing of OpenCLIP: mean, std, interpolation, and whether images are squashed."""
    fields: dict[str, Any] = {
        name: tuple(spec[name]) for name in ("mean", "std") if isinstance(spec.get(name), (list, tuple))
    }
    if "interpolation" in spec:
        fields["interpolation"] = spec["interpolation"]
    if spec.get("resize_mode") in ("squash", "shortest"):
        fields |= {"resize": spec["resize_mode"], "resize_to": None}
    return replace(published, **fields)


def override_preprocess(
    preprocess: Preprocess | None, given: Mapping[str, Any] | str | None, config: ViTConfig, notes: list[str]
) -> Preprocess | None:
    """The preprocessing with the user's fields: mean, std, ... One number stands for every channel.

    A name is that of a published preprocessing, such as "deit".
    """
    if not given:
        return preprocess
    check_fields(given)
    if preprocess is None:
        raise ConfigError(f"preprocess is for images, but this model takes {config.input}; leave it out.")
    if isinstance(given, str):
        chosen = _published(given, config)
        notes.append(f"The preprocessing is the one published for {given}, as given.")
        return chosen
    fields = dict(given)
    if "size" in fields and (size := Preprocess(size=fields["size"]).target) != config.pixels:
        raise ConfigError(
            f"preprocess.size={format_sides(size)} is not the model's size {format_sides(config.pixels)}; "
            "leave it out, or give the model that size."
        )
    for name in ("mean", "std"):
        if isinstance(fields.get(name), (int, float)):
            fields[name] = (fields[name],) * config.channels
    if fields.get("resize", preprocess.resize) != preprocess.resize:
        fields.setdefault("resize_to", None)  # it belongs to the other way of resizing
    changed = replace(preprocess, **fields)
    if changed.channels != config.channels:
        raise ConfigError(
            f"preprocess.mean and preprocess.std have {changed.channels} values, but the model has "
            f"{config.channels} channels; give one value per channel."
        )
    for name in _FIELDS:
        if (now := getattr(changed, name)) != (before := getattr(preprocess, name)):
            notes.append(f"preprocess.{name} is {short_repr(now)} as given, instead of {short_repr(before)}.")
    return changed


def check_fields(given: Any) -> None:
    """Check that the keys are fields of Preprocess, or the name one of a published preprocessing."""
    if isinstance(given, str):
        if given not in PUBLISHED:
            raise ConfigError(
                f"unknown published preprocessing {short_repr(given)}. {suggest(given, PUBLISHED)}"
            )
        return
    if not isinstance(given, Mapping):
        raise ConfigError(f'preprocess takes a mapping such as {{"mean": 0.5}}, not {short_repr(given)}.')
    for name in given:
        if name not in _FIELDS:
            raise ConfigError(f"preprocess has no field {short_repr(name)}. {suggest(str(name), _FIELDS)}")
