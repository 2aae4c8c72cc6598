"""Recognizing the family of another library's file: its config and preprocessing, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vitrail.base.errors import ConfigError, FileError, VitrailError, printable, suggest
from vitrail.base.fields import per_axis, short_repr
from vitrail.images.preprocess import default_preprocess
from vitrail.model.config import ViTConfig, format_sides
from vitrail.weights.bundle.bundle import Card, Source
from vitrail.weights.bundle.bundle_header import OWN_NAMES, FileDescription
from vitrail.weights.families import FAMILIES
from vitrail.weights.families.config_json import check_sizes, read_labels
from vitrail.weights.families.family import Family
from vitrail.weights.families.infer import infer_config
from vitrail.weights.families.keys import CUSTOM, Keys, KeyTable, describe_missing, read_table, with_rows
from vitrail.weights.families.layout import Sizes
from vitrail.weights.families.look_alikes import LookAlike, find_by_name, find_look_alike
from vitrail.weights.families.match import FamilyMatch, join_names, match_family
from vitrail.weights.families.plain_state_dict import STATE_DICT, infer_own_config
from vitrail.weights.preprocessing import find_preprocess
from vitrail.weights.readers.folder import INDEX_KEY, ModelFiles

_DATA = (("images", "labels"), ("x", "y"), ("x_train", "y_train"), ("train_images", "train_labels"))
_STEMS = ("patch_embed.backbone.", "patch_embeddings.backbone.", "patch_embed.stem.")


def describe_library(
    files: ModelFiles, family: str | None, keys: Keys | None, overrides: Mapping[str, Any]
) -> FileDescription:
    """Describe an open file that is not a vitrail file. The arguments are those of `load`."""
    keys = list(keys or ())
    table = read_table(keys)
    match = _recognize(files, family, table, overrides)
    if match.family is not STATE_DICT:
        return _describe_other(files, match, table, keys, overrides)
    if keys:
        raise ConfigError(OWN_NAMES)
    return _describe_state_dict(files, match, overrides)


def _describe_state_dict(
    files: ModelFiles, match: FamilyMatch, overrides: Mapping[str, Any]
) -> FileDescription:
    """A plain state dict of ours: the config is inferred, the preprocessing is the default one."""
    if match.unknown:
        raise _unknown_tensors(files, match)
    with _incomplete(files, match):
        config, assumptions = infer_own_config(match, overrides)
    notes = [*files.notes, *assumptions, "It holds no preprocessing; pixels are mapped to -1 ... 1."]
    return FileDescription(
        match=match,
        shapes=match.shapes,
        extras=match.extras,
        config=config,
        preprocess=default_preprocess(config),
        preprocess_from="the default: the file has none",
        card=Card(source=printable(files.path.name)),
        notes=notes,
    )


def _describe_other(
    files: ModelFiles, match: FamilyMatch, table: KeyTable, keys: list[Any], overrides: Mapping[str, Any]
) -> FileDescription:
    """The config of another library's file is inferred from its shapes and settings."""
    family, settings = match.family, files.settings.get("config.json", {})
    config, assumptions = _infer(files, match, settings, overrides)
    notes = [*files.notes, *table.notes(files.entries, match), *assumptions]
    if match.unknown:
        raise _unknown_tensors(files, match)
    if config.depth != match.depth:
        raise FileError(
            f"{printable(files.path)} holds {match.depth} blocks, but its settings have "
            f"depth={config.depth}; correct the one that is wrong."
        )
    check_sizes(printable(files.path), settings, config, overrides)
    tensors = {name: (entry.dtype, entry.shape) for name, entry in files.entries.items()}
    found = find_preprocess(files, family.profile.preprocess, config, notes)
    return FileDescription(
        match=match,
        shapes=match.shapes,
        extras=match.extras,
        config=config,
        preprocess=found.preprocess,
        preprocess_from=found.origin,
        guess=found.guess,
        labels=read_labels(settings, config, notes),
        card=Card(source=printable(files.path.name)),
        notes=notes,
        source=Source(family=family.name, spelled=match.placeholders, tensors=tensors, keys=keys),
        native=family.profile.resize if family.profile.native else None,
    )


