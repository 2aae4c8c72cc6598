"""A config.json beside the weights, held against them: sizes that contradict the tensors, and labels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from vitrail.config import ViTConfig
from vitrail.errors import FileError
from vitrail.fields import show
from vitrail.weights.table import listed

# By transformers' name or timm's: our field. The tensors show all of these.
SIZES = {
    **{"hidden_size": "width", "embed_dim": "width", "num_features": "width"},
    **{"num_hidden_layers": "depth", "depth": "depth"},
    **{"num_attention_heads": "heads", "num_heads": "heads"},
    **{"intermediate_size": "mlp_width", "num_channels": "channels", "in_chans": "channels"},
    **{"patch_size": "patch", "image_size": "size", "img_size": "size"},
    **{"num_register_tokens": "registers", "reg_tokens": "registers", "num_classes": "classes"},
}


def check_sizes(path: str, settings: Mapping[str, Any], config: ViTConfig, given: Collection[str]) -> None:
    """Refuse settings that contradict the weights; what the user gives is not held against them."""
    for where, part in parts_of(settings):
        for name, field in SIZES.items():
            said = part.get(name)
            if said is None or field in given or (name, said) == ("num_classes", 0):
                continue
            there = {"patch": config.patch_pixels, "size": config.pixels, "mlp_width": config.F}.get(
                field, getattr(config, field)
            )
            if as_sides(said) != as_sides(there):
                raise FileError(
                    f"{path}: config.json has {where}{name}={show(said)}, and the weights have "
                    f"{show(there)}. Correct it, or give the weight file alone, without its folder."
                )


def parts_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a config.json that hold sizes of the image model, each with what goes before its names.

    Settings that are neither transformers' (model_type) nor timm's (model_args) say nothing.
    """
    if isinstance(timm := settings.get("model_args"), dict):
        yield "model_args.", timm
        yield "", {name: settings.get(name) for name in ("num_features", "num_classes")}
    elif "model_type" in settings:
        towers = [
            name for name in ("vision_config", "vision_config_dict") if isinstance(settings.get(name), dict)
        ]
        for name in towers[-1:]:  # of two, transformers goes by the second
            yield f"{name}.", settings[name]
        if not towers:
            yield "", settings


def as_sides(value: Any) -> Any:
    """One number for all sides, where they are equal."""
    if isinstance(value, (list, tuple)):
        return value[0] if value and all(side == value[0] for side in value) else tuple(value)
    return value if not isinstance(value, bool) else None


def labels_of(settings: Mapping[str, Any], config: ViTConfig, notes: list[str]) -> list[str] | None:
    """transformers' id2label or timm's label_names, where they name every class.

    LABEL_0 and so on are no names. Names that do not fit the classes are not used, and that is said.
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
        notes.append(f"The labels in config.json were not used: they are {show(names)}, not names by number.")
        return None
    wanted = [str(number) for number in range(config.classes)]
    if all(name == f"LABEL_{number}" for number, name in names.items()):
        return None
    missing = [number for number in wanted if not isinstance(names.get(number), str)]
    spare = [number for number in names if number not in wanted]
    if missing or spare:
        what = f"has no name for class {listed(missing)}" if missing else f"names class {listed(spare)}"
        notes.append(
            f"The labels in config.json were not used: id2label {what}, and the model has {config.classes} "
            f"classes, 0 to {config.classes - 1}."
        )
        return None
    return [names[number] for number in wanted]
