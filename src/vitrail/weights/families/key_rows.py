"""Rows of a key table: which of a library's tensors make up one of ours.

    Row(("{p}layer.{i}.query.weight", "{p}layer.{i}.key.weight", ...), "blocks.{i}.attention.qkv.weight")

`{i}` is the block index. `{p}` is the prefix a library puts before the names of its encoder, such as
"vit."; `{w}` is a prefix that a wrapper has put before every name, such as "module.". If several rows
produce the same tensor of ours, they are alternative spellings: the first one present is read, and the
first one in the table is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from vitrail.weights.families.layout import Layout, same


@dataclass(frozen=True)
class Row:
    """Tensors of a file that, concatenated along the first axis, are one tensor of ours."""

    theirs: tuple[str, ...]
    """An empty name is a gap: a part of the same length that their model does not have, and zeros here."""
    ours: str
    layout: Layout = same
    parts: tuple[int, ...] | Literal["prefix"] = ()
    """How ours is split into theirs again: evenly by default, in these proportions, or by prefix token.
    Of the three names of a prefix (class token, distillation token, registers) any may be missing."""
    requires: str = ""
    """Another name that must be in the file for the row to be read."""
    when: tuple[str, Any] | None = None
    """A config field and the value it must have for the row to be written."""
    custom: bool = False
    """From a user's table: its names are the file's own, before `respell` and before a stack is split."""

    @property
    def by_block(self) -> bool:
        return "{i}" in self.ours

    @property
    def gaps(self) -> bool:
        return "" in self.theirs and self.parts != "prefix"


def row(theirs: str | Iterable[str], ours: str, layout: Layout = same, **options: Any) -> Row:
    """A row of one or several names."""
    return Row((theirs,) if isinstance(theirs, str) else tuple(theirs), ours, layout, **options)


def layer(theirs: str | Iterable[str], ours: str, layout: Layout = same, **options: Any) -> tuple[Row, Row]:
    """The rows of a layer's weight and bias. `layout` is for the weight; biases are laid out as ours."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    weight = row([f"{name}.weight" for name in names], f"{ours}.weight", layout, **options)
    return weight, row([f"{name}.bias" for name in names], f"{ours}.bias", **options)
