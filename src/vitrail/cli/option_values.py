"""The values of options: texts parsed to what the settings take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vitrail.base.errors import ConfigError, InputError, printable, suggest


def parse_value(text: str) -> Any:
    """A number, true, false, none, HxW, or the text itself; the field checks the rest."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    parts = text.split("x")
    return tuple(map(int, parts)) if len(parts) > 1 and all(p.isdecimal() for p in parts) else text


def parse_sides(text: str) -> Any:
    """A side, or (H, W) from HxW."""
    sides = parse_value(text)
    if not isinstance(sides, (int, tuple)) or isinstance(sides, bool):
        raise InputError(f"--size must be a number or HxW, such as 224 or 256x128, not {printable(text)!r}.")
    return sides


def parse_workers(text: str) -> int | Literal["auto"]:
    """A number of workers, or "auto"."""
    from vitrail.images.workers import check_workers

    try:
        return check_workers(parse_value(text))
    except ConfigError as error:
        raise InputError(f"--{error}") from error


def parse_batch(text: str | None) -> int | str | None:
    """A number of images per step, or "auto"."""
    value = None if text is None or text == "auto" else parse_value(text)
    if value is None:
        return text
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"--batch must be a number of images, at least 1, or auto, not {printable(text)!r}.")
    return value


def parse_field(text: str, hint: Any) -> Any:
    """One of the field's allowed values, even "none"; comma-separated numbers; or a plain value."""
    from vitrail.base.fields import literal_values

    if text in literal_values(hint):
        return text
    parts = tuple(parse_value(part.strip()) for part in text.split(","))
    numbers = len(parts) > 1 and all(isinstance(part, (int, float)) for part in parts)
    return parts if numbers else parse_value(text)


def parse_settings(given: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments of `vitrail.load`, from FIELD=VALUE options.

    A field is a field of ViTConfig, "preprocess" or "preprocess." with a field of it, or checkpoint_key.
    """
    if not given:
        return {}
    from vitrail.base.fields import type_hints
    from vitrail.images.preprocess import Preprocess
    from vitrail.model.config import ViTConfig

    model, images = type_hints(ViTConfig), type_hints(Preprocess)
    names = [*model, "preprocess", *(f"preprocess.{name}" for name in images), "checkpoint_key"]
    settings: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            raise InputError(
                "--set takes FIELD=VALUE with a field of the model or its preprocessing, not "
                f"{printable(text)!r}. {suggest(name, names)}"
            )
        field = name.removeprefix("preprocess.")
        if name in ("checkpoint_key", "preprocess"):
            settings[name] = value
        elif field != name and isinstance(settings.get("preprocess"), str):
            raise InputError(
                f"--set preprocess={settings['preprocess']} and {printable(name)} exclude each other."
            )
        elif field != name:
            settings.setdefault("preprocess", {})[field] = parse_field(value, images[field])
        else:
            settings[name] = parse_field(value, model[name])
    return settings


def refuse_given(options: Mapping[str, object], reason: str) -> None:
    """Refuse the first option that is given; OPTION in the reason stands for its name."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise InputError(reason.replace("OPTION", name))


# ---- training --------------------------------------------------------------------------------

_PARTS = ("model", "augment", "mixing")  # settings with fields of their own


def apply_setting(changes: dict[str, Any], text: str) -> None:
    """Add NAME=VALUE: a training setting, or a FIELD of model, augment, mixing or preprocess."""
    from vitrail.base.fields import type_hints
    from vitrail.images.augment.mixing import Mixing
    from vitrail.images.augment.pipeline import Augment
    from vitrail.model.config import ViTConfig
    from vitrail.training.recipes.settings import TrainConfig, unknown_setting

    path, equals, value = text.partition("=")
    part, dot, name = path.rpartition(".")
    if equals and "preprocess" in (part, path):
        _apply_preprocess(changes, text)
        return
    if not equals or not name or path in _PARTS or part not in ("", *_PARTS):
        raise InputError(
            f"--set takes NAME=VALUE, such as model.depth=4, augment.flip=0.5 or ema=0.99, not {text!r}."
        )
    if not dot and name not in TrainConfig.__dataclass_fields__:
        raise InputError(unknown_setting(name))
    config = {"": TrainConfig, "model": ViTConfig, "augment": Augment, "mixing": Mixing}[part]
    fields = changes.setdefault(part, {}) if dot else changes
    fields[name] = parse_field(value, type_hints(config).get(name))


def _apply_preprocess(changes: dict[str, Any], text: str) -> None:
    """Add preprocess=NAME or preprocess.FIELD=VALUE."""
    before, new = changes.get("preprocess"), parse_settings([text])["preprocess"]
    if before is not None and isinstance(before, str) | isinstance(new, str):
        raise InputError(f"--set {printable(text)} and another --set preprocess exclude each other.")
    changes["preprocess"] = new if before is None else {**before, **new}
