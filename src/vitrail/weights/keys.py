"""A user's own table of keys: rows of (their name or names, ours[, layout]), as Python or JSON has them.

    ["encoder.{i}.attn.in_proj_weight", "blocks.{i}.attention.qkv.weight"]
    ["first", "prefix", "tokens"]
    ["decoder.*", null]                          ignored: not read, not kept, not written back

Their names are those in the file. With a `family`, the rows come before the family's own. Without one,
a table that names the tensors in `NEEDED` is complete by itself, and is read as the family `KEYS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from vitrail.errors import ConfigError, FileError, printable, suggest
from vitrail.fields import show
from vitrail.weights.layout import WORDS
from vitrail.weights.table import Family, Found, Row, listed

Keys = Iterable[Sequence[Any]]

# Without these there is no ViT. Norms, biases, prefix, positions and head depend on the model.
NEEDED = (
    "tokens.proj.weight",
    "blocks.{i}.attention.qkv.weight",
    "blocks.{i}.attention.out.weight",
    "blocks.{i}.mlp.fc1.weight",
    "blocks.{i}.mlp.fc2.weight",
)
MOST_BRACES = 4  # in a name; with many, matching it could take hours
EXAMPLE = '("encoder.{i}.attn.in_proj_weight", "blocks.{i}.attention.qkv.weight")'


@dataclass(frozen=True)
class KeyTable:
    """The rows of a table, and the patterns of names that it ignores."""

    rows: tuple[Row, ...] = ()
    ignore: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """What the table would need to be complete by itself."""
        ours = {row.ours for row in self.rows}
        return [name for name in NEEDED if not {name, name.format(i=0)} & ours]

    def ignored(self, names: Iterable[str]) -> list[str]:
        """The names that a pattern ignores. A name that a row asks for is not ignored: "*" is the rest."""
        theirs = "|".join(as_regex(name) for row in self.rows for name in row.theirs)
        patterns = [as_pattern(pattern) for pattern in self.ignore]
        return [
            name
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            and not (theirs and re.fullmatch(theirs, name))
        ]

    def kept(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The entries that are not ignored."""
        ignored = set(self.ignored(entries))
        return {name: entry for name, entry in entries.items() if name not in ignored}

    def notes(self, names: Iterable[str], found: Found) -> list[str]:
        """What was ignored, and the rows and patterns that match nothing, a sentence each."""
        names = list(names)
        ignored = self.ignored(names)
        said = []
        if ignored:
            what = f"{len(ignored)} tensors were" if ignored[1:] else "1 tensor was"
            said.append(f"{what} ignored, as the table of keys says: {listed(ignored)}.")
        for pattern in self.ignore:
            if not any(fnmatchcase(name, as_pattern(pattern)) for name in names):
                said.append(f"The table of keys ignores {printable(pattern)}, which matches no tensor.")
        made = {use.row.ours for use in found.uses if use.row.own}
        for row in self.rows:
            if row.ours not in made:
                theirs = listed(list(row.theirs))
                said.append(f"The table of keys has {theirs} for {printable(row.ours)}: no such tensor.")
        return said


def as_pattern(name: str) -> str:
    """A name of a table as a pattern for fnmatch."""
    return re.sub(r"\{[wpi]\}", "*", name)


def as_regex(name: str) -> str:
    """A name of a table as a regular expression: {i} is a number, {w} and {p} are anything."""
    parts = {"{i}": r"\d+", "{w}": ".*", "{p}": ".*"}
    return "".join(parts.get(part) or re.escape(part) for part in re.split(r"(\{[wpi]\})", name))


