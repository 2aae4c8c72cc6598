"""`vitrail info`: what is in a weight file, from its headers alone. torch is not imported."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import typer
from typer import Argument, Option

from vitrail.cli.options import FileOptions

if TYPE_CHECKING:
    from vitrail.model.config import ViTConfig
    from vitrail.weights.bundle.bundle_header import FileDescription
    from vitrail.weights.readers.folder import ModelFiles

_SHAPES = ("size", "patch", "channels")  # what a model is changed to when it is loaded


def info(
    file: str = Argument(..., help="A weight file, a folder with one and its settings, or hf:owner/name."),
    check: bool = Option(False, "--check", help="Check every value for NaN and infinity."),
    as_json: bool = Option(False, "--json", help="Print JSON."),
    *,
    opening: FileOptions,
) -> None:
    """Show what is in a weight file, without building the model.

    Its family, size, preprocessing and license are read from its header. With --check, the exit code is 1 if
    a value is NaN or infinity.
    """
    from vitrail.weights.load import describe
    from vitrail.weights.readers.folder import open_model

    arguments = opening.overrides()
    with open_model(file, arguments.pop("checkpoint_key", None), offline=opening.offline) as files:
        description = describe(files, **arguments)
        changes = {name: arguments[name] for name in _SHAPES if name in arguments}
        replace(description.config, **changes)  # raises for an impossible shape
        facts = _collect(files, description)
        bad = _scan(files) if check else None
    if bad is not None:
        facts["NaN or infinity"] = bad
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    if bad:
        raise typer.Exit(1)


def _collect(files: ModelFiles, description: FileDescription) -> dict[str, Any]:
    """Everything that is shown, by name."""
    from vitrail.base.errors import printable
    from vitrail.images.any_size import native_preprocess
    from vitrail.weights.bundle.bundle_header import read_header
    from vitrail.weights.bundle.feature_statistics import PREFIX

    counts, means = (read_header(files) or {}).get("fingerprint"), files.entries.get(f"{PREFIX}means")
    config, match, card = description.config, description.match, description.card
    labels, preprocess = description.labels, description.preprocess
    text = _text_tower(files, description)
    dtypes = (e.dtype for name, e in files.entries.items() if not name.startswith((PREFIX, "fingerprint/")))
    by_words = text is not None and labels is None  # then what looks like a head is CLIP's projection
    if preprocess is not None and description.native is not None:
        down, across = config.patch_pixels
        preprocess = native_preprocess(preprocess, (down, across), config.patches)
    return {
        "file": printable(files.path),
        "family": f"{description.family}: {description.title}",
        "model": _size_name(config),
        "parameters": sum(math.prod(shape) for shape in description.shapes.values()),
        "classes": None if by_words else config.classes,
        "zero-shot": "classes by words: vitrail predict --labels cat,dog" if by_words else None,
        "labels": [printable(label) for label in labels] if labels else None,
        "scores": description.scores.summary() if config.classes and not by_words else None,
        "preprocessing": preprocess.describe() if preprocess else None,
        "preprocessing from": description.preprocess_from or None,
        "license": printable(card.license),
        "source": printable(card.source) or None,
        "metrics": {printable(name): value for name, value in card.metrics.items()} or None,
        "trained on": f"{sum(counts):,} images (fingerprint)" if isinstance(counts, list) else None,
        "dtypes": dict(Counter(dtypes)),
        "feature statistics": means and f"{means.shape[0]:,} means, to tell images out of distribution",
        "text tower": text,
        "extra tensors": [printable(name) for name in description.extras.values()] or None,
        "follows": (match and match.family.profile.follows) or None,
        "notes": [printable(note, 500) for note in description.notes] or None,
        "config": _non_default(config),
    }


def _text_tower(files: ModelFiles, description: FileDescription) -> str | None:
    """The text tower among the tensors that the image model does not use."""
    from vitrail.weights.readers.folder import TEXT_PREFIX
    from vitrail.weights.text.words import describe_text

    beside = [path.name for path in files.path.iterdir()] if files.path.is_dir() else []
    inside = [name.removeprefix(TEXT_PREFIX) for name in files.entries if name.startswith(TEXT_PREFIX)]
    others = {name: files.entries[original] for name, original in description.extras.items()}
    return describe_text(others, [*beside, *inside])


def _size_name(config: ViTConfig) -> str:
    """ "B/16@224x224" for a published size; otherwise its numbers."""
    from vitrail.model.config import format_sides
    from vitrail.model.presets import SIZES

    sides = f"/{format_sides(dict.fromkeys(config.patch_pixels))}@{format_sides(config.pixels)}"
    numbers = config.width, config.depth, config.F, config.heads
    for name, size in SIZES.items():
        if (size.width, size.depth, size.mlp_width, size.heads) == numbers:
            return f"{name}{sides}"
    return f"width {config.width}, depth {config.depth}, {config.heads} heads, MLP {config.F}, {sides}"


def _non_default(config: ViTConfig) -> dict[str, Any]:
    """The fields that differ from the defaults, which are the paper's."""
    shown = ("width", "depth", "heads", "mlp_width", "patch", "size", "classes")  # by the size's name
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in shown}
    defaults = {field.name: field.default for field in fields(config)}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _scan(files: ModelFiles) -> list[str]:
    """The tensors with NaN or infinity, read in chunks."""
    import numpy as np

    from vitrail.base.errors import printable

    return [
        printable(name)
        for name, entry in files.entries.items()
        if "float" in entry.dtype and not all(np.isfinite(chunk).all() for chunk in files.chunks(name))
    ]


def _show(facts: dict[str, Any]) -> None:
    """Print a table of names and values; long lists take a line per item."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if value not in (None, {}):
            table.add_row(Text(name, style="bold"), Text(_as_text(value)))
    Console(highlight=False).print(table)


def _as_text(value: Any) -> str:
    match value:
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case []:
            return "none"
        case list() if len(value) > 12:
            return ", ".join(map(str, value[:10])) + f" and {len(value) - 10} more"
        case list():
            joint = ", " if sum(map(len, value)) < 80 else "\n"
            return joint.join(map(str, value))
        case dict():
            return ", ".join(f"{name} {_as_text(item)}" for name, item in value.items())
        case _:
            return f"{value:g}" if isinstance(value, float) else str(value)
