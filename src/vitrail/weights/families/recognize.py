"""Recognizing the family of another library's file: its config and preprocessing, from headers alone.

Models whose files look like a plain ViT's and are something else are refused by name. Some of them share
every name with a family that is read, and would give wrong logits without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from vitrail.base.errors import ConfigError, FileError, VitrailError, printable, suggest
from vitrail.base.fields import per_axis, short_repr
from vitrail.images.preprocess import default_preprocess
from vitrail.model.config import ViTConfig, format_sides
from vitrail.weights.bundle.bundle import Card, Source
from vitrail.weights.bundle.bundle_header import OWN_NAMES, FileDescription
from vitrail.weights.families import FAMILIES
from vitrail.weights.families.family import Family
from vitrail.weights.families.infer import STATE_DICT, infer_config, infer_own_config
from vitrail.weights.families.key_rows import Sizes
from vitrail.weights.families.keys import CUSTOM, Keys, KeyTable, describe_missing, read_table, with_rows
from vitrail.weights.families.match import FamilyMatch, join_names, match_family
from vitrail.weights.model_settings import check_sizes, find_preprocess, model_names, read_labels
from vitrail.weights.readers.folder import INDEX_KEY, ModelFiles

_DATA = (("images", "labels"), ("x", "y"), ("x_train", "y_train"), ("train_images", "train_labels"))
_STEMS = ("patch_embed.backbone.", "patch_embeddings.backbone.", "patch_embed.stem.")


class LookAlike(NamedTuple):
    """A model that is not read, and the names that only its files have together."""

    name: str
    patterns: tuple[str, ...]
    """Each must match a name in the file."""
    reason: str
    """What it is instead."""
    advice: str = "Use timm for it"
    """What to do with such a file."""


_WINDOWS = "it has windows and stages of different widths"
_GROUPED, _CONVOLUTIONS = "its heads are grouped", "its first stages are convolutions"

LOOK_ALIKES = (
    LookAlike(
        "EUPE",
        ("*projectors.*", "*patch_embed.proj.weight"),
        "it is an encoder with projectors, distilled from several models",
    ),
    LookAlike("Sapiens2", ("*attn.wq.weight", "*ffn.w12.weight"), _GROUPED),
    LookAlike("Sapiens2", ("*reg_token", "*blocks.0.attn.q_proj.weight", "*gamma_1"), _GROUPED),
    LookAlike("Hiera", ("*blocks.0.attn.qkv.weight", "*blocks.?.proj.weight"), _WINDOWS),
    LookAlike("Hiera", ("*blocks.0.attn.qkv.weight", "*pos_embed_win*"), _WINDOWS),
    LookAlike("Hiera", ("*hiera.embeddings.*",), _WINDOWS),
    LookAlike(
        "timm's NaFlexVit",
        ("*embeds.proj.weight", "*blocks.0.attn.qkv.weight"),
        "its patches are flat and its positions are resized for each image",
        "Use timm for it; SigLIP 2 NaFlex is read from transformers' files",
    ),
    LookAlike("TinyViT", ("*patch_embed.conv1.*", "*.blocks.0.conv1.*"), _CONVOLUTIONS),
    LookAlike("TinyViT", ("*patch_embed.seq.0.*", "*.blocks.0.conv1.*"), _CONVOLUTIONS),
    LookAlike("Swin", ("*layers.0.blocks.0.attn*.relative_position_bias_table*",), _WINDOWS),
    LookAlike(
        "BEiT", ("*blocks.0.attn.q_bias", "*relative_position_bias_table"), "its positions are relative"
    ),
    LookAlike("CaiT", ("*blocks_token_only.*",), "its class token enters after the other blocks"),
    LookAlike(
        "AIMv2 lit",
        ("*.ffn.gate_proj.weight", "*head.k_proj.weight"),
        "its pool has a query without a projection; the AIMv2 models without a pool are read",
        "Use transformers for it",
    ),
    LookAlike("XCiT", ("*blocks.0.attn.temperature",), "it attends over channels, not tokens"),
)


def find_look_alike(names: Collection[str]) -> LookAlike | None:
    """The look-alike that a file with these names holds."""
    for one in LOOK_ALIKES:
        if all(any(fnmatchcase(name, pattern) for name in names) for pattern in one.patterns):
            return one
    return None


# A model whose tensors are exactly those of these families: only a name beside them tells.
_EUPE, _LIKE_EUPE = "eupe", ("dinov3", "timm-dinov3", "hf-dinov3")


def describe_library(
    files: ModelFiles, family: str | None, keys: Keys | None, overrides: Mapping[str, Any]
) -> FileDescription:
    """Describe an open file that is not a vitrail file. The arguments are those of `load`."""
    keys = list(keys or ())
    table = read_table(keys) if keys else None
    match = _recognize(files, family, table, overrides)
    settings = files.settings.get("config.json", {})
    notes = [*files.notes, *(table.notes(files.entries, match) if table else ())]
    own = match.family is STATE_DICT
    if own and keys:
        raise ConfigError(OWN_NAMES)
    if own and match.unknown:
        raise _unknown_tensors(files, match)
    config = _infer(files, match, settings, overrides, notes)
    if match.unknown:
        raise _unknown_tensors(files, match)
    if config.depth != match.depth:
        raise FileError(
            f"{printable(files.path)} holds {match.depth} blocks, but its settings have "
            f"depth={config.depth}; correct the one that is wrong."
        )
    described: dict[str, Any] = {
        "match": match,
        "shapes": match.shapes,
        "extras": match.extras,
        "config": config,
        "card": Card(source=printable(files.path.name)),
        "notes": notes,
    }
    if own:
        notes.append("It holds no preprocessing; pixels are mapped to -1 ... 1.")
        described["preprocess_from"] = "the default: the file has none"
        return FileDescription(preprocess=default_preprocess(config), **described)
    if settings:
        check_sizes(printable(files.path), settings, config, overrides)
    profile = match.family.profile
    found = find_preprocess(files, profile.preprocess, config, notes)
    tensors = {name: (entry.dtype, entry.shape) for name, entry in files.entries.items()}
    return FileDescription(
        preprocess=found.preprocess,
        preprocess_from=found.origin,
        guess=found.guess,
        labels=read_labels(settings, config, notes) if settings else None,
        source=Source(family=match.family.name, spelled=match.placeholders, tensors=tensors, keys=keys),
        native=profile.resize if profile.native else None,
        **described,
    )


def _infer(
    files: ModelFiles,
    match: FamilyMatch,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    notes: list[str],
) -> ViTConfig:
    """The config of the model; an error for tensors that are missing or have shapes that no model has."""
    read_settings = match.family.writer.read_settings
    try:
        if match.family is STATE_DICT:
            return infer_own_config(match, overrides, notes)
        both = {**files.settings.get("open_clip_config.json", {}), **settings}
        given = read_settings(both) if read_settings and both else {}
        return infer_config(match, given, overrides, notes)
    except VitrailError:
        if _stem_tensors(match):  # then the patches are not pixels, and no given size would fit
            raise _unknown_tensors(files, match) from None
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


def _recognize(
    files: ModelFiles, family: str | None, table: KeyTable | None, overrides: Mapping[str, Any]
) -> FamilyMatch:
    """The file, matched against the first family that fits."""
    if family is not None:
        names = [one.name for one in FAMILIES] + [one.group for one in FAMILIES]
        if family not in (*names, CUSTOM.name):
            raise ConfigError(f"unknown family {short_repr(family)}. {suggest(family, dict.fromkeys(names))}")
    patch = per_axis("patch", overrides.get("patch", 1), ("height", "width"))
    sizes = Sizes(channels=overrides.get("channels", 3), patch=patch)
    entries = table.without_ignored(files.entries) if table else files.entries
    guessed = family is None and not (table and table.rows)
    if guessed and (other := find_look_alike(entries)):
        raise _look_alike(files, other)
    for one in _candidates(files, family, table):
        wrapper = files.wrapper if family is None else one.detect.wrapper
        if match := match_family(one, entries, sizes, wrapper):
            if guessed and one.name in _LIKE_EUPE:
                _refuse_eupe(files, one)
            return match
    raise _no_family(files, family, table)


def _refuse_eupe(files: ModelFiles, family: Family) -> None:
    names = model_names(files.path, files.settings.get("config.json", {}))
    if any(_EUPE in words for words, _ in names):
        reason = (
            "its tensors have the names of DINOv3, but it was distilled from several models, and we have not "
            "compared it with its own code"
        )
        advice = f"To read its encoder as a DINOv3 all the same, give the family {family.name}"
        raise _look_alike(files, LookAlike("EUPE", (), reason, advice))


def _look_alike(files: ModelFiles, other: LookAlike) -> FileError:
    return FileError(
        f"{printable(files.path)} looks like {other.name}, which is not read: {other.reason}. "
        f"{other.advice}. If it is another model, give its family or a key table."
    )


def _candidates(files: ModelFiles, family: str | None, table: KeyTable | None) -> list[Family]:
    """The families to try, in this order; a complete key table is a family by itself."""
    if family == CUSTOM.name or (family is None and table and not table.missing):
        table = table or KeyTable()
        if table.missing:
            raise ConfigError(f"A file cannot be read: {describe_missing(table)}.")
        return [with_rows(CUSTOM, table.rows)]
    kind = files.settings.get("config.json", {}).get("model_type")
    candidates = []
    for one in sorted(FAMILIES, key=lambda one: kind not in one.detect.model_types):
        extended = with_rows(one, table.rows) if table and table.rows else one
        # If a table renames all anchors of a family, only the user can know that the file is of that family.
        anchored = set(extended.detect.anchors) & set(one.detect.anchors)
        if family in (one.name, one.group) or (family is None and anchored):
            candidates.append(extended)
    return candidates


def _no_family(files: ModelFiles, family: str | None, table: KeyTable | None) -> VitrailError:
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
    if family is None and table and table.rows:
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