def _infer(
    files: ModelFiles, match: FamilyMatch, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[ViTConfig, list[str]]:
    read_settings = match.family.writer.read_settings
    try:
        with _incomplete(files, match):
            both = {**files.settings.get("open_clip_config.json", {}), **settings}
            return infer_config(match, read_settings(both) if read_settings else {}, overrides)
    except VitrailError:
        if _stem_tensors(match):  # then the patches are not pixels, and no given size would fit
            raise _unknown_tensors(files, match) from None
        raise


@contextmanager
def _incomplete(files: ModelFiles, match: FamilyMatch) -> Iterator[None]:
    """Report tensors that are missing or have shapes that no model has."""
    try:
        yield
    except VitrailError:
        raise
    except (KeyError, TypeError, IndexError, ValueError) as error:
        what = (
            f"{printable(error)} is missing or has an unexpected shape"
            if isinstance(error, KeyError)
            else f"the shapes of its tensors do not fit together ({printable(error)})"
        )
        unknown = f", and {join_names(match.unknown)} is unknown" if match.unknown else ""
        raise FileError(
            f"{printable(files.path)} is not a complete model of the family {match.family.name}: "
            f"{what}{unknown}. Give the family or a key table if it is another model."
        ) from error


# ---- recognizing the family -----------------------------------------------------------------


def _recognize(
    files: ModelFiles, family: str | None, table: KeyTable, overrides: Mapping[str, Any]
) -> FamilyMatch:
    """The file, matched against the first family that fits."""
    names = [one.name for one in FAMILIES] + [one.group for one in FAMILIES]
    if family is not None and family not in (*names, CUSTOM.name):
        raise ConfigError(f"unknown family {short_repr(family)}. {suggest(family, dict.fromkeys(names))}")
    patch = per_axis("patch", overrides.get("patch", 1), ("height", "width"))
    sizes = Sizes(channels=overrides.get("channels", 3), patch=patch)
    entries = table.without_ignored(files.entries)
    guessed = family is None and not table.rows
    if guessed and (other := find_look_alike(entries)):
        raise _look_alike(files, other)
    for one in _candidates(files, family, table):
        wrapper = files.wrapper if family is None else one.detect.wrapper
        if match := match_family(one, entries, sizes, wrapper):
            settings = files.settings.get("config.json", {})
            if guessed and (other := find_by_name(files.path, settings, one.name)):
                raise _look_alike(files, other)
            return match
    raise _no_family(files, family, table)


def _look_alike(files: ModelFiles, other: LookAlike) -> FileError:
    return FileError(
        f"{printable(files.path)} looks like {other.name}, which is not read: {other.reason}. "
        f"{other.advice}. If it is another model, give its family or a key table."
    )


def _candidates(files: ModelFiles, family: str | None, table: KeyTable) -> list[Family]:
    """The families to try, in this order; a complete key table is a family by itself."""
    if family == CUSTOM.name and table.missing:
        raise ConfigError(f"A file cannot be read: {describe_missing(table)}.")
    if family == CUSTOM.name or (family is None and not table.missing):
        return [with_rows(CUSTOM, table.rows)]
    kind = files.settings.get("config.json", {}).get("model_type")
    candidates = []
    for one in sorted(FAMILIES, key=lambda one: kind not in one.detect.model_types):
        extended = with_rows(one, table.rows) if table.rows else one
        # If a table renames all anchors of a family, only the user can know that the file is of that family.
        anchored = set(extended.detect.anchors) & set(one.detect.anchors)
        if family in (one.name, one.group) or (family is None and anchored):
            candidates.append(extended)
    return candidates


def _no_family(files: ModelFiles, family: str | None, table: KeyTable) -> VitrailError:
    """Why a file is of no family: it holds data, its key table is incomplete, or its names are unknown."""
    path, entries = printable(files.path), files.entries
    if INDEX_KEY in files.metadata:
        return FileError(
            f"{path} is an index of images made by vitrail embed and no model; search in it with vitrail "
            "search, and pass the model that made it here."
        )
    if files.kind == "npz" and any(set(pair) <= set(entries) for pair in _DATA):
        held = ", ".join(
            f"{printable(n)} {format_sides(e.shape)} {e.dtype}" for n, e in list(entries.items())[:4]
        )
        return FileError(
            f"{path} holds data ({held}) and no weights; pass a model here, and this file as data."
        )
    if family is None and table.rows:
        return FileError(f"{path} cannot be read: {describe_missing(table)}.")
    some = ", ".join(printable(name) for name in list(entries)[:4])
    groups = ", ".join(dict.fromkeys(one.group for one in FAMILIES))
    what = "is of no known family" if family is None else f"is not a file of the family {family}"
    return FileError(
        f"{path} {what}: it holds {some} ... ({len(entries)} tensors). Known families: {groups}. "
        "Or give a key table."
    )


def _unknown_tensors(files: ModelFiles, match: FamilyMatch) -> FileError:
    """The error for tensors that the family does not have; a convolutional stem is named as such."""
    path, family = printable(files.path), match.family
    if stem := _stem_tensors(match):
        return FileError(
            f"{path} is a hybrid of {family.group}: its patches come from a convolutional stem "
            f"({join_names(stem)}). Of hybrids, only Google's npz files with the R50 of stride 16 are read."
        )
    return FileError(
        f"{path} is a {family.name} file with unknown tensors: {join_names(match.unknown)}. Give another "
        'family, or a key table with rows for them, or with ("name.*", None) to ignore them.'
    )


def _stem_tensors(match: FamilyMatch) -> list[str]:
    """The tensors of a convolutional stem that is not supported."""
    return [name for name in match.unknown if any(part in name for part in _STEMS)]


def position_resize_options(source: Source | None) -> Mapping[str, Any]:
    """How positions are resized in the family that a model came from."""
    families = [family for family in FAMILIES if source is not None and family.name == source.family]
    return families[0].profile.resize if families else {}
