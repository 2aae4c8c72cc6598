"""Write the table of docs/notes.md from the results of the labs: python -m docs.notes"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail.labs.lab import find, joined, known, number_in_words

PAGE = Path(__file__).parent / "notes.md"
IMAGES = Path(__file__).parent / "images" / "labs"
BEGIN, END = "<!-- labs -->", "<!-- end of labs -->"


def section(result: dict[str, Any]) -> str:
    """A claim, what was measured, the verdict, and the picture."""
    name = str(result["name"])
    verdict = joined(f"**{result['verdict']}**", result["condition"])
    return (
        f"## {name}\n\nNote {result['note']}. {result['claim']}\n\n"
        f"    {result['command']}\n\n"
        f"{number_in_words(result)}: {verdict}.\n\n{result['sentence']}\n\n"
        f"![{name}: {find(name).CLAIM}](images/labs/{name}.png)"
    )


def page() -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    text = "\n\n".join(section(result) for result in known())
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
