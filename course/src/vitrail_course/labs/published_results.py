"""`vitrail notes --table`: the published results and model sizes in the lecture notes, compared with ours.

published.json holds the published numbers as the lecture notes print them, each row with its source. Our
numbers are counted or read from their origin: parameters from models on the meta device, accuracy from the
docstring of the recipe. Rows without a comparable number have a dash, and a footnote with the reason.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.training.recipes import recipes
from vitrail_course.errata.evidence import count_parameters

PUBLISHED = Path(__file__).with_name("published.json")
_DASH = "-"


@dataclass(frozen=True)
class PublishedRow:
    """A row of published numbers, and our number."""

    table: Literal["results", "sizes"]
    name: str
    published: Mapping[str, str]
    """By column, as printed in the lecture notes."""
    source: str
    printed: tuple[str, ...]
    """The notes and slides that print it."""
    note: str
    """How the printed numbers differ from the source or are wrong."""
    ours: str
    """A dash if there is no comparable number."""
    reason: str
    """What our number is, or why there is none."""


def load_published_rows(file: Path = PUBLISHED) -> list[PublishedRow]:
    """All rows, results first."""
    tables_json = json.loads(file.read_text(encoding="utf-8"))
    our_columns: dict[Literal["results", "sizes"], Callable[[Mapping[str, Any]], tuple[str, str]]] = {
        "results": find_our_accuracy,
        "sizes": _count_parameters,
    }
    result = []
    for table, compare in our_columns.items():
        for entry in tables_json[table]:
            fields = {name: entry[name] for name in ("name", "published", "source", "note")}
            ours, reason = compare(entry)
            printed = tuple(entry["printed"])
            result.append(PublishedRow(table, **fields, printed=printed, ours=ours, reason=reason))
    return result


# ---- our numbers ----------------------------------------------------------------------------


def _count_parameters(row: Mapping[str, Any]) -> tuple[str, str]:
    """The number of parameters of a preset."""
    name = row["preset"]
    return f"{count_parameters(name) / 1e6:.1f}M", (
        f"{name} with 1,000 classes has {count_parameters(name):,} parameters; without a head "
        f"{count_parameters(name, classes=0):,}."
    )


NOT_RUN = "not run by us: it needs pre-training on millions of images, or data that we do not have."
_REASONS = {
    "Oxford Flowers-102": "not comparable: we have only center crops of 64 pixels, with another split.",
    "TPUv3-core-days": "not comparable: our runs are not pre-training, and on other hardware.",
}
# As in a recipe's docstring: "95.05 and 95.04 % of the 10,000 test images (seeds 0 and 1, ...)".
_ACCURACY_PATTERN = r"(\d[\d., and]*) % of the 10,000 test images \((.*?)\)"


def find_our_accuracy(row: Mapping[str, Any]) -> tuple[str, str]:
    """The accuracy of our recipe on the same test images, from its docstring."""
    name = row["name"]
    match = re.search(_ACCURACY_PATTERN, recipe_docstring("cifar10-small")) if name == "CIFAR-10" else None
    if match is None:
        return _DASH, _REASONS.get(name, NOT_RUN)
    return match[1], (
        f"the same test images with the recipe cifar10-small ({match[2]}): a smaller ViT trained from "
        "scratch on the 50,000 training images; the published models were pre-trained."
    )


def recipe_docstring(recipe: str) -> str:
    """The docstring of a recipe on one line."""
    return " ".join((inspect.getdoc(recipes()[recipe]) or "").split())


# ---- as text --------------------------------------------------------------------------------


def _table_cells(table_rows: list[PublishedRow]) -> list[list[str]]:
    """The heading and the cells of each row."""
    heading = "test accuracy, %" if table_rows[0].table == "results" else "model"
    lines = [[heading, *table_rows[0].published, "ours"]]
    return lines + [[row.name, *row.published.values(), row.ours] for row in table_rows]


def _footnotes(table_rows: list[PublishedRow]) -> list[str]:
    """The text below a table: sources, reasons with their rows, and notes."""
    notes = [f"Source: {source}." for source in dict.fromkeys(row.source for row in table_rows)]
    for reason in dict.fromkeys(row.reason for row in table_rows):
        notes.append(f"Ours, {', '.join(row.name for row in table_rows if row.reason == reason)}: {reason}")
    for row in table_rows:
        if row.note:
            notes.append(f"{row.name}, as printed in {', '.join(row.printed)}: {row.note}")
    return notes


def _rows_by_table(file: Path = PUBLISHED) -> list[list[PublishedRow]]:
    all_rows = load_published_rows(file)
    return [[row for row in all_rows if row.table == table] for table in ("results", "sizes")]


def general_notes(file: Path = PUBLISHED) -> list[str]:
    """Notes on all rows."""
    return list(json.loads(file.read_text(encoding="utf-8"))["notes"])


def published_markdown() -> str:
    """Both tables in Markdown."""
    parts = []
    for table_rows in _rows_by_table():
        heading, *lines = _table_cells(table_rows)
        lines = [heading, ["---"] * len(heading), *lines]
        parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
        parts.append("".join(f"- {remark}\n" for remark in _footnotes(table_rows)))
    parts.append("".join(f"- {remark}\n" for remark in general_notes()))
    return "\n".join(parts)


_SHORT_NAMES = {  # so that a table of six columns fits a terminal of 80
    "test accuracy, %": "test\naccuracy, %",
    "H/14, JFT": "H/14\nJFT",
    "L/16, JFT": "L/16\nJFT",
    "L/16, ImageNet-21k": "L/16\nIN-21k",
    "BiT-L, ResNet152x4": "BiT-L\nR152x4",
    "Noisy Student, EfficientNet-L2": "Noisy St.\nEffNet-L2",
}


def _narrow(cell: str) -> str:
    """A cell without the spaces around ±, and several numbers of ours below each other."""
    return cell.replace(" ± 0", "±").replace(" ± ", "±").replace(" and ", "\n").replace(", ", "\n")


def print_published() -> None:
    """Print both tables to the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for table_rows in _rows_by_table():
        heading, *lines = _table_cells(table_rows)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for name in heading:
            table.add_column(_SHORT_NAMES.get(name, name))
        for line in lines:
            table.add_row(*(_narrow(cell) for cell in line))
        console.print(table)
        for remark in _footnotes(table_rows):
            console.print(remark)
        console.print()
    for remark in general_notes():
        console.print(remark)
