"""The errata, and docs/errata.md as text."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.experiment.trial import one_thread
from vitrail_course.errata import evidence

TEXTS = Path(__file__).with_name("errata.toml")
NOTES = {
    "000": "slides with the four equations (DKRZ)",
    "001": "an article on the code of ViT, step by step",
    "002": "lecture slides with a practice on MNIST",
    "003": 'slides "Visual Transformers", from text to images',
    "004": "lecture slides of CMU 10-417",
}
_OPENING = """# Errata of the lecture notes

The claims of the five lecture notes that are wrong, imprecise or outdated. *Wrong* claims contradict what
they describe. *Imprecise* ones do not state a condition, use a loose term, or follow another convention.
Claims are paraphrased. Numbers in bold are computed by the function before them, in
`course/src/vitrail_course/errata/evidence.py`: `python -m vitrail_course.errata` computes them again and
prints this page, `python -m docs.errata_page` updates it. Claims about trained models are tested in the labs.
"""


@dataclass(frozen=True)
class Erratum:
    """A wrong or imprecise claim of a note."""

    note: str
    where: str
    kind: Literal["wrong", "imprecise", "outdated"]
    claim: str
    """What the note says, paraphrased."""
    correct: str
    evidence: str = ""
    """The function of evidence.py with numbers; empty if the erratum can be checked by reading."""

    def numbers(self) -> Mapping[str, Any]:
        """The evidence, the same in every run; the global random state is unchanged."""
        with one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return getattr(evidence, self.evidence)() if self.evidence else {}


@cache
def load_errata() -> list[Erratum]:
    return [Erratum(**fields) for fields in tomllib.loads(TEXTS.read_text(encoding="utf-8"))["erratum"]]


def format_value(value: Any) -> str:
    """A number with four digits; rounding errors are shown as 0."""
    if isinstance(value, tuple):  # a shape, most often
        return "(" + ", ".join(format_value(one).replace(",", "") for one in value) + ")"
    if isinstance(value, float):
        return "0" if abs(value) < 1e-9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _paragraph(number: int, one: Erratum) -> str:
    numbers = "; ".join(f"{name} **{format_value(value)}**" for name, value in one.numbers().items())
    measured = f" `{one.evidence}`: {numbers}." if numbers else ""
    return (
        f"**{one.note}.{number}, {one.kind}.** *{one.where}:* {one.claim}\n\n"
        f"- Correct: {one.correct}{measured}"
    )


def page() -> str:
    """The whole page."""
    parts = [_OPENING]
    for note, title in NOTES.items():
        errata = [one for one in load_errata() if one.note == note]
        paragraphs = [_paragraph(number, one) for number, one in enumerate(errata, start=1)]
        parts.append("\n\n".join([f"## {note}: {title}", *paragraphs]) + "\n")
    return "\n".join(parts)
