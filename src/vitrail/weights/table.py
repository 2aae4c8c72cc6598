"""Their names and ours: one table of keys for each family, used both ways.

A row says which of their tensors make up one of ours:

    Row(("{p}layer.{i}.query.weight", "{p}layer.{i}.key.weight", ...), "blocks.{i}.attention.qkv.weight")

`{i}` is the number of the block. `{p}` is what the family puts before the names of the encoder, such
as "vit.", one of its `prefixes`; `{w}` is what somebody else has put before everything, such as
"module.". Where several rows make the same tensor of ours, they are spellings: the first that is
there is read, and the first of all is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from vitrail.config import ViTConfig
from vitrail.errors import printable
from vitrail.weights.files import Entry
from vitrail.weights.layout import Layout, Shape, Sizes, same

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.preprocess import Preprocess

MOST_BLOCKS = 10_000
MOST_SPLITS, MOST_NESTED = 100, 8  # far more than an honest file has: names must not cost us hours
ANY = "*"
ROLES = ("class", "distillation", "registers")  # of the prefix tokens, in our order


@dataclass(frozen=True)
class Row:
    """Some of their tensors, one after the other, are one of ours."""

    theirs: tuple[str, ...]
    ours: str
    layout: Layout = same
    parts: tuple[int, ...] | Literal["prefix"] = ()
    """How ours falls into theirs again: evenly, in these proportions, or by the prefix tokens. Of
    the prefix's three names, for class token, distillation token and registers, any may be missing."""
    beside: str = ""
    """A name that must be there as well, for the row to be read."""
    when: tuple[str, Any] | None = None
    """A field of the config and the value that it must have, for the row to be written."""
    own: bool = False
    """From a user's table: its names are the file's own, before `respell` and before a stack is split."""

    @property
    def by_block(self) -> bool:
        return "{i}" in self.ours


def row(theirs: str | Iterable[str], ours: str, layout: Layout = same, **more: Any) -> Row:
    return Row((theirs,) if isinstance(theirs, str) else tuple(theirs), ours, layout, **more)


def both(theirs: str | Iterable[str], ours: str, layout: Layout = same, **more: Any) -> tuple[Row, Row]:
    """A layer: its weight, which has the layout, and its bias, which lies as ours does."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    weight = row([f"{name}.weight" for name in names], f"{ours}.weight", layout, **more)
    return weight, row([f"{name}.bias" for name in names], f"{ours}.bias", **more)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Another library's files: how to know them, read them and write them."""

    name: str
    """One spelling of one library's model, such as "hf-dinov2"."""
    group: str
    """What a user calls it: "hf"."""
    title: str
    """Whose models these are, in words."""
    anchors: tuple[str, ...]
    """Names that must all be there; the first says what {w} and {p} are. Without any, they are empty."""
    without: tuple[str, ...] = ()
    """Patterns of names that belong to a relative of the family."""
    prefixes: tuple[str, ...] = ("",)
    """What {p} may be; `ANY` is whatever goes with the most names of the table."""
    rows: tuple[Row, ...]
    extras: tuple[str, ...] = ()
    """Patterns of tensors that classifying and encoding do not need; they are kept and written back."""
    respell: Callable[[str], str] = str
    """Other spellings of one name to one."""
    wrapper: str = ""
    """The key of the pickle under which the family keeps its tensors, where that tells it from others."""
    model_types: tuple[str, ...] = ()
    """What transformers calls such a model in config.json: with those settings, this family goes first."""
    stacked: str = ""
    """A pattern of names whose tensors hold all blocks, along their first axis."""

    # ---- the profile: what shapes do not tell
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config, for every model of the family."""
    choose: Callable[[Found], Mapping[str, Any]] = lambda found: {}
    """Fields of the config that follow from which tensors there are."""
    head_width: int | None = None
    """d where heads are not told; None is the one that published models of that width have."""
    resize: Mapping[str, Any] = field(default_factory=dict)
    """How positions are resized: what `resample.resize_grid` takes."""
    preprocess: str = "imagenet"
    """The family's published preprocessing, a name in `vitrail.preprocess`."""
    fixed: Callable[[ViTConfig, str], dict[str, Tensor]] = lambda config, device: {}
    """Tensors of ours that the library computes, for a file that does not hold them."""
    follows: str = ""
    """Whom the profile follows, where libraries disagree on the same weights."""
    suffix: str = ".safetensors"
    """The kind of file the family's models come in."""

    # ---- how it is written from a model of another family
    expresses: Mapping[str, Any] | None = None
    """For each field of the config a tuple of the values that the library has, or `...` for any; other
    fields must be as they are by default. None: the family is only written back where it came from."""
    also: Callable[[ViTConfig], list[str]] = lambda config: []
    """What else the library cannot express in this model, a reason each."""
    settings: Callable[[ViTConfig, Preprocess, list[str] | None], dict[str, Any]] | None = None
    """The JSON files of a folder, by name."""
    read_settings: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda settings: {}
    """Fields of the config from a folder's config.json."""
    blanks: Mapping[str, Callable[[ViTConfig], Shape]] = field(default_factory=dict)
    """Tensors that the library's loader insists on and no picture needs: zeros, where we have none."""
    peer: Callable[[ViTConfig, dict[str, Tensor]], Callable[[Tensor], Tensor]] | None = None
    """The library's own model with these tensors, strictly loaded: pictures to logits."""

    def locate(self, names: Iterable[str]) -> dict[str, str] | None:
        """What stands for {w} and {p} in a file with these names, if it is of this family."""
        known = set(names)
        fitting = [spelled for spelled in self.splits(known) if self.is_there(spelled, known)]
        return max(fitting, key=lambda spelled: self.count(spelled, known), default=None)

    def splits(self, known: Collection[str]) -> Iterator[dict[str, str]]:
        """Every {w} and {p} that may stand before the first anchor; the longest {p} first."""
        for p in sorted(self.prefixes, key=len)[::-1]:
            suffix = self.anchors[0].format(w="", p="" if p == ANY else p, i=0)
            ending = sorted((n for n in known if n.endswith(suffix)), key=lambda n: (len(n), n))
            for name in ending[:MOST_SPLITS]:
                before = name.removesuffix(suffix)
                if before and before[-1] not in "./":
                    continue
                if p != ANY:
                    yield {"w": before, "p": p}
                    continue
                *parts, _ = re.split(r"(?<=\.)", before)
                for cut in range(max(len(parts) - MOST_NESTED, 0), len(parts) + 1):
                    yield {"w": "".join(parts[:cut]), "p": "".join(parts[cut:])}

    def is_there(self, spelled: Mapping[str, str], known: Collection[str]) -> bool:
        others = [pattern.format(**spelled) for pattern in self.without]
        return all(anchor.format(**spelled, i=0) in known for anchor in self.anchors) and not any(
            fnmatchcase(name, other) for other in others for name in known
        )

    def count(self, spelled: Mapping[str, str], known: Collection[str]) -> int:
        """How many names of the table are there, outside the blocks and in the first."""
        names = {name.format(**spelled, i=0) for row in self.rows for name in row.theirs}
        return sum(name in known for name in names)


