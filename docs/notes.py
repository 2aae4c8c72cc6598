"""Generate the results in docs/notes.md from those that are saved: python -m docs.notes"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail_course.labs.lab import format_number, load_results, result_verdict

PAGE = Path(__file__).parent / "notes.md"
IMAGES = Path(__file__).parent / "images" / "labs"
BEGIN, END = "<!-- labs -->", "<!-- end of labs -->"
_HEADING = ("sentence of the note", "statement", "kind", "finding", "threshold and its source")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each statement of a lab; the first one quotes the note."""
    name = result["name"]
    quote = f"[{name}](#{name}): {result['claim']}"
    statements = result_verdict(result).statements
    return [
        (
            "" if number else quote,
            statement.text,
            statement.kind.removesuffix(" experiment"),
            f"**{statement.answer}**: {statement.evidence}",
            f"{statement.threshold} ({statement.source})",
        )
        for number, statement in enumerate(statements)
    ]


def table(results: list[dict[str, Any]]) -> str:
    """All statements of all claims."""
    lines = [_HEADING, ("---",) * len(_HEADING), *(row for result in results for row in rows(result))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def section(result: dict[str, Any]) -> str:
    """The setting, the main measurement and the figure of a lab."""
    name = str(result["name"])
    text = " ".join([result["setting"], f"{format_number(result)}.", *result["warnings"]])
    return (
        f"## {name}\n\nNote {result['note']}. {text}\n\n    {result['command']}\n\n"
        f"![{name}](images/labs/{name}.png)"
    )


def page() -> str:
    """The complete page: the text around the labs, and their current results."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    results = load_results()
    labs = "\n\n".join([table(results), *map(section, results)])
    return f"{before}{BEGIN}\n{labs}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
