"""Matching a file against a family: its names, through the family's key table, become ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from vitrail.base.errors import printable
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.bundle_header import split_own
from vitrail.weights.families.family import ANY_PREFIX, Detection, Family
from vitrail.weights.families.key_rows import Row, Shape, Sizes
from vitrail.weights.readers.tensor_entries import Entry

if TYPE_CHECKING:
    from torch import Tensor

MAX_BLOCKS = 10_000
_MAX_CANDIDATES, _MAX_NESTED = 100, 8  # far more than an honest file has: names must not cost us hours
_PREFIX_TOKENS = ("class", "distillation", "registers")  # in our order


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is in the file: a tensor of its own, or one block of a stack."""

    original: str
    index: int | None = None


@dataclass(frozen=True)
class RowMatch:
    """A row that applies to this file, with its names filled in."""

    row: Row
    theirs: tuple[str, ...]
    ours: str


@dataclass
class FamilyMatch:
    """A file, read through a family's key table."""

    family: Family
    placeholders: dict[str, str]
    """What {w} and {p} stand for."""
    entries: dict[str, Entry]
    """By the names in the file."""
    locations: dict[str, TensorLocation]
    """Where each name of the table is in the file."""
    rows: list[RowMatch] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    """The shapes of our tensors."""
    prefix: dict[str, int] = field(default_factory=dict)
    """The number of prefix tokens of each kind."""
    extras: dict[str, str] = field(default_factory=dict)
    """Tensors kept beside the model: their name in a bundle, and in the file."""
    unknown: list[str] = field(default_factory=list)
    """Tensors of the file that the table does not know."""
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    """What the family's `choose` reports about this file, a sentence each."""

    @cached_property
    def _names(self) -> dict[tuple[str, int | None], str]:
        return {(at.original, at.index): name for name, at in self.locations.items()}

    def name_in_table(self, original: str, block: int | None) -> str:
        """The table's name for a name in the file; of a stack, that of the block's slice."""
        return self._names.get((original, None)) or self._names.get((original, block)) or original

    def has(self, template: str) -> bool:
        """Whether the file holds a tensor of this name; {i} is block 0."""
        return template.format(**self.placeholders, i=0) in self.locations

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated: its first layer is twice as wide as its second expects."""
        first = self.shapes.get("blocks.0.mlp.fc1.weight", (0,))
        return first[0] == 2 * self.shapes.get("blocks.0.mlp.fc2.weight", (0, 0))[1] > 0

    @property
    def depth(self) -> int:
        blocks = {name.split(".")[1] for name in self.shapes if name.startswith("blocks.")}
        return len(blocks)


def join_names(names: Iterable[str]) -> str:
    """The first five names, and how many more there are."""
    names = list(names)
    shown = ", ".join(printable(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def match_family(
    family: Family, entries: Mapping[str, Entry], sizes: Sizes, wrapper: str = ""
) -> FamilyMatch | None:
    """Match a file's names and shapes against a family's table; None if the file is of another family.

    Args:
        wrapper: the key of a torch.save file under which the tensors are.
    """
    detect = family.detect
    if detect.wrapper not in ("", wrapper):
        return None
    if family.keys.own:
        return _match_own(family, entries)
    locations, shapes = _spread_stacks(family, entries)
    # A user's rows, and the anchors they rename, go by the names in the file.
    custom = bool(family.keys.rows) and family.keys.rows[0].custom
    placeholders = _find_placeholders(family, {*locations, *(entries if custom else ())}, shapes)
    if placeholders is None:
        return None
    match = FamilyMatch(family, placeholders, dict(entries), locations)
    _match_rows(match, shapes, sizes)
    patterns = [pattern.format(**placeholders) for pattern in family.keys.extras]
    for name in dict.fromkeys(at.original for name, at in locations.items() if name not in match.used):
        if any(fnmatchcase(_respell(family, name), pattern) for pattern in patterns):
            match.extras[name] = name
        else:
            match.unknown.append(name)
    return match


def _match_own(family: Family, entries: Mapping[str, Entry]) -> FamilyMatch | None:
    """Match a file of our own names; {w} is what a wrapper has put before them."""
    placeholders = _find_placeholders(family, set(entries), {})
    if placeholders is None:
        return None
    match = FamilyMatch(family, placeholders, dict(entries), {n: TensorLocation(n) for n in entries})
    wrapped = [name for name in entries if name.startswith(placeholders["w"])]
    match.unknown = [name for name in entries if not name.startswith(placeholders["w"])]
    names, match.extras = split_own(wrapped)
    for name in names:
        ours = name.removeprefix(placeholders["w"])
        match.shapes[ours] = entries[name].shape
        match.rows.append(RowMatch(Row((name,), ours), (name,), ours))
    return match


def read_state(match: FamilyMatch, tensor: Callable[[str], Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors, from `tensor(name)` for each name in the file."""
    import torch

    sizes = Sizes.of(config)
    stacks: dict[str, Tensor] = {}  # a stack is read once, not for every block
    state = {}
    for one in match.rows:
        pieces = []
        for name in one.theirs:
            location = match.locations[name]
            if location.index is None:
                piece = tensor(location.original)
            else:
                if location.original not in stacks:
                    stacks[location.original] = tensor(location.original)
                piece = stacks[location.original][location.index]
            pieces.append(one.row.layout.read(piece, sizes))
        if one.row.has_gaps:
            present = iter(pieces)
            pieces = [next(present) if name else torch.zeros_like(pieces[0]) for name in one.row.theirs]
        state[one.ours] = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()
    return state