@dataclass(frozen=True)
class Place:
    """Where in the file a tensor is: a whole one, or one block of a stack."""

    original: str
    index: int | None = None


@dataclass(frozen=True)
class Use:
    """A row that fits this file, with its names filled in."""

    row: Row
    theirs: tuple[str, ...]
    ours: str


@dataclass
class Found:
    """A file, seen through a family's table."""

    family: Family
    spelled: dict[str, str]
    entries: dict[str, Entry]
    """By the names in the file."""
    places: dict[str, Place]
    """Where each name of the table is in the file."""
    uses: list[Use]
    shapes: dict[str, Shape]
    """The shapes of our tensors."""
    prefix: dict[str, int]
    """How many tokens of each role there are."""
    extras: list[str]
    """Tensors of the file that are kept beside the model."""
    unknown: list[str]
    """Tensors of the file that have no place at all."""
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    """What the family's `choose` has to say of this file, a sentence each."""

    def __post_init__(self) -> None:
        self.spellings = {(place.original, place.index): name for name, place in self.places.items()}

    def named(self, original: str, block: int | None) -> str:
        """The table's name for a name in the file; in a stack, that of the block's slice."""
        found = self.spellings.get((original, None)) or self.spellings.get((original, block))
        return found or original

    def has(self, template: str) -> bool:
        """Whether the file holds a tensor of this name; {i} is block 0."""
        return template.format(**self.spelled, i=0) in self.places

    @property
    def depth(self) -> int:
        blocks = [int(name.split(".")[1]) for name in self.shapes if name.startswith("blocks.")]
        return max(blocks, default=-1) + 1


