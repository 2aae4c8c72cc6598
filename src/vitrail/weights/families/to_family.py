"""A model in another family: whether it can be expressed, its tensors under their names, its files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, FileError, VitrailError, printable
from vitrail.base.fields import short_repr
from vitrail.base.safe_files import atomic_folder, parse_json, write_bytes, write_text
from vitrail.images.preprocess import Preprocess
from vitrail.images.published_preprocess import from_hf
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.bundle import Bundle, Source, cast_exactly, in_source_dtype
from vitrail.weights.families.family import Family
from vitrail.weights.families.key_rows import Sizes
from vitrail.weights.families.keys import read_table, with_rows
from vitrail.weights.families.match import FamilyMatch, RowMatch, join_names, match_family
from vitrail.weights.readers.files import Entry, write_npz, write_safetensors
from vitrail.weights.text.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from torch import Tensor

# Fields that the shapes show, or that matter only in training: every family supports them.
TRAINING_ONLY = (
    *("dropout", "attention_dropout", "patch_dropout", "drop_path", "init", "position_sigma", "layer_scale"),
)
_ALWAYS_SUPPORTED = (
    *("width", "depth", "heads", "mlp_width", "patch", "size", "channels", "classes", "vocabulary"),
    *TRAINING_ONLY,
)


class ConversionError(VitrailError, ValueError):
    """A model that the other library cannot express."""


def unsupported(family: Family, config: ViTConfig) -> list[str]:
    """Why the family's library cannot compute what this model computes, a reason each."""
    supported = family.writer.expresses or {}
    cut = any(side % step for side, step in zip(config.pixels, config.patch_pixels, strict=True))
    reasons = []
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        allowed = supported.get(one.name, (one.default,))
        if one.name == "remainder" and not cut:
            continue  # the patches cover the image
        if one.name not in _ALWAYS_SUPPORTED and allowed is not ... and value not in allowed:
            only = " or ".join(short_repr(choice) for choice in allowed)
            reasons.append(f"{one.name} is {only} there, and {short_repr(value)} here")
    return reasons + (family.writer.unsupported(config) if family.writer.unsupported else [])


# ---- tensors --------------------------------------------------------------------------------


def family_tensors(bundle: Bundle, family: Family) -> tuple[list[RowMatch], dict[str, Tensor]]:
    """The model's tensors under the family's names; for the family it came from, exactly as they were."""
    state = {name: tensor.detach().cpu() for name, tensor in bundle.model.state_dict().items()}
    if bundle.source and bundle.source.family == family.name:
        return _original_tensors(bundle, family, bundle.source, state)
    config, placeholders = bundle.model.config, {"w": "", "p": family.detect.prefixes[0]}
    rows, left = plan_rows(family, state, config, placeholders)
    if left:
        raise ConversionError(
            f"{family.name} has no tensors for {join_names(left)} of this model; write another family."
        )
    theirs = write_state(rows, in_source_dtype(state, bundle.source), config)
    some = next(iter(theirs.values()))
    for name, shape in family.keys.zeros.items():
        theirs.setdefault(name.format(**placeholders), some.new_zeros(shape(config)))
    return rows, theirs


def _original_tensors(
    bundle: Bundle, family: Family, source: Source, state: Mapping[str, Tensor]
) -> tuple[list[RowMatch], dict[str, Tensor]]:
    """The tensors for the file that the model came from, with its names, shapes and dtypes."""
    import torch

    config = bundle.model.config
    match = _match_source(family, source, config)
    computed = family.profile.computed(config) if family.profile.computed else {}
    done = {row.ours for row in match.rows}
    # Files omit what the library computes, if it is still that.
    done |= {n for n, tensor in computed.items() if n in state and torch.equal(state[n].float(), tensor)}
    fresh, _ = plan_rows(family, [name for name in state if name not in done], config, match.placeholders)
    rows = [row for row in (*match.rows, *fresh) if row.ours in state]
    theirs = restack(write_state(rows, state, config), match)
    return rows, {
        name: _as_stored(tensor, source.tensors.get(name))
        for name, tensor in [*theirs.items(), *bundle.extras.items()]
    }


def _match_source(family: Family, source: Source, config: ViTConfig) -> FamilyMatch:
    """The file a model came from, matched by the same table as when it was read."""
    entries = {name: Entry(dtype, shape) for name, (dtype, shape) in source.tensors.items()}
    table = read_table(source.keys)
    extended = with_rows(family, table.rows) if table.rows else family
    match = match_family(extended, table.without_ignored(entries), Sizes.of(config), family.detect.wrapper)
    if match is None:
        raise FileError(
            f"The model claims to come from a file of the family {family.name}, but the tensor names it "
            "lists are not of that family; write another family, or convert the original file."
        )
    return match


