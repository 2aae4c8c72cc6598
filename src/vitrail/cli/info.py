"""`vitrail info`: what is in a weight file, from its headers alone. torch is not loaded."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli import facts as options

if TYPE_CHECKING:
    from vitrail.config import ViTConfig
    from vitrail.weights.describe import Description
    from vitrail.weights.folder import Stored

SHAPES = ("size", "patch", "channels")  # what a model is changed to when it is loaded


def info(
    file: Annotated[
        str, typer.Argument(help="A weight file, a folder with one and its settings, or hf:owner/name.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Look at every number for NaN and infinity.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Take hf:owner/name from the cache.")] = False,
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Say what is in a weight file without building the model: family, size, preprocessing, licence.

    With --check the exit code is 1 where a number is not finite.
    """
    from vitrail.weights.describe import describe
    from vitrail.weights.folder import open_model
    from vitrail.weights.hub import fetch_model

    path, origin = fetch_model(file, offline=offline)
    told = options.facts(family, keys, given, size)
    with open_model(path, told.pop("checkpoint_key", None)) as stored:
        what = describe(stored, **told)
        replace(what.config, **{name: told[name] for name in SHAPES if name in told})  # which checks them
        what = replace(what, card=replace(what.card, **origin))
        found = facts_of(stored, what)
        bad = scan(stored) if check else None
    if bad is not None:
        found["not finite"] = bad
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    if bad:
        raise typer.Exit(1)


def facts_of(stored: Stored, what: Description) -> dict[str, Any]:
    """Everything that is known, under the words it is shown with."""
    from vitrail.errors import printable

    config, entries = what.config, stored.entries
    own = what.found is None
    ours = (
        {n: e.shape for n, e in entries.items() if not n.startswith(("extras/", "golden/"))}
        if own
        else what.found.shapes  # type: ignore[union-attr]
    )
    extras = [n for n in entries if n.startswith("extras/")] if own else what.found.extras  # type: ignore[union-attr]
    dtypes = Counter(entry.dtype for entry in entries.values())
    return {
        "file": printable(str(stored.path)),
        "family": f"{what.family}: {what.title}",
        "model": size_name(config),
        "parameters": sum(math.prod(shape) for shape in ours.values()),
        "classes": config.classes,
        "labels": [printable(label) for label in what.labels] if what.labels else None,
        "preprocessing": what.preprocess.describe() if what.preprocess else None,
        "licence": printable(what.card.licence),
        "source": printable(what.card.source) or None,
        "metrics": {printable(str(n)): value for n, value in what.card.metrics.items()} or None,
        "dtypes": dict(dtypes),
        "besides the model": [printable(name) for name in extras] or None,
        "follows": what.follows or None,
        "taken on trust": [printable(note) for note in what.notes] or None,
        "config": unusual(config),
    }


def size_name(config: ViTConfig) -> str:
    """ "B/16@224x224", where it is a published size; its numbers otherwise."""
    from vitrail.config import by
    from vitrail.presets import SIZES

    sides = f"/{by(dict.fromkeys(config.patch_pixels))}@{by(config.pixels)}"
    numbers = config.width, config.depth, config.F, config.heads
    for name, size in SIZES.items():
        if (size.width, size.depth, size.mlp_width, size.heads) == numbers:
            return f"{name}{sides}"
    return f"width {config.width}, depth {config.depth}, {config.heads} heads, MLP {config.F}, {sides}"


def unusual(config: ViTConfig) -> dict[str, Any]:
    """The fields that are not as in the paper."""
    import dataclasses

    skipped = ("width", "depth", "heads", "mlp_width", "patch", "size", "classes")
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in skipped and getattr(config, field.name) != field.default
    }


def scan(stored: Stored) -> list[str]:
    """The tensors with a NaN or an infinity, read in pieces."""
    import numpy as np

    from vitrail.errors import printable

    return [
        printable(name)
        for name, entry in stored.entries.items()
        if "float" in entry.dtype and not all(np.isfinite(piece).all() for piece in stored.chunks(name))
    ]


def show(found: dict[str, Any]) -> None:
    """Two columns: word and value; lists go below one another."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for word, value in found.items():
        if value not in (None, {}):
            table.add_row(Text(word, style="bold"), Text(in_words(value)))
    Console(highlight=False).print(table)


def in_words(value: Any) -> str:
    match value:
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case []:
            return "none"
        case list() if len(value) > 12:
            return ", ".join(map(str, value[:10])) + f" and {len(value) - 10} more"
        case list():
            joint = ", " if sum(map(len, value)) < 80 else "\n"
            return joint.join(map(str, value))
        case dict():
            return ", ".join(f"{name} {in_words(one)}" for name, one in value.items())
        case _:
            return f"{value:g}" if isinstance(value, float) else str(value)
