"""Write the recipes of docs/recipes.md from their docstrings, and the tables of bench/results/recipes.json
and transfer.jsonl:

python -m docs.recipes
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import transfer
from bench.recipes import RESULTS, table
from vitrail.training.recipes import recipes

PAGE = Path(__file__).parent / "recipes.md"
BEGIN, END = "<!-- recipes -->", "<!-- end of recipes -->"
TABLE, TABLE_END = "<!-- results -->", "<!-- end of results -->"
TRANSFER, TRANSFER_END = "<!-- transfer -->", "<!-- end of transfer -->"
RATES, RATES_END = "<!-- rates -->", "<!-- end of rates -->"
GROUPS = ("Measured by us", "As published, not run by us", "Not measured yet")


def group_of(text: str) -> str:
    """The group of a recipe: an accuracy of ours comes with its command in the docstring."""
    if "Not run by us." in " ".join(text.split()):
        return GROUPS[1]
    return GROUPS[0] if "vitrail train " in text and "%" in text else GROUPS[2]


def section(heading: str, texts: dict[str, str]) -> str:
    """A table of the recipes of a group, and their docstrings."""
    lines = [f"## {heading}", "", "| recipe | for |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {text.splitlines()[0]} |" for name, text in texts.items()]
    for name, text in texts.items():
        lines += ["", f"### {name}", "", text]
    return "\n".join(lines)


def written(functions: dict[str, Callable[..., Any]]) -> str:
    """All sections, as Markdown."""
    texts = {name: inspect.cleandoc(function.__doc__ or "") for name, function in functions.items()}
    grouped = {
        group: {name: text for name, text in texts.items() if group_of(text) == group} for group in GROUPS
    }
    return "\n\n".join(section(group, some) for group, some in grouped.items() if some)


def page() -> str:
    """The page with its recipes and its tables updated."""
    rows = json.loads(RESULTS.read_text())["rows"]
    text = _between(PAGE.read_text(), BEGIN, END, written(recipes()))
    text = _between(text, TABLE, TABLE_END, table(rows))
    tuned = transfer.read_rows(transfer.RESULTS)
    text = _between(text, TRANSFER, TRANSFER_END, transfer.table(tuned))
    return _between(text, RATES, RATES_END, transfer.table_of_rates(tuned))


def _between(text: str, begin: str, end: str, new: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
