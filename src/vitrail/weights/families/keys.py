"""A user's key table: rows of (their name or names, ours[, layout]), in Python or JSON.

    ["encoder.{i}.attn.in_proj_weight", "blocks.{i}.attention.qkv.weight"]
    ["first", "prefix", "tokens"]
    ["decoder.*", null]                          ignored: not read, not kept, not written back

Their names are those in the file. With a `family`, the rows are tried before the family's own. Without one,
a table that names the tensors in `REQUIRED` is complete, and is read as the family `CUSTOM`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from vitrail.base.errors import ConfigError, FileError, printable, suggest
from vitrail.base.fields import short_repr
from vitrail.weights.families.family import Family, KeyMap, Profile
from vitrail.weights.families.key_rows import LAYOUTS, Row
from vitrail.weights.families.match import FamilyMatch, join_names

Keys = Iterable[Sequence[Any]]

# Without these there is no ViT. Norms, biases, prefix, positions and head depend on the model.
REQUIRED = (
    "tokens.proj.weight",
    "blocks.{i}.attention.qkv.weight",
    "blocks.{i}.attention.out.weight",
    "blocks.{i}.mlp.fc1.weight",
    "blocks.{i}.mlp.fc2.weight",
)
_MAX_BRACES = 4  # in a name; with many, matching it could take hours
_EXAMPLE = '("encoder.{i}.attn.in_proj_weight", "blocks.{i}.attention.qkv.weight")'


@dataclass(frozen=True)
class KeyTable:
    """The rows of a table, and the patterns of names that it ignores."""

    rows: tuple[Row, ...] = ()
    ignore: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The required rows that the table does not have."""
        ours = {row.ours for row in self.rows}
        return [name for name in REQUIRED if not {name, name.format(i=0)} & ours]

    def ignored(self, names: Iterable[str]) -> list[str]:
        """The names that a pattern ignores. Names used by a row are not ignored: "*" means all others."""
        theirs = "|".join(_as_regex(name) for row in self.rows for name in row.theirs)
        patterns = [_as_pattern(pattern) for pattern in self.ignore]
        return [
            name
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            and not (theirs and re.fullmatch(theirs, name))
        ]

    def without_ignored(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        ignored = set(self.ignored(entries))
        return {name: entry for name, entry in entries.items() if name not in ignored}

    def notes(self, names: Iterable[str], match: FamilyMatch) -> list[str]:
        """What was ignored, and the rows and patterns that match nothing, a sentence each."""
        names = list(names)
        notes = []
        if ignored := self.ignored(names):
            what = f"{len(ignored)} tensors were" if ignored[1:] else "1 tensor was"
            notes.append(f"{what} ignored, as requested by the key table: {join_names(ignored)}.")
        for pattern in self.ignore:
            if not any(fnmatchcase(name, _as_pattern(pattern)) for name in names):
                notes.append(f"The key table ignores {printable(pattern)}, which matches no tensor.")
        read = {row.row.ours for row in match.rows if row.row.custom}
        for row in self.rows:
            if row.ours not in read:
                theirs = join_names(row.theirs)
                notes.append(f"The key table has {theirs} for {printable(row.ours)}: no such tensor.")
        return notes


def _as_pattern(name: str) -> str:
    """A name of a table as a pattern for fnmatch."""
    return re.sub(r"\{[wpi]\}", "*", name)


def _as_regex(name: str) -> str:
    """A name of a table as a regular expression: {i} is a number, {w} and {p} are anything."""
    parts = {"{i}": r"\d+", "{w}": ".*", "{p}": ".*"}
    return "".join(parts.get(part) or re.escape(part) for part in re.split(r"(\{[wpi]\})", name))


def read_table(keys: Keys | None) -> KeyTable:
    """A user's table, checked row by row."""
    rows: list[Row] = []
    ignore: list[str] = []
    for given in keys or ():
        parts = list(given) if isinstance(given, (tuple, list)) else []
        ignores = parts[1:] == [None]
        if len(parts) not in (2, 3) or not (ignores or isinstance(parts[1], str)):
            raise ConfigError(
                "A row of keys is (their name or names, ours), (theirs, ours, layout), or (pattern, None) "
                f"for tensors to ignore, and not {short_repr(given)}; an example is {_EXAMPLE}."
            )
        theirs: list[Any] = list(parts[0]) if isinstance(parts[0], (tuple, list)) else [parts[0]]
        for name in theirs if ignores else (*theirs, parts[1]):
            _check_name(name)
        if ignores:
            ignore += theirs
            continue
        layout = str(parts[2]) if len(parts) == 3 else "same"
        if layout not in LAYOUTS:
            names = dict.fromkeys(one.name for one in LAYOUTS.values())
            raise ConfigError(f"unknown layout {short_repr(layout)}. {suggest(layout, names)}")
        split: Any = "prefix" if parts[1] == "prefix" else ()
        rows.append(Row(tuple(theirs), parts[1], LAYOUTS[layout], split, custom=True))
    return KeyTable(tuple(rows), tuple(ignore))


def _check_name(name: Any) -> None:
    """A vitrail file may hold such names: they must not format anything else."""
    plain = isinstance(name, str) and re.fullmatch(r"([^{}]|\{[wpi]\})*", name)
    if not plain or name.count("{") > _MAX_BRACES:
        raise ConfigError(
            f"A name in a row of keys may contain {{i}}, the block index, and no other braces, but got "
            f'{short_repr(name)}; an example is "encoder.{{i}}.attn.in_proj_weight".'
        )


def with_rows(family: Family, rows: tuple[Row, ...]) -> Family:
    """The family with a user's rows before its own; anchors that the rows rename are renamed too.

    Anchors that are not renamed go first, since the first one determines the prefixes of the other names.
    """
    if family.name == CUSTOM.name:
        return replace(CUSTOM, keys=KeyMap(rows=rows))
    ours = {row.theirs[0].replace("{i}", "0"): row.ours for row in family.keys.rows}
    renamed = {row.ours: row.theirs[0] for row in reversed(rows)}
    old = family.detect.anchors
    anchors = [renamed.get(ours.get(name.replace("{i}", "0"), ""), name) for name in old]
    anchors.sort(key=lambda name: name not in old)
    return replace(
        family,
        detect=replace(family.detect, anchors=tuple(anchors), without=()),
        keys=replace(family.keys, rows=(*rows, *family.keys.rows)),
    )


def describe_missing(table: KeyTable) -> str:
    """What an incomplete table lacks, if no family is given and none has the other names."""
    return (
        f"the key table has no row for {', '.join(table.missing)}. Without a family it must have rows "
        f"for {', '.join(REQUIRED)}, and for whichever of prefix, position.table, norms, biases and head the "
        "model has; or give the family that the other names belong to"
    )


def _choose(match: FamilyMatch) -> dict[str, Any]:
    """Fields that follow from the rows; a row whose tensor is missing or has the wrong shape is an error."""
    theirs = {row.ours: row.theirs for row in match.family.keys.rows}
    for name in REQUIRED:
        if name.format(i=0) not in match.shapes:
            names = theirs.get(name) or theirs[name.format(i=0)]
            raise FileError(
                f"The key table has {join_names(names)} for {name}, which is not in the file; "
                f"correct that row. The file has {join_names(match.entries)}."
            )
    axes = {"tokens.proj.weight": (4, "patch_planes or patch_rows"), "prefix": (2, "tokens")}
    axes["position.table"] = (2, "lead")
    for name, (count, layouts) in axes.items():
        if len(match.shapes.get(name, (0,) * count)) != count:
            raise ConfigError(
                f"{name} must have {count} axes, but {join_names(theirs[name])} is read as "
                f"{match.shapes[name]}; give its row the layout {layouts}."
            )
    return {} if "norm.weight" in match.shapes else {"pool_norm": "none"}


CUSTOM = Family(
    "keys",
    "keys",
    "read by a key table",
    profile=Profile(
        choose=_choose,
        preprocess="imagenet",
        follows="your key table. The rest is as in the paper: pre-norm blocks, exact GELU, eps 1e-6. Give "
        "heads, block, activation, eps and pool if the model differs.",
    ),
)
