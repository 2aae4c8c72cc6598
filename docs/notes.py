"""Generate the results section of docs/notes.md from the saved results of the labs: python -m docs.notes"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail_course.labs.lab import find_lab, format_number, load_results
from vitrail_course.labs.verdict import format_verdict

PAGE = Path(__file__).parent / "notes.md"
IMAGES = Path(__file__).parent / "images" / "labs"
BEGIN, END = "<!-- labs -->", "<!-- end of labs -->"


def section(result: dict[str, Any]) -> str:
    """The claim, the measurements, the verdict and the figure of a lab."""
    name = str(result["name"])
    verdict = format_verdict(f"**{result['verdict']}**", result["condition"])
    text = " ".join([result["sentence"], *result["warnings"]])
    return (
        f"## {name}\n\nNote {result['note']}. {result['claim']}\n\n"
        f"    {result['command']}\n\n"
        f"{format_number(result)}. Verdict: {verdict}.\n\n{text}\n\n"
        f"![{name}: {find_lab(name).CLAIM}](images/labs/{name}.png)"
    )


def page() -> str:
    """The complete page: the existing introduction and the current results."""
    before, rest = PAGE.read_text().split(BEGIN)
    text = "\n\n".join(section(result) for result in load_results())
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