# ---- detection ------------------------------------------------------------------------------


def _find_placeholders(family: Family, names: set[str], shapes: Mapping[str, Shape]) -> dict[str, str] | None:
    """What {w} and {p} stand for in a file with these names, if it is of this family."""
    detect = family.detect
    if not detect.anchors:
        return {"w": "", "p": ""}
    found, most = None, -1
    for one in _candidates(detect, names):
        if not all(anchor.format(**one, i=0) in names for anchor in detect.anchors):
            continue
        excluded = [pattern.format(**one) for pattern in detect.without]
        if any(fnmatchcase(name, pattern) for pattern in excluded for name in names):
            continue
        # How many names of the table are present, outside the blocks and in the first one.
        table = {name.format(**one, i=0) for row in family.keys.rows for name in row.theirs}
        if len(table & names) > most:
            found, most = one, len(table & names)
    for name, axes in detect.axes.items():
        if found and len(shapes.get(name.format(**found, i=0), ())) != axes:
            return None
    return found


def _candidates(detect: Detection, names: Collection[str]) -> Iterator[dict[str, str]]:
    """Every {w} and {p} that may precede the first anchor; the longest {p} first."""
    for p in sorted(detect.prefixes, key=len)[::-1]:
        suffix = detect.anchors[0].format(w="", p="" if p == ANY_PREFIX else p, i=0)
        ending = sorted((n for n in names if n.endswith(suffix)), key=lambda n: (len(n), n))
        for name in ending[:_MAX_CANDIDATES]:
            before = name.removesuffix(suffix)
            if before and before[-1] not in "./":
                continue
            if p != ANY_PREFIX:
                yield {"w": before, "p": p}
                continue
            *parts, _ = re.split(r"(?<=\.)", before)
            for cut in range(max(len(parts) - _MAX_NESTED, 0), len(parts) + 1):
                yield {"w": "".join(parts[:cut]), "p": "".join(parts[cut:])}


def _respell(family: Family, name: str) -> str:
    for pattern, replacement in family.keys.respell:
        name = re.sub(pattern, replacement, name)
    return name


def _spread_stacks(
    family: Family, entries: Mapping[str, Entry]
) -> tuple[dict[str, TensorLocation], dict[str, Shape]]:
    """Where each name of the family's table is in the file, and its shape; a stack is split by block."""
    locations, shapes = {}, {}
    for original, entry in entries.items():
        name = _respell(family, original)
        if name in locations:  # in two spellings: the second is unknown
            name = f"{original} again"
        stacked = family.keys.stacked
        if stacked and (stack := re.fullmatch(stacked, name)) and entry.shape:
            for index in range(min(entry.shape[0], MAX_BLOCKS)):
                slice_name = f"{stack[1]}_{index}{stack[2]}"
                locations[slice_name] = TensorLocation(original, index)
                shapes[slice_name] = entry.shape[1:]
        else:
            locations[name], shapes[name] = TensorLocation(original), entry.shape
    return locations, shapes


# ---- rows -----------------------------------------------------------------------------------


def _match_rows(match: FamilyMatch, shapes: Mapping[str, Shape], sizes: Sizes) -> None:
    """Fill in every row that applies: once, or for each block from 0 while there are any."""
    by_block = []
    for row in match.family.keys.rows:
        if "{i}" in row.ours:
            by_block.append(row)
        else:
            _match_row(match, row, None, shapes, sizes)
    for block in count():
        before = len(match.rows)
        for row in by_block:
            _match_row(match, row, block, shapes, sizes)
        if len(match.rows) == before or block >= MAX_BLOCKS:
            return


def _match_row(
    match: FamilyMatch, row: Row, block: int | None, shapes: Mapping[str, Shape], sizes: Sizes
) -> None:
    """Fill in a row if its tensors are present and ours has not come from another row."""
    names = [name.format(**match.placeholders, i=block) for name in row.theirs]
    if row.custom:
        names = [match.name_in_table(name, block) for name in names]
    present = [name for name in names if 0 not in shapes.get(name, (0,))]  # empty counts as missing
    ours, required = row.ours.format(i=block), row.requires.format(**match.placeholders, i=block)
    complete = row.parts == "prefix" or len(present) == len(names) - names.count("")  # but for gaps
    if ours in match.shapes or not present or not complete or not match.used.isdisjoint(present):
        return
    if required and required not in shapes:
        return
    try:
        pieces = [row.layout.shape(shapes[name], sizes) for name in present]
    except IndexError:  # too few axes for this layout, so it is another tensor
        return
    if row.parts == "prefix":
        for kind, name in zip(_PREFIX_TOKENS, names, strict=False):
            if name in present:
                match.prefix[kind] = pieces[present.index(name)][0]
    length = sum(piece[0] for piece in pieces) if pieces[0] else 0
    if row.has_gaps:
        length = len(names) * pieces[0][0]
    match.shapes[ours] = (length, *pieces[0][1:]) if pieces[0] else ()
    match.rows.append(RowMatch(row, tuple(present), ours))
    match.used.update(present)
