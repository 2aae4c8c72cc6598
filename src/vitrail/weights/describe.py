"""What is in a file, from its headers alone: family, config, preprocessing. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError, FileError, VitrailError, printable, suggest
from vitrail.fields import per_axis, show
from vitrail.preprocess import Preprocess
from vitrail.published import from_hf, from_timm, published
from vitrail.weights.bundle import Card, Source, parse, read_header
from vitrail.weights.deduce import deduce
from vitrail.weights.families import FAMILIES
from vitrail.weights.folder import Stored
from vitrail.weights.layout import WORDS, Sizes
from vitrail.weights.table import Family, Found, Row, look

Keys = Iterable[tuple[str | Iterable[str], str] | tuple[str | Iterable[str], str, str]]


@dataclass(frozen=True)
class Description:
    """What is in a file, from its headers alone, without torch."""

    family: str
    title: str
    config: ViTConfig
    preprocess: Preprocess | None
    labels: list[str] | None
    card: Card
    notes: list[str]
    follows: str = ""
    found: Found | None = None
    source: Source | None = None
    resize: Mapping[str, Any] = field(default_factory=dict)
    """How positions are resized in this family."""


def describe(
    stored: Stored, *, family: str | None = None, keys: Keys | None = None, **given: Any
) -> Description:
    """What is in an open file. `given` are fields of the config, as `load` takes them."""
    given = {name: value for name, value in given.items() if value is not None}
    header = read_header(stored)
    if header is not None and family in (None, "vitrail"):
        parts = parse(stored, header)
        facts = {name: one for name, one in given.items() if name not in ("size", "channels", "patch")}
        for name, value in facts.items():  # the user is right, and is told that the file says otherwise
            if (said := getattr(parts["config"], name, None)) != value:
                parts["notes"].append(f"{name} is {show(value)} as told, and {show(said)} in the file.")
        parts["config"] = replace(parts["config"], **facts)
        return Description("vitrail", "a vitrail file", resize=resize_of(parts["source"]), **parts)
    keys = list(keys or ())
    found = recognise(stored, family, own_rows(keys), given)
    settings = stored.settings.get("config.json", {})
    try:
        deduced = deduce(found, found.family.read_settings(settings), given)
    except VitrailError:
        raise
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise FileError(
            f"A file of the family {found.family.name} must hold a whole model.",
            f"{printable(str(stored.path))}, where {printable(str(error))} is missing or odd"
            + (f", and {listed(found.unknown)} has no place" if found.unknown else ""),
            "Give the family or a table of keys, if these belong to another model.",
        ) from error
    check_whole(stored, found, deduced.config)
    known = {name: (entry.dtype, entry.shape) for name, entry in stored.entries.items()}
    return Description(
        found.family.name,
        found.family.title,
        deduced.config,
        preprocess_of(stored, found.family, deduced.config, deduced.notes),
        labels_of(settings, deduced.config),
        Card(source=printable(stored.path.name)),
        deduced.notes,
        found.family.follows,
        found,
        Source(family=found.family.name, spelled=found.spelled, tensors=known, keys=keys),
        found.family.resize,
    )


def recognise(stored: Stored, family: str | None, own: tuple[Row, ...], given: Mapping[str, Any]) -> Found:
    """The file seen through the table of its family."""
    names = [one.name for one in FAMILIES] + [one.group for one in FAMILIES]
    if family is not None and family not in names:
        raise ConfigError(
            "family must be one that is read.", show(family), suggest(family, dict.fromkeys(names))
        )
    patch = per_axis("patch", given.get("patch", 1), ("height", "width"))
    sizes = Sizes(channels=given.get("channels", 3), patch=patch)
    kind = stored.settings.get("config.json", {}).get("model_type")
    for one in sorted(FAMILIES, key=lambda one: kind not in one.model_types):
        if family in (None, one.name, one.group):
            if own:
                one = with_rows(one, own)
            found = look(one, stored.entries, sizes, stored.wrapper if family is None else one.wrapper)
            if found is not None:
                return found
    some = ", ".join(printable(name) for name in list(stored.entries)[:4])
    raise FileError(
        "A file's names must be those of a family that is read."
        if family is None
        else f"The file must be of the family {family}.",
        f"{printable(str(stored.path))} with {some} ... ({len(stored.entries)} tensors)",
        f"Families: {', '.join(dict.fromkeys(one.group for one in FAMILIES))}. Or give a table of keys.",
    )


def own_rows(keys: Keys | None) -> tuple[Row, ...]:
    """A user's table of keys."""
    rows = []
    for one in keys or ():
        parts = list(one) if isinstance(one, (tuple, list)) else []
        if len(parts) not in (2, 3) or not isinstance(parts[1], str):
            raise ConfigError(
                "A row of keys is (their name or names, ours) or (theirs, ours, layout).",
                show(one),
                'Such as ("encoder.{i}.attn.in_proj_weight", "blocks.{i}.attention.qkv.weight").',
            )
        theirs: list[Any] = list(parts[0]) if isinstance(parts[0], (tuple, list)) else [parts[0]]
        for name in (*theirs, parts[1]):  # a vitrail file may hold such names: they must not format anything
            if not isinstance(name, str) or not re.fullmatch(r"([^{}]|\{[wpi]\})*", name):
                raise ConfigError(
                    "A name in a row of keys may hold {i}, the number of the block, and no other braces.",
                    show(name),
                    'Such as "encoder.{i}.attn.in_proj_weight".',
                )
        word = str(parts[2]) if len(parts) == 3 else "same"
        if word not in WORDS:
            raise ConfigError("A layout must be known.", show(word), suggest(word, WORDS))
        one_token = parts[1] == "prefix"
        rows.append(Row(tuple(theirs), parts[1], WORDS[word], "prefix" if one_token else ()))
    return tuple(rows)