def _as_stored(tensor: Tensor, before: tuple[str, tuple[int, ...]] | None) -> Tensor:
    """A tensor in the shape and dtype it had in its file, if it still fits them."""
    import torch

    if before is None:
        return tensor
    dtype, shape = before
    if math.prod(shape) == tensor.numel():
        tensor = tensor.reshape(shape)
    return cast_exactly(tensor, getattr(torch, dtype))


def write_state(
    rows: Iterable[RowMatch], state: Mapping[str, Tensor], config: ViTConfig
) -> dict[str, Tensor]:
    """Their tensors by the names of their table; the blocks of a stack are still separate."""
    sizes = Sizes.of(config)
    theirs = {}
    for row in rows:
        tensor = state[row.ours]
        if row.row.parts == "prefix":
            lengths = [number for number in _prefix_counts(config) if number]
        else:
            proportions = row.row.parts or (1,) * len(row.row.theirs)
            lengths = [len(tensor) * part // sum(proportions) for part in proportions]
        pieces = tensor.split(lengths) if len(lengths) > 1 else (tensor,)
        if row.row.has_gaps:
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
        spellings = [row for row in family.keys.rows if row.ours == template]
        row = next((r for r in spellings if not r.when or getattr(config, r.when[0]) == r.when[1]), None)
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


def _prefix_counts(config: ViTConfig) -> list[int]:
    return [int(config.class_token), int(config.distillation_token), config.registers]


# ---- files ----------------------------------------------------------------------------------


def write_family(out: Path, family: Family, tensors: dict[str, Tensor], bundle: Bundle) -> None:
    """Write the file, or the folder with its settings, completely or not at all."""
    if out.suffix == ".npz":
        write_npz(out, {name: _as_numpy(tensor) for name, tensor in tensors.items()})
    elif out.suffix == ".safetensors":
        write_safetensors(out, tensors, {"format": "pt"})
    elif family.writer.settings is None or bundle.preprocess is None:
        raise ConfigError(
            f"The family {family.name} is written as one file, and {printable(out)} would be a folder; use a "
            f"name that ends in {family.writer.suffix}."
        )
    else:
        settings = family.writer.settings(bundle.model.config, bundle.preprocess, bundle.labels)
        bundle.notes += _preprocess_notes(bundle.preprocess, settings)
        tokenizer: Mapping[str, bytes] = {}
        if bundle.source and bundle.source.family == family.name and bundle.has_text:
            settings, tokenizer = _add_text(bundle, settings)
        try:
            out.absolute().parent.stat()  # a missing parent folder is an error, not created
            with atomic_folder(out) as partial:
                write_safetensors(partial / "model.safetensors", tensors, {"format": "pt"})
                for name, content in settings.items():
                    write_text(partial / name, json.dumps(content, indent=2) + "\n")
                for name, data in tokenizer.items():
                    write_bytes(partial / name, data)
        except OSError as error:
            raise FileError(
                f"{printable(out)} cannot be written: {error.strerror or error}. Check the folder it is in."
            ) from error


def _add_text(bundle: Bundle, settings: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    """The settings of both towers, as transformers has them in one config.json, and the tokenizer's files.

    The text tower's settings are those that were beside the weights; without them, a note says so.
    """
    files = bundle.text_files
    tokenizer = {name: files[name] for name in TOKENIZER_FILES if name in files}
    both = parse_json(files["config.json"], "config.json", allow_nan=True) if "config.json" in files else None
    if not isinstance(both, dict) or not isinstance(both.get("text_config"), dict):
        bundle.notes.append(
            "The text tower is written, too, but config.json describes the image tower alone: the settings "
            "of the text tower were not beside the weights."
        )
        return dict(settings), tokenizer
    not_sizes = ("architectures", "id2label", "label2id")
    vision = {name: value for name, value in settings["config.json"].items() if name not in not_sizes}
    both["vision_config"] = {**(both.get("vision_config") or {}), **vision}
    return {**settings, "config.json": both}, tokenizer


def _preprocess_notes(preprocess: Preprocess, settings: Mapping[str, Any]) -> list[str]:
    """A note for each field of the preprocessing that transformers cannot express."""
    if "preprocessor_config.json" not in settings:
        return []
    written = dataclasses.asdict(from_hf(settings["preprocessor_config.json"]))
    return [
        f"The preprocessing was written with {name}={short_repr(written[name])}, since transformers has no "
        f"{short_repr(value)}."
        for name, value in dataclasses.asdict(preprocess).items()
        if written[name] != value
    ]


def _as_numpy(tensor: Tensor) -> Any:
    import torch

    if tensor.dtype == torch.bfloat16:  # as numpy without ml_dtypes has it: two untyped bytes
        return tensor.contiguous().view(torch.int16).numpy().view("V2")
    return tensor.numpy()
