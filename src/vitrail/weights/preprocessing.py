"""A model's preprocessing: from the settings beside the weights, from the family, or as the user gives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.config import ViTConfig, by
from vitrail.errors import ConfigError, VitrailError, suggest
from vitrail.fields import show
from vitrail.preprocess import Preprocess
from vitrail.published import completed, from_hf, from_timm, published

FIELDS = tuple(field.name for field in dataclasses.fields(Preprocess))


def preprocess_of(
    settings: Mapping[str, Any], family: str, config: ViTConfig, notes: list[str]
) -> Preprocess | None:
    """From the settings beside the weights, if they say it, or what was published for the family."""
    if config.input != "picture":
        return None
    usual = usual_for(family, config)
    try:
        if (found := from_settings(settings, usual, notes)) is not None:
            if found.target != config.pixels:
                took, takes = by(found.target), by(config.pixels)
                notes.append(f"The preprocessing beside the weights is for {took} pixels; scaled to {takes}.")
            return fitted(found, config)
        reason = "Preprocessing is not in the file"
    except VitrailError as error:
        reason = f"The preprocessing in the folder was not used ({error})"
    if config.channels != 3:
        notes.append(f"{reason}; pixel values are brought to -1 ... 1.")
    else:
        notes.append(f"{reason}; it is the one published for {family}.")
    return usual


def usual_for(family: str, config: ViTConfig) -> Preprocess:
    """The family's published preprocessing; for other than three channels there is none."""
    if config.channels == 3:
        return fitted(published(family, max(config.pixels)), config)
    half = (0.5,) * config.channels
    return Preprocess(size=config.pixels, mean=half, std=half)  # type: ignore[arg-type]


def from_settings(settings: Mapping[str, Any], usual: Preprocess, notes: list[str]) -> Preprocess | None:
    """What a preprocessor_config.json or timm's pretrained_cfg says; what the first lacks is as usual."""
    if "preprocessor_config.json" in settings:
        given, lacking = completed(settings["preprocessor_config.json"], usual)
        found = from_hf(given)
        if lacking:
            notes.append(
                f"preprocessor_config.json has no {', '.join(lacking)}; the size is the model's own and the "
                f"rest as is usual for its family: {', '.join(f'{n}={show(given[n])}' for n in lacking)}."
            )
        return found
    if isinstance(timm := settings.get("config.json", {}).get("pretrained_cfg"), dict):
        return from_timm(timm)
    return None


def fitted(preprocess: Preprocess, config: ViTConfig) -> Preprocess:
    """The same preprocessing for the size and the channels of a model."""
    if preprocess.channels != config.channels:
        mean, std = (sum(v) / len(v) for v in (preprocess.mean, preprocess.std))
        preprocess = replace(preprocess, mean=(mean,) * config.channels, std=(std,) * config.channels)
    if preprocess.target == config.pixels:
        return preprocess
    share = max(preprocess.before_crop) / max(preprocess.target)
    before = max(round(max(config.pixels) * share), *config.pixels)
    resize_to = None if preprocess.resize_to is None else before
    return replace(preprocess, size=config.pixels, resize_to=resize_to)  # type: ignore[arg-type]


def overridden(
    preprocess: Preprocess | None, given: Mapping[str, Any] | None, config: ViTConfig, notes: list[str]
) -> Preprocess | None:
    """With the fields that the user gives: mean, std, interpolation... One number is for every channel."""
    if not given:
        return preprocess
    check_fields(given)
    if preprocess is None:
        raise ConfigError(f"preprocess is for images, and this model takes {config.input}; leave it out.")
    fields = dict(given)
    if "size" in fields and (size := Preprocess(size=fields["size"]).target) != config.pixels:
        raise ConfigError(
            f"preprocess.size={by(size)} is not the {by(config.pixels)} that the model takes; leave it out, "
            "or give the model that size."
        )
    for name in ("mean", "std"):
        if isinstance(fields.get(name), (int, float)):
            fields[name] = (fields[name],) * config.channels
    if fields.get("resize", preprocess.resize) != preprocess.resize:
        fields.setdefault("resize_to", None)  # it belongs to the other way of resizing
    found = replace(preprocess, **fields)
    if found.channels != config.channels:
        raise ConfigError(
            f"preprocess.mean and preprocess.std need {config.channels} numbers each, one for every channel "
            f"of the model, and have {found.channels}."
        )
    for name in FIELDS:
        if (now := getattr(found, name)) != (before := getattr(preprocess, name)):
            notes.append(f"preprocess.{name} is {show(now)} as given, in place of {show(before)}.")
    return found


def check_fields(given: Any) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f'preprocess takes fields by name, such as {{"mean": 0.5}}, and not {show(given)}.')
    for name in given:
        if name not in FIELDS:
            raise ConfigError(f"preprocess has no field {show(name)}. {suggest(str(name), FIELDS)}")
