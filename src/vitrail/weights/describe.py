"""What is in a file, from its headers alone: family, config, preprocessing. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitrail.config import ViTConfig, by
from vitrail.errors import ConfigError, FileError, VitrailError, printable, suggest
from vitrail.fields import per_axis, show
from vitrail.preprocess import Preprocess
from vitrail.weights.bundle import Card, Source, parse, read_header
from vitrail.weights.deduce import deduce
from vitrail.weights.families import FAMILIES
from vitrail.weights.folder import Stored
from vitrail.weights.keys import KEYS, Keys, KeyTable, incomplete, read_table, with_rows
from vitrail.weights.layout import Sizes
from vitrail.weights.preprocessing import overridden, preprocess_of
from vitrail.weights.settings import check_sizes, labels_of
from vitrail.weights.table import Family, Found, listed, look

DATA = (("images", "labels"), ("x", "y"), ("x_train", "y_train"), ("train_images", "train_labels"))
STEMS = ("patch_embed.backbone.", "patch_embeddings.backbone.", "patch_embed.stem.")


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
    stored: Stored,
    *,
    family: str | None = None,
    keys: Keys | None = None,
    preprocess: Mapping[str, Any] | None = None,
    **given: Any,
) -> Description:
    """What is in an open file. `preprocess` and `given`, fields of the config, are as `load` takes them."""
    given = {name: value for name, value in given.items() if value is not None}
    header = read_header(stored)
    if header is not None and family in (None, "vitrail"):
        parts = parse(stored, header)
        if keys:
            raise ConfigError("A vitrail file has its own names and takes no table of keys; leave it out.")
        facts = {name: one for name, one in given.items() if name not in ("size", "channels", "patch")}
        for name, value in facts.items():  # the user is right, and is told that the file says otherwise
            if (said := getattr(parts["config"], name, None)) != value:
                parts["notes"].append(f"{name} is {show(value)} as told, and {show(said)} in the file.")
        parts["config"] = replace(parts["config"], **facts)
        parts["preprocess"] = overridden(parts["preprocess"], preprocess, parts["config"], parts["notes"])
        return Description("vitrail", "a vitrail file", resize=resize_of(parts["source"]), **parts)
    keys = list(keys or ())
    table = read_table(keys)
    found = recognise(stored, family, table, given)
    settings = stored.settings.get("config.json", {})
    try:
        deduced = deduce(found, found.family.read_settings(settings), given)
    except VitrailError:
        if stem_of(found):  # then the patches are no pixels, and no size that is given would fit
            raise no_place(stored, found) from None
        raise
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise FileError(
            f"A file of the family {found.family.name} must hold a whole model.",
            f"{printable(str(stored.path))}, where {odd(error)}"
            + (f", and {listed(found.unknown)} has no place" if found.unknown else ""),
            "Give the family or a table of keys, if these belong to another model.",
        ) from error
    config, notes = deduced.config, [*stored.notes, *table.notes(stored.entries, found), *deduced.notes]
    check_whole(stored, found, config)
    check_sizes(printable(str(stored.path)), settings, config, given)
    known = {name: (entry.dtype, entry.shape) for name, entry in stored.entries.items()}
    usual = preprocess_of(stored.settings, found.family.preprocess, config, notes)
    return Description(
        found.family.name,
        found.family.title,
        config,
        overridden(usual, preprocess, config, notes),
        labels_of(settings, config, notes),
        Card(source=printable(stored.path.name)),
        notes,
        found.family.follows,
        found,
        Source(family=found.family.name, spelled=found.spelled, tensors=known, keys=keys),
        found.family.resize,
    )


def odd(error: Exception) -> str:
    """What a model lacks, or what Python says of shapes that do not fit together."""
    if isinstance(error, KeyError):
        return f"{printable(str(error))} is missing or odd"
    return f"the shapes of tensors do not fit together ({printable(str(error))})"


def recognise(stored: Stored, family: str | None, table: KeyTable, given: Mapping[str, Any]) -> Found:
    """The file seen through the table of its family."""
    names = [one.name for one in FAMILIES] + [one.group for one in FAMILIES]
    if family is not None and family not in (*names, KEYS.name):
        raise ConfigError(
            "family must be one that is read.", show(family), suggest(family, dict.fromkeys(names))
        )
    patch = per_axis("patch", given.get("patch", 1), ("height", "width"))
    sizes = Sizes(channels=given.get("channels", 3), patch=patch)
    entries = table.kept(stored.entries)
    for one in candidates(stored, family, table):
        found = look(one, entries, sizes, stored.wrapper if family is None else one.wrapper)
        if found is not None:
            return found
    raise unknown_names(stored, family, table)


def candidates(stored: Stored, family: str | None, table: KeyTable) -> list[Family]:
    """The families to try, in this order; a table that is complete is one by itself."""
    if family == KEYS.name and table.missing:
        raise ConfigError(f"A file cannot be read: {incomplete(table)}.")
    if family == KEYS.name or (family is None and not table.missing):
        return [with_rows(KEYS, table.rows)]
    kind = stored.settings.get("config.json", {}).get("model_type")
    found = []
    for one in sorted(FAMILIES, key=lambda one: kind not in one.model_types):
        own = with_rows(one, table.rows) if table.rows else one
        # Where a table names all that a family is known by, only the user can say that it is of that family.
        if family in (one.name, one.group) or (family is None and set(own.anchors) & set(one.anchors)):
            found.append(own)
    return found


def unknown_names(stored: Stored, family: str | None, table: KeyTable) -> VitrailError:
    """Why a file is of no family: it holds data, its table is not complete, or nobody has such names."""
    path, entries = printable(str(stored.path)), stored.entries
    if stored.kind == "npz" and any(set(pair) <= set(entries) for pair in DATA):
        held = ", ".join(f"{printable(n)} {by(e.shape)} {e.dtype}" for n, e in list(entries.items())[:4])
        return FileError(
            f"{path} holds data ({held}) and no weights; give it where data is asked for, and a model here."
        )
    if family is None and table.rows:
        return FileError(f"{path} cannot be read: {incomplete(table)}.")
    some = ", ".join(printable(name) for name in list(entries)[:4])
    return FileError(
        "A file's names must be those of a family that is read."
        if family is None
        else f"The file must be of the family {family}.",
        f"{path} with {some} ... ({len(entries)} tensors)",
        f"Families: {', '.join(dict.fromkeys(one.group for one in FAMILIES))}. Or give a table of keys.",
    )


def check_whole(stored: Stored, found: Found, config: ViTConfig) -> None:
    """Every tensor of the model must be in the file, in its shape, and every one of the file have a place."""
    if found.unknown:
        raise no_place(stored, found)
    if config.depth != found.depth:
        raise FileError(
            "The settings must fit the weights.",
            f"{printable(str(stored.path))} with {found.depth} blocks, and depth={config.depth}",
            "Correct the one that is wrong.",
        )


def no_place(stored: Stored, found: Found) -> FileError:
    """Tensors that the family has no place for; a convolutional stem is named as such."""
    path = printable(str(stored.path))
    if stem := stem_of(found):
        return FileError(
            f"{path} is a hybrid of {found.family.group}: its patches come from a convolutional stem "
            f"({listed(stem)}). Of hybrids only Google's npz files with the R50 of stride 16 are read."
        )
    return FileError(
        f"Every tensor of a {found.family.name} file must have a place in the model.",
        f"{path} with {listed(found.unknown)} besides",
        'Give the family, or a table of keys with rows for them, or with ("name.*", None) to ignore them.',
    )


def stem_of(found: Found) -> list[str]:
    """The tensors of a convolutional stem that has no place here."""
    return [name for name in found.unknown if any(mark in name for mark in STEMS)]


def resize_of(source: Source | None) -> Mapping[str, Any]:
    known = [family for family in FAMILIES if source is not None and family.name == source.family]
    return known[0].resize if known else {}
