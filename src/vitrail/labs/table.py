"""`vitrail notes --table`: the published results and sizes that the notes print, and ours beside them.

published.json has the published figures as the notes print them, each row with its source. Ours are
counted or read where they are made: parameters from models that are never allocated, accuracy from the
recipe that gave it. Where nothing of ours can stand beside a figure there is a dash, and below the table
the reason.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.labs.errata.erratum import count
from vitrail.recipes import recipes

PUBLISHED = Path(__file__).with_name("published.json")
NONE = "-"


@dataclass(frozen=True)
class Row:
    """One published row, and ours beside it."""

    table: Literal["results", "sizes"]
    name: str
    published: Mapping[str, str]
    """By column, as printed."""
    source: str
    printed: tuple[str, ...]
    """The notes that print it, and their slides."""
    note: str
    """Where the printing differs, or is known to be wrong."""
    ours: str
    """A dash where there is nothing to compare."""
    reason: str
    """What ours is, or why there is none."""


def rows(file: Path = PUBLISHED) -> list[Row]:
    """All rows, results first."""
    known = json.loads(file.read_text(encoding="utf-8"))
    tables: dict[Literal["results", "sizes"], Callable[[Mapping[str, Any]], tuple[str, str]]] = {
        "results": our_result,
        "sizes": our_size,
    }
    found = []
    for table, ours in tables.items():
        for one in known[table]:
            words = {name: one[name] for name in ("name", "published", "source", "note")}
            mine, reason = ours(one)
            found.append(Row(table, **words, printed=tuple(one["printed"]), ours=mine, reason=reason))
    return found


# ---- ours -----------------------------------------------------------------------------------


def our_size(row: Mapping[str, Any]) -> tuple[str, str]:
    """Parameters of the preset, counted."""
    name = row["preset"]
    return f"{count(name) / 1e6:.1f}M", (
        f"{name} with 1,000 classes has {count(name):,} parameters, counted; without a head "
        f"{count(name, classes=0):,}."
    )


NOT_RUN = "not run by us: it takes pre-training on millions of pictures, or data that we have not got."
REASONS = {
    "Oxford Flowers-102": "none that can be compared: what we know are centre crops of 64 pixels, in a split "
    "of their own.",
    "TPUv3-core-days": "none: our runs were no pre-training, and on other machines.",
}
# "95.05 and 95.04 % of the 10,000 test pictures (seeds 0 and 1, ...)", as recipes write it.
MEASURED = r"(\d[\d., and]*) % of the 10,000 test pictures \((.*?)\)"


def our_result(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a recipe of ours gave on the same test pictures, by its own docstring."""
    name = row["name"]
    found = re.search(MEASURED, docstring("cifar10-small")) if name == "CIFAR-10" else None
    if found is None:
        return NONE, REASONS.get(name, NOT_RUN)
    return found[1], (
        f"the same test pictures, by the recipe cifar10-small ({found[2]}): a smaller ViT from scratch on "
        "the 50,000 training pictures alone; those published were pre-trained."
    )


def docstring(recipe: str) -> str:
    """What a recipe says of itself, in one line."""
    return " ".join((inspect.getdoc(recipes()[recipe]) or "").split())


# ---- as text --------------------------------------------------------------------------------


def cells(some: list[Row]) -> list[list[str]]:
    """A heading and a line for each row."""
    first = "test, % right" if some[0].table == "results" else "model"
    lines = [[first, *some[0].published, "ours"]]
    return lines + [[row.name, *row.published.values(), row.ours] for row in some]


def remarks(some: list[Row]) -> list[str]:
    """What stands below a table: sources, reasons with the rows that share them, and notes."""
    said = [f"Source: {source}." for source in dict.fromkeys(row.source for row in some)]
    for reason in dict.fromkeys(row.reason for row in some):
        said.append(f"Ours, {', '.join(row.name for row in some if row.reason == reason)}: {reason}")
    for row in some:
        if row.note:
            said.append(f"{row.name}, as printed in {', '.join(row.printed)}: {row.note}")
    return said


def parts(file: Path = PUBLISHED) -> list[list[Row]]:
    every = rows(file)
    return [[row for row in every if row.table == table] for table in ("results", "sizes")]


def general(file: Path = PUBLISHED) -> list[str]:
    """What holds for the whole of it."""
    return list(json.loads(file.read_text(encoding="utf-8"))["notes"])


def markdown() -> str:
    """Both tables for a page."""
    pieces = []
    for some in parts():
        heading, *lines = cells(some)
        every = [heading, ["---"] * len(heading), *lines]
        pieces.append("".join(f"| {' | '.join(line)} |\n" for line in every))
        pieces.append("".join(f"- {remark}\n" for remark in remarks(some)))
    pieces.append("".join(f"- {remark}\n" for remark in general()))
    return "\n".join(pieces)


def show() -> None:
    """Print both tables to the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for some in parts():
        heading, *lines = cells(some)
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in heading:
            table.add_column(name, overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)
        for remark in remarks(some):
            console.print(remark)
        console.print()
    for remark in general():
        console.print(remark)
