"""A config.json beside the weights: sizes that must agree with the tensors, labels, names of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from vitrail.base.errors import FileError
from vitrail.base.fields import short_repr
from vitrail.model.config import ViTConfig
from vitrail.weights.families.match import join_names

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
    for prefix, part in _size_parts(settings):
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


def _size_parts(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a config.json that hold sizes of the image model, each with the prefix of its keys.

    Settings of other libraries than transformers (model_type) and timm (model_args) are not checked.
    """
    if isinstance(timm := settings.get("model_args"), dict):
        yield "model_args.", timm
        yield "", {name: settings.get(name) for name in ("num_features", "num_classes")}
    elif "model_type" in settings:
        towers = [
            name for name in ("vision_config", "vision_config_dict") if isinstance(settings.get(name), dict)
        ]
        for name in towers[-1:]:  # of two, transformers uses the second
            yield f"{name}.", settings[name]
        if not towers:
            yield "", settings


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
    if not isinstance(names, dict):
        notes.append(
            f"The labels in config.json were not used: they are {short_repr(names)}, not names by number."
        )
        return None
    classes = [str(number) for number in range(config.classes)]
    if all(name == f"LABEL_{number}" for number, name in names.items()):
        return None
    missing = [number for number in classes if not isinstance(names.get(number), str)]
    unexpected = [number for number in names if number not in classes]
    if missing or unexpected:
        what = (
            f"has no name for class {join_names(missing)}"
            if missing
            else f"names class {join_names(unexpected)}"
        )
        notes.append(
            f"The labels in config.json were not used: id2label {what}, and the model has {config.classes} "
            f"classes, 0 to {config.classes - 1}."
        )
        return None
    return [names[number] for number in classes]


_NAMES = ("architecture", "architectures", "model_type", "tag", "hf_hub_id", "_name_or_path")


def model_names(path: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a model is called, and where: the names in transformers' or timm's config.json, then its path."""
    timm = settings.get("pretrained_cfg")
    for part in (settings, timm if isinstance(timm, Mapping) else {}):
        for key in _NAMES:
            value = part.get(key)
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    yield f"config.json, {key}", name
    if path.is_dir():
        yield "the name of the folder", path.absolute().name
        return
    yield "the name of the file", path.name
    if path.stem in ("model", "pytorch_model"):  # a usual name: the folder's tells more
        yield "the name of the folder", path.absolute().parent.name


def split_words(name: str) -> list[str]:
    """The words of a name, in lower case: "deit_tiny_patch16_224" has deit, tiny and patch."""
    return re.findall("[a-z]+", name.lower())
