"""Write the recipes of docs/recipes.md from their docstrings: python -m docs.recipes"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrail.recipes import recipes

PAGE = Path(__file__).parent / "recipes.md"
BEGIN, END = "<!-- recipes -->", "<!-- end of recipes -->"
GROUPS = ("Measured by us", "As published, not run by us", "Without a figure yet")


def group_of(text: str) -> str:
    """By what the docstring says: a figure of ours comes with the command that gave it."""
    if "Not run by us." in " ".join(text.split()):
        return GROUPS[1]
    return GROUPS[0] if "vitrail train " in text and "%" in text else GROUPS[2]


def section(heading: str, some: dict[str, str]) -> str:
    """A table of some recipes, and what each says of itself."""
    lines = [f"## {heading}", "", "| recipe | for |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {text.splitlines()[0]} |" for name, text in some.items()]
    for name, text in some.items():
        lines += ["", f"### {name}", "", text]
    return "\n".join(lines)


def written(found: dict[str, Callable[..., Any]]) -> str:
    texts = {name: inspect.cleandoc(function.__doc__ or "") for name, function in found.items()}
    grouped = {
        group: {name: text for name, text in texts.items() if group_of(text) == group} for group in GROUPS
    }
    return "\n\n".join(section(group, some) for group, some in grouped.items() if some)


def page() -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{written(recipes())}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