def with_rows(family: Family, rows: tuple[Row, ...]) -> Family:
    """The family with a user's rows before its own; anchors that they name anew are named so too."""
    ours = {row.theirs[0].replace("{i}", "0"): row.ours for row in family.rows}
    named = {row.ours: row.theirs[0] for row in reversed(rows)}
    anchors = tuple(named.get(ours.get(name.replace("{i}", "0"), ""), name) for name in family.anchors)
    return replace(family, rows=(*rows, *family.rows), anchors=anchors, without=())


def check_whole(stored: Stored, found: Found, config: ViTConfig) -> None:
    """Every tensor of the model must be in the file, in its shape, and every one of the file have a place."""
    if found.unknown:
        raise FileError(
            f"Every tensor of a {found.family.name} file must have a place in the model.",
            f"{printable(str(stored.path))} with {listed(found.unknown)} besides",
            "Give the family or a table of keys, if these belong to another model.",
        )
    if config.depth != found.depth:
        raise FileError(
            "The settings must fit the weights.",
            f"{printable(str(stored.path))} with {found.depth} blocks, and depth={config.depth}",
            "Correct the one that is wrong.",
        )


def listed(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def preprocess_of(stored: Stored, family: Family, config: ViTConfig, notes: list[str]) -> Preprocess | None:
    """From the settings beside the weights, if they say it, or the family's own."""
    if config.input != "picture":
        return None
    settings = stored.settings
    try:
        if "preprocessor_config.json" in settings:
            return fitted(from_hf(settings["preprocessor_config.json"]), config)
        if isinstance(timm := settings.get("config.json", {}).get("pretrained_cfg"), dict):
            return fitted(from_timm(timm), config)
    except VitrailError as error:
        notes.append(f"The preprocessing in the folder was not used: {error}")
    if config.channels != 3:
        spread = (0.5,) * config.channels
        notes.append("Preprocessing is not in the file; levels are brought to -1 ... 1.")
        return Preprocess(size=config.pixels, mean=spread, std=spread)  # type: ignore[arg-type]
    notes.append(f"Preprocessing is not in the file; it is the one published for {family.preprocess}.")
    return fitted(published(family.preprocess, max(config.pixels)), config)


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


def labels_of(settings: Mapping[str, Any], config: ViTConfig) -> list[str] | None:
    """transformers' id2label, where it names every class; LABEL_0 and so on are no names."""
    names = settings.get("id2label")
    if not isinstance(names, dict):
        return None
    found = [name for number in range(config.classes) if isinstance(name := names.get(str(number)), str)]
    named = found != [f"LABEL_{number}" for number in range(len(found))]
    return found if named and len(found) == config.classes else None


def resize_of(source: Source | None) -> Mapping[str, Any]:
    known = [family for family in FAMILIES if source is not None and family.name == source.family]
    return known[0].resize if known else {}
