"""docs/errata.md as text."""

from __future__ import annotations

from typing import Any

from vitrail_course.errata import (  # noqa: F401 they register their errata
    note_000,
    note_001,
    note_001_transformers,
    note_002,
    note_003,
    note_004,
)
from vitrail_course.errata.erratum import ERRATA, NOTES

_OPENING = """# Errata of the lecture notes

The claims of the five lecture notes that are wrong or imprecise, as far as code can show it. For each there
is a function in `course/src/vitrail_course/errata/` that computes the numbers under *Evidence*. The command
`python -m vitrail_course.errata` runs them all and prints this page; `python -m docs.errata_page` updates it.
*Wrong* claims contradict what they describe. *Imprecise* ones do not state a condition, use a loose term, or
follow another convention. All claims are paraphrased. Claims about trained models are tested in the labs.
"""


def format_value(value: Any) -> str:
    """A number with four digits; rounding errors are shown as 0."""
    if isinstance(value, tuple):  # a shape, most often
        return "(" + ", ".join(format_value(one).replace(",", "") for one in value) + ")"
    if isinstance(value, float):
        return "0" if abs(value) < 1e-9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _section(note: str) -> str:
    """All errata of a note."""
    lines = [f"## {note}: {NOTES[note]}"]
    for number, one in enumerate((one for one in ERRATA if one.note == note), start=1):
        numbers = "; ".join(f"{name}: **{format_value(value)}**" for name, value in one.evidence().items())
        where = one.where[0].upper() + one.where[1:]
        lines += [
            f"**{note}.{number}, {one.kind}.** {where}.",
            f"- Claim: {one.claim}\n- Correct: {one.correction}\n- Evidence (`{one.name}`): {numbers}.",
        ]
    return "\n\n".join(lines)


def page() -> str:
    """The whole page."""
    return "\n".join([_OPENING, *(_section(note) + "\n" for note in NOTES)])
