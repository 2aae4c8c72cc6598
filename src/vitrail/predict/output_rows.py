"""Predictions as text: a table, CSV, or JSON lines; and embeddings as rows of a .npy file.

A row of text is a complete line, so that an interrupted command leaves no half row.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.safe_files import atomic_file
from vitrail.predict.prediction import Prediction

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = ("table", "csv", "jsonl")
UNSURE = "don't know"
OOD = "out of distribution"
NO_LABEL = "none"  # a multi-label model: no class is above its threshold
WIDTH = 24  # of a label in the table
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # a spreadsheet may take such a cell for a formula

Line = Callable[[Prediction], str]


def format_rows(form: str, top: int, classes: int, ood: bool = False) -> tuple[str, Line]:
    """The header line, which may be empty, and a function from a prediction to its line.

    Args:
        top: how many classes are listed per image.
        classes: the number of classes of the model; without any, a line is the name and the error.
        ood: whether the model tells images that are out of distribution; CSV then has columns for it.
    """
    if form not in FORMATS:
        raise InputError(f"unknown format {form!r}. {suggest(form, FORMATS)}")
    top = min(top, classes)
    if form == "jsonl":
        return "", lambda prediction: as_json(prediction, top)
    if form == "csv":
        return as_csv(columns(top, ood)), lambda prediction: as_csv(cells(prediction, top, ood))
    heading = f"{'score':6}  {'label':{WIDTH}}  file\n" if top else ""
    return heading, lambda prediction: as_table(prediction, top)


# ---- table -------------------------------------------------------------------------------


def as_table(prediction: Prediction, top: int) -> str:
    name = printable(prediction.name)
    if prediction.error is not None:
        return f"{'-':6}  {'error':{WIDTH}}  {name}: {printable(prediction.error, 400)}\n"
    if not top:
        return f"{name}\n"
    guesses = prediction.top(top)
    said, more = guesses[:1], guesses[1:]
    if prediction.unsure or prediction.scale.multilabel:
        said, more = [(label_text(prediction, ", "), guesses[0][1])], guesses if top > 1 else []
    first, *others = (f"{score:6.4f}  {printable(label, WIDTH):{WIDTH}}" for label, score in (*said, *more))
    hint = f"  ({OOD})" if prediction.ood else ""
    return "".join(f"{line}\n" for line in (f"{first}  {name}{hint}", *(other.rstrip() for other in others)))


def label_text(prediction: Prediction, joint: str) -> str:
    """The predicted label, or those of a multi-label model in one text."""
    if prediction.scale.multilabel:
        return joint.join(label for label, _ in prediction.labels) or NO_LABEL
    return prediction.label or UNSURE


# ---- CSV -----------------------------------------------------------------------


def columns(top: int, ood: bool = False) -> list[str]:
    """The names of the columns."""
    guesses = [f"{word}_{place}" for place in range(1, top + 1) for word in ("label", "score")]
    said = [*(["label", "score"] if top else []), *(guesses if top > 1 else [])]
    return ["file", *said, *(["ood", "ood_score"] if ood else []), "error"]


def cells(prediction: Prediction, top: int, ood: bool = False) -> list[str | float]:
    """The cells of a row; scores with all their digits, empty where an image could not be read."""
    guesses = prediction.top(top) if top else []
    said: list[str | float] = []
    if top:
        said = ["", ""] if prediction.score is None else [label_text(prediction, "|"), prediction.score]
    if top > 1:
        said += [part for guess in guesses for part in guess] or [""] * (2 * top)
    if ood:
        unknown = prediction.ood_score is None
        said += ["", ""] if unknown else ["yes" if prediction.ood else "no", prediction.ood_score or 0.0]
    return [prediction.name, *said, prediction.error or ""]


def as_csv(row: list[Any]) -> str:
    """A line of RFC 4180. Text that a spreadsheet would compute gets an apostrophe in front.

    Bytes of a name that are not UTF-8 become \\udcff and the like, so that the file stays readable.
    """
    safe = [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in row]
    text = io.StringIO()
    csv.writer(text).writerow(safe)
    return text.getvalue().encode("utf-8", "backslashreplace").decode()


# ---- JSON lines ---------------------------------------------------------------------------


def as_json(prediction: Prediction, top: int) -> str:
    """A JSON object; everything but ASCII is escaped, also bytes that are not UTF-8."""
    row: dict[str, Any] = {"file": prediction.name}
    if top:
        row |= {"label": prediction.label, "score": prediction.score}
        for name, pairs in (("labels", prediction.labels), ("top", prediction.top(top))):
            row[name] = [{"label": label, "score": score} for label, score in pairs]
        row |= {"ood": prediction.ood, "ood_score": prediction.ood_score}
    return json.dumps({**row, "error": prediction.error}) + "\n"


# ---- embeddings ----------------------------------------------------------------------------


@contextmanager
def writing_rows(path: Path, width: int) -> Iterator[Callable[[NDArray[np.float32] | None], None]]:
    """A function that appends a row, (width,) or None, to a float32 array in a new file.

    None becomes a row of NaN, so that rows align with those of the table. After an error there is no file.
    """
    count, missing = 0, np.full(width, np.nan, np.float32)
    with atomic_file(path) as partial, partial.open("r+b") as file:
        _write_header(file, (0, width))
        start = file.tell()

        def append(row: NDArray[np.float32] | None) -> None:
            nonlocal count
            file.write((missing if row is None else row).astype("<f4").tobytes())
            count += 1

        yield append
        file.seek(0)
        _write_header(file, (count, width))  # NumPy leaves room for the first axis to grow
        if file.tell() != start:
            raise RuntimeError("the header of a .npy file has grown over its first row")


def _write_header(file: object, shape: tuple[int, int]) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
