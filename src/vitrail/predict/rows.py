"""Predictions as lines: a table for eyes, CSV for spreadsheets, JSON lines for programs.

Each is text that ends with its line, so that a run that is stopped leaves whole ones.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

from vitrail.errors import InputError, printable, suggest
from vitrail.predict.prediction import Prediction

FORMATS = ("table", "csv", "jsonl")
UNSURE = "don't know"
WIDTH = 24  # letters of a label in the table
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # a spreadsheet takes a cell that begins so for a formula, or may

Line = Callable[[Prediction], str]


def lines(form: str, top: int, classes: int) -> tuple[str, Line]:
    """The heading, which may be empty, and what makes a line of a prediction.

    Args:
        top: how many classes each picture gets; 1 is the answer alone.
        classes: of the model. Without any a line is the name, and the reason where there is one.
    """
    if form not in FORMATS:
        raise InputError(f"A format is one of {', '.join(FORMATS)}.", repr(form), suggest(form, FORMATS))
    top = min(top, classes)
    if form == "jsonl":
        return "", lambda found: as_json(found, top)
    if form == "csv":
        guesses = [f"{word}_{place}" for place in range(1, top + 1) for word in ("label", "score")]
        said = [*(["label", "score"] if top else []), *(guesses if top > 1 else [])]
        return as_csv(["file", *said, "error"]), lambda found: as_csv(cells(found, top))
    heading = f"{'score':6}  {'label':{WIDTH}}  file\n" if top else ""
    return heading, lambda found: as_table(found, top)


# ---- for eyes -------------------------------------------------------------------------------


def as_table(found: Prediction, top: int) -> str:
    name = printable(found.name)
    if found.error is not None:
        return f"{'-':6}  {'no answer':{WIDTH}}  {name}: {printable(found.error, 400)}\n"
    if not top:
        return f"{name}\n"
    guesses = found.top(top)
    said = [(UNSURE, guesses[0][1])] if found.unsure else guesses[:1]
    more = guesses if found.unsure and top > 1 else guesses[1:]
    first, *others = (f"{score:6.4f}  {printable(label, WIDTH):{WIDTH}}" for label, score in (*said, *more))
    return "".join(f"{line}\n" for line in (f"{first}  {name}", *(other.rstrip() for other in others)))


# ---- for spreadsheets -----------------------------------------------------------------------


def cells(found: Prediction, top: int) -> list[str | float]:
    """Without scores where a picture could not be read; numbers with all their digits."""
    guesses = found.top(top) if top else []
    said: list[str | float] = []
    if top:
        said = ["", ""] if found.score is None else [found.label or UNSURE, found.score]
    if top > 1:
        said += [part for guess in guesses for part in guess] or [""] * (2 * top)
    return [found.name, *said, found.error or ""]


def as_csv(row: list[Any]) -> str:
    """A line of RFC 4180. Text that a spreadsheet would compute gets an apostrophe before it.

    Bytes of a name that are no UTF-8 become \\udcff and the like: the file stays readable as a whole.
    """
    safe = [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in row]
    text = io.StringIO()
    csv.writer(text).writerow(safe)
    return text.getvalue().encode("utf-8", "backslashreplace").decode()


# ---- for programs ---------------------------------------------------------------------------


def as_json(found: Prediction, top: int) -> str:
    """Names exactly as they are: all but ASCII is escaped, also bytes that are no UTF-8."""
    row: dict[str, Any] = {"file": found.name}
    if top:
        guesses = [{"label": label, "score": score} for label, score in found.top(top)]
        row |= {"label": found.label, "score": found.score, "top": guesses}
    return json.dumps({**row, "error": found.error}) + "\n"