def read_table(keys: Keys | None) -> KeyTable:
    """A user's table, checked row by row."""
    rows: list[Row] = []
    ignore: list[str] = []
    for one in keys or ():
        parts = list(one) if isinstance(one, (tuple, list)) else []
        ignores = parts[1:] == [None]
        if len(parts) not in (2, 3) or not (ignores or isinstance(parts[1], str)):
            raise ConfigError(
                "A row of keys is (their name or names, ours), (theirs, ours, layout), or (pattern, None) "
                f"for tensors to ignore, and not {show(one)}; such as {EXAMPLE}."
            )
        theirs: list[Any] = list(parts[0]) if isinstance(parts[0], (tuple, list)) else [parts[0]]
        for name in theirs if ignores else (*theirs, parts[1]):
            check_name(name)
        if ignores:
            ignore += theirs
            continue
        word = str(parts[2]) if len(parts) == 3 else "same"
        if word not in WORDS:
            raise ConfigError(f"A layout must be known, and {show(word)} is not. {suggest(word, WORDS)}")
        how: Any = "prefix" if parts[1] == "prefix" else ()
        rows.append(Row(tuple(theirs), parts[1], WORDS[word], how, own=True))
    return KeyTable(tuple(rows), tuple(ignore))


def check_name(name: Any) -> None:
    """A vitrail file may hold such names: they must not format anything."""
    plain = isinstance(name, str) and re.fullmatch(r"([^{}]|\{[wpi]\})*", name)
    if not plain or name.count("{") > MOST_BRACES:
        raise ConfigError(
            "A name in a row of keys may hold {i}, the number of the block, and no other braces, and not "
            f'{show(name)}; such as "encoder.{{i}}.attn.in_proj_weight".'
        )


def with_rows(family: Family, rows: tuple[Row, ...]) -> Family:
    """The family with a user's rows before its own; anchors that they name anew are named so too.

    Its other anchors go first, since the first says what stands before the family's names in this file.
    """
    if family.name == KEYS.name:
        return replace(KEYS, rows=rows)
    ours = {row.theirs[0].replace("{i}", "0"): row.ours for row in family.rows}
    named = {row.ours: row.theirs[0] for row in reversed(rows)}
    anchors = [named.get(ours.get(name.replace("{i}", "0"), ""), name) for name in family.anchors]
    anchors.sort(key=lambda name: name not in family.anchors)
    return replace(family, rows=(*rows, *family.rows), anchors=tuple(anchors), without=())


def incomplete(table: KeyTable) -> str:
    """What a table must have where no family is given and none is known by the other names."""
    return (
        f"the table of keys has no row for {', '.join(table.missing)}. Without a family it must have rows "
        f"for {', '.join(NEEDED)}, and for whichever of prefix, position.table, norms, biases and head the "
        "model has; or give the family whose names the other tensors have"
    )


def choose(found: Found) -> dict[str, Any]:
    """Fields that follow from the rows; a row whose tensor is missing or lies otherwise is named."""
    theirs = {row.ours: row.theirs for row in found.family.rows}
    for name in NEEDED:
        if name.format(i=0) not in found.shapes:
            names = theirs.get(name) or theirs[name.format(i=0)]
            raise FileError(
                f"The table of keys has {listed(list(names))} for {name}, which is not in the file; "
                f"correct that row. The file has {listed(list(found.entries))}."
            )
    axes = {"tokens.proj.weight": (4, "patch_planes or patch_rows"), "prefix": (2, "tokens")}
    axes["position.table"] = (2, "lead")
    for name, (count, words) in axes.items():
        if len(found.shapes.get(name, (0,) * count)) != count:
            raise ConfigError(
                f"{name} must have {count} axes, and {listed(list(theirs[name]))} is read as "
                f"{found.shapes[name]}; give its row the layout {words}."
            )
    return {} if "norm.weight" in found.shapes else {"pool_norm": "none"}


KEYS = Family(
    name="keys",
    group="keys",
    title="read by a table of keys",
    anchors=(),
    rows=(),
    choose=choose,
    preprocess="imagenet",
    follows="your table of keys. What it cannot say is as in the paper: norms before the branches, exact "
    "GELU, eps 1e-6. Give heads, block, activation, eps and pool where the model differs.",
)
