"""State dicts by a key table: tensors from a file's names to ours, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Family
from vitrail.weights.families.key_rows import Row
from vitrail.weights.families.layout import Sizes
from vitrail.weights.families.match import FamilyMatch, RowMatch

if TYPE_CHECKING:
    from torch import Tensor


def sizes_of(config: ViTConfig) -> Sizes:
    return Sizes(config.heads, config.channels, config.patch_pixels)


def read_state(match: FamilyMatch, tensor: Callable[[str], Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors, from `tensor(name)` for each name in the file."""
    import torch

    sizes = sizes_of(config)
    stacks: dict[str, Tensor] = {}  # a stack is read once, not for every block

    def read(name: str) -> Tensor:
        location = match.locations[name]
        if location.index is None:
            return tensor(location.original)
        if location.original not in stacks:
            stacks[location.original] = tensor(location.original)
        return stacks[location.original][location.index]

    state = {}
    for row in match.rows:
        pieces = [row.row.layout.read(read(name), sizes) for name in row.theirs]
        if row.row.gaps:
            present = iter(pieces)
            pieces = [next(present) if name else torch.zeros_like(pieces[0]) for name in row.row.theirs]
        state[row.ours] = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()
    return state


def write_state(
    rows: Iterable[RowMatch], state: Mapping[str, Tensor], config: ViTConfig
) -> dict[str, Tensor]:
    """Their tensors by the names of their table; the blocks of a stack are still separate."""
    sizes = sizes_of(config)
    theirs = {}
    for row in rows:
        tensor = state[row.ours]
        several = len(row.theirs) > 1 or row.row.gaps
        pieces = tensor.split(_part_sizes(row, len(tensor), config)) if several else (tensor,)
        if row.row.gaps:
            pieces = tuple(piece for piece, name in zip(pieces, row.row.theirs, strict=True) if name)
        for name, piece in zip(row.theirs, pieces, strict=True):
            theirs[name] = row.row.layout.write(piece, sizes).contiguous()
    return theirs


def restack(theirs: Mapping[str, Tensor], match: FamilyMatch) -> dict[str, Tensor]:
    """Tensors under the names of the file they came from; the blocks of a stack together again."""
    import torch

    out: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in theirs.items():
        location = match.locations.get(name)
        if location is None or location.index is None:
            out[name if location is None else location.original] = tensor
        else:
            stacks.setdefault(location.original, []).append(tensor)  # rows go by block, from 0
    return out | {name: torch.stack(blocks) for name, blocks in stacks.items()}


def plan_rows(
    family: Family, names: Iterable[str], config: ViTConfig, placeholders: Mapping[str, str]
) -> tuple[list[RowMatch], list[str]]:
    """The rows that write a model with these tensors; and the tensors without a row."""
    rows, done, left = [], set(), []
    for ours in names:
        parts = ours.split(".")
        block = parts[1] if parts[0] == "blocks" else None
        template = ".".join(["blocks", "{i}", *parts[2:]]) if block is not None else ours
        row = next((r for r in family.keys.rows if r.ours == template and _applies(r, config)), None)
        if row is None:
            left.append(ours)
            continue
        theirs = tuple(name.format(**placeholders, i=block) for name in row.theirs)
        if row.parts == "prefix":
            counts = _prefix_counts(config)
            theirs = tuple(name for name, number in zip(theirs, counts, strict=False) if number)
        theirs = tuple(name for name in theirs if name)
        if ours not in done:
            rows.append(RowMatch(row, theirs, ours))
            done.add(ours)
    return rows, left


def _applies(row: Row, config: ViTConfig) -> bool:
    return row.when is None or getattr(config, row.when[0]) == row.when[1]


def _prefix_counts(config: ViTConfig) -> list[int]:
    return [int(config.class_token), int(config.distillation_token), config.registers]


def _part_sizes(row: RowMatch, total: int, config: ViTConfig) -> list[int]:
    """The length of each of their pieces along the first axis."""
    if row.row.parts == "prefix":
        return [number for number in _prefix_counts(config) if number]
    proportions = row.row.parts or (1,) * len(row.row.theirs)
    return [total * part // sum(proportions) for part in proportions]