def listed(names: list[str]) -> str:
    """The first of some names from a file, and how many more there are."""
    shown = ", ".join(printable(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def look(family: Family, entries: Mapping[str, Entry], sizes: Sizes, wrapper: str = "") -> Found | None:
    """A file's names and shapes through a family's table; None where it is of another family."""
    if family.wrapper not in ("", wrapper):
        return None
    entries = dict(entries)
    places, shapes = spread(family, entries)
    # A user's rows, and the anchors they name anew, go by the names in the file.
    known = {*places, *entries} if any(one.own for one in family.rows) else places.keys()
    spelled = family.locate(known) if family.anchors else {"w": "", "p": ""}
    if spelled is None:
        return None
    found = Found(family, spelled, entries, places, [], {}, {}, [], [])
    use(found, family.rows, shapes, sizes)
    left = dict.fromkeys(places[name].original for name in places if name not in found.used)
    patterns = [pattern.format(**spelled) for pattern in family.extras]
    for name in left:
        spare = any(fnmatchcase(family.respell(name), pattern) for pattern in patterns)
        (found.extras if spare else found.unknown).append(name)
    return found


def spread(family: Family, entries: Mapping[str, Entry]) -> tuple[dict[str, Place], dict[str, Shape]]:
    """Where each name of the family's table is in the file, and its shape."""
    places, shapes = {}, {}
    for original, entry in entries.items():
        name = family.respell(original)
        if name in places:  # in two spellings: the second has no place
            name = f"{original} again"
        if family.stacked and (stack := re.fullmatch(family.stacked, name)) and entry.shape:
            for index in range(min(entry.shape[0], MOST_BLOCKS)):
                slice_name = f"{stack[1]}_{index}{stack[2]}"
                places[slice_name], shapes[slice_name] = Place(original, index), entry.shape[1:]
        else:
            places[name], shapes[name] = Place(original), entry.shape
    return places, shapes


def use(found: Found, rows: Iterable[Row], shapes: Mapping[str, Shape], sizes: Sizes) -> None:
    """Fill in every row that fits: once, or for each block from 0 while there are any."""
    rows = list(rows)
    for one in rows:
        if not one.by_block:
            fit(found, one, None, shapes, sizes)
    for block in count():
        before = len(found.uses)
        for one in rows:
            if one.by_block:
                fit(found, one, block, shapes, sizes)
        if len(found.uses) == before or block >= MOST_BLOCKS:
            return


def fit(found: Found, one: Row, block: int | None, shapes: Mapping[str, Shape], sizes: Sizes) -> None:
    """Fill in a row, if its tensors are there and ours has not come from another."""
    names = tuple(name.format(**found.spelled, i=block) for name in one.theirs)
    if one.own:
        names = tuple(found.named(name, block) for name in names)
    there = tuple(name for name in names if 0 not in shapes.get(name, (0,)))  # an empty one is none
    ours, beside = one.ours.format(i=block), one.beside.format(**found.spelled, i=block)
    if ours in found.shapes or not there or (one.parts != "prefix" and there != names):
        return
    if (beside and beside not in shapes) or not found.used.isdisjoint(there):
        return
    try:
        pieces = [one.layout.shape(shapes[name], sizes) for name in there]
    except IndexError:  # too few axes for this layout, so it is another tensor
        return
    if one.parts == "prefix":
        for role, name in zip(ROLES, names, strict=False):
            if name in there:
                found.prefix[role] = pieces[there.index(name)][0]
    found.shapes[ours] = (sum(piece[0] for piece in pieces), *pieces[0][1:]) if pieces[0] else ()
    found.uses.append(Use(one, there, ours))
    found.used.update(there)


def read(found: Found, tensor: Callable[[str], Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Our tensors, from `tensor(name)` for each name in the file."""
    import torch

    stacks: dict[str, Tensor] = {}  # a stack is read once, not for every block

    def at(name: str) -> Tensor:
        place = found.places[name]
        if place.index is None:
            return tensor(place.original)
        if place.original not in stacks:
            stacks[place.original] = tensor(place.original)
        return stacks[place.original][place.index]

    state = {}
    for one in found.uses:
        pieces = [one.row.layout.read(at(name), sizes) for name in one.theirs]
        state[one.ours] = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()
    return state


def write(
    family: Family, uses: Iterable[Use], state: Mapping[str, Tensor], config: ViTConfig
) -> dict[str, Tensor]:
    """Their tensors by the names of their table, the blocks of a stack still apart."""
    sizes = Sizes(config.heads, config.channels, config.patch_pixels)
    theirs = {}
    for one in uses:
        tensor = state[one.ours]
        pieces = tensor.split(part_sizes(one, len(tensor), config)) if len(one.theirs) > 1 else (tensor,)
        for name, piece in zip(one.theirs, pieces, strict=True):
            theirs[name] = one.row.layout.write(piece, sizes).contiguous()
    return theirs


def part_sizes(one: Use, total: int, config: ViTConfig) -> list[int]:
    """How long each of their pieces is along the first axis."""
    if one.row.parts == "prefix":
        counts = [int(config.class_token), int(config.distillation_token), config.registers]
        return [number for number in counts if number]
    shares = one.row.parts or (1,) * len(one.theirs)
    return [total * share // sum(shares) for share in shares]


def fits(one: Row, config: ViTConfig) -> bool:
    return one.when is None or getattr(config, one.when[0]) == one.when[1]


def plan(
    family: Family, names: Iterable[str], config: ViTConfig, spelled: Mapping[str, str]
) -> tuple[list[Use], list[str]]:
    """How a model with these tensors is written from nothing; and the tensors without a row."""
    uses, done, left = [], set(), []
    counts = [int(config.class_token), int(config.distillation_token), config.registers]
    for ours in names:
        parts = ours.split(".")
        block = parts[1] if parts[0] == "blocks" else None
        template = ".".join(["blocks", "{i}", *parts[2:]]) if block is not None else ours
        one = next((r for r in family.rows if r.ours == template and fits(r, config)), None)
        if one is None:
            left.append(ours)
            continue
        theirs = tuple(name.format(**spelled, i=block) for name in one.theirs)
        if one.parts == "prefix":
            theirs = tuple(n for n, number in zip(theirs, counts, strict=False) if number)
        if ours not in done:
            uses.append(Use(one, theirs, ours))
            done.add(ours)
    return uses, left
