"""All points as a page."""

from __future__ import annotations

from typing import Any

from vitrail.labs.errata import note_000, note_001, note_002, note_003, note_004  # noqa: F401 they enter their points
from vitrail.labs.errata.erratum import ERRATA, NOTES

OPENING = """# Errata of the notes

What the five lecture notes get wrong or leave open, as far as code can show it. Each point has a function in
`src/vitrail/labs/errata/` that computes the numbers after *Shown*; `python -m vitrail.labs.errata` runs
them all, and this page is what it prints (`python -m docs.errata_page` writes it anew). *Wrong* is what
cannot be so; *left open* is a condition not named, a loose word, or another convention. What a note says is
in our words. What the notes claim of trained models is tried in the labs, not here.
"""


def in_words(value: Any) -> str:
    """A number with as many digits as matter; what is zero but for rounding is zero."""
    if isinstance(value, tuple):  # a shape, most often
        return "(" + ", ".join(in_words(one).replace(",", "") for one in value) + ")"
    if isinstance(value, float):
        return "0" if abs(value) < 1e-9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def section(note: str) -> str:
    """All points of a note."""
    lines = [f"## {note}: {NOTES[note]}"]
    for number, one in enumerate((one for one in ERRATA if one.note == note), start=1):
        numbers = "; ".join(f"{name}: **{in_words(value)}**" for name, value in one.evidence().items())
        where = one.where[0].upper() + one.where[1:]
        lines += [
            f"**{note}.{number}, {one.kind}.** {where}.",
            f"- Says: {one.says}\n- Holds: {one.holds}\n- Shown (`{one.name}`): {numbers}.",
        ]
    return "\n\n".join(lines)


def page() -> str:
    """docs/errata.md."""
    return "\n".join([OPENING, *(section(note) + "\n" for note in NOTES)])
