"""`vitrail notes --table`: the published results and model sizes in the lecture notes, compared with ours.

published.json holds the published numbers as the lecture notes print them, each row with its source. Our
numbers are counted or read from their origin: parameters from models on the meta device, accuracy from the
docstring of the recipe. Rows without a comparable number have a dash, and a footnote with the reason.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.training.recipes import recipes
from vitrail_course.errata.evidence import count_parameters

PUBLISHED = Path(__file__).with_name("published.json")
NOT_RUN = "not run by us: it needs pre-training on millions of images, or data that we do not have."
_REASONS = {
    "Oxford Flowers-102": "not comparable: we have only center crops of 64 pixels, with another split.",
    "TPUv3-core-days": "not comparable: our runs are not pre-training, and on other hardware.",
}
# As in a recipe's docstring: "95.05 and 95.04 % of the 10,000 test images (seeds 0 and 1, ...)".
_ACCURACY_PATTERN = r"(\d[\d., and]*) % of the 10,000 test images \((.*?)\)"


def load_published_rows(table: str) -> list[dict[str, Any]]:
    """The rows of "results" or "sizes", each with our number as "ours" and what that is as "reason".

    The others are "name", "published" by column, "source", the slides that have it "printed", and a "note" on
    how the printed numbers differ from the source.
    """
    compare = find_our_accuracy if table == "results" else _count_parameters
    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))[table]
    return [row | dict(zip(("ours", "reason"), compare(row), strict=True)) for row in rows]


def _count_parameters(row: Mapping[str, Any]) -> tuple[str, str]:
    """The number of parameters of a preset."""
    name = row["preset"]
    return f"{count_parameters(name) / 1e6:.1f}M", (
        f"{name} with 1,000 classes has {count_parameters(name):,} parameters; without a head "
        f"{count_parameters(name, classes=0):,}."
    )


def find_our_accuracy(row: Mapping[str, Any]) -> tuple[str, str]:
    """The accuracy of our recipe on the same test images, from its docstring."""
    name = row["name"]
    match = re.search(_ACCURACY_PATTERN, recipe_docstring("cifar10-small")) if name == "CIFAR-10" else None
    if match is None:
        return "-", _REASONS.get(name, NOT_RUN)
    return match[1], (
        f"the same test images with the recipe cifar10-small ({match[2]}): a smaller ViT trained from "
        "scratch on the 50,000 training images; the published models were pre-trained."
    )


def recipe_docstring(recipe: str) -> str:
    """The docstring of a recipe on one line."""
    return " ".join((inspect.getdoc(recipes()[recipe]) or "").split())


def _footnotes(rows: list[dict[str, Any]]) -> list[str]:
    """The text below a table: sources, reasons with their rows, and notes."""
    notes = [f"Source: {source}." for source in dict.fromkeys(row["source"] for row in rows)]
    for reason in dict.fromkeys(row["reason"] for row in rows):
        notes.append(f"Ours, {', '.join(row['name'] for row in rows if row['reason'] == reason)}: {reason}")
    for row in rows:
        if row["note"]:
            notes.append(f"{row['name']}, as printed in {', '.join(row['printed'])}: {row['note']}")
    return notes


_SHORT_NAMES = {  # so that a table of six columns fits a terminal of 80
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
    for name, heading in (("results", "test\naccuracy, %"), ("sizes", "model")):
        rows = load_published_rows(name)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column in (heading, *rows[0]["published"], "ours"):
            table.add_column(_SHORT_NAMES.get(column, column))
        for row in rows:
            table.add_row(*map(_narrow, (row["name"], *row["published"].values(), row["ours"])))
        console.print(table)
        for remark in _footnotes(rows):
            console.print(remark)
        console.print()
    for remark in json.loads(PUBLISHED.read_text(encoding="utf-8"))["notes"]:
        console.print(remark)
