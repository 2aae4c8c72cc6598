"""How good answers are: functions of logits and labels alone.

Everything is computed in float64 over all pictures at once, so that the numbers do not depend on how
the pictures were cut into batches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import FileError, InputError
from vitrail.evaluation.calibration import below_largest, ece, reliability, surest
from vitrail.weights.folder import read_json_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_CONFUSED = 200  # classes; a larger confusion matrix is left out
WORST = 20
VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")  # the number of a picture of ImageNet's val


@dataclass(frozen=True)
class PerClass:
    """How one class fared."""

    name: str
    count: int
    """Pictures that show it."""
    precision: float | None
    """Of the pictures said to show it, the share that does; None where none was."""
    recall: float | None
    """Of the pictures that show it, the share that was said to; None where none does."""
    ap: float | None = None
    """Average precision, where a picture can show several classes."""


@dataclass(frozen=True)
class Mistake:
    """A wrong answer, and how sure the model was."""

    name: str
    said: str
    was: str
    score: float


@dataclass(frozen=True)
class Scores:
    """How good a model's answers are. Shares lie between 0 and 1."""

    count: int
    """Pictures that were judged."""
    loss: float
    per_class: list[PerClass]
    mistakes: list[Mistake]
    """The surest wrong answers, worst first."""
    top1: float | None = None
    top5: float | None = None
    """None with five classes or fewer, where it would say nothing."""
    ece: float | None = None
    confusion: list[list[int]] | None = None
    """A row for each class that was shown, a column for each that was said."""
    mean_ap: float | None = None
    """Where a picture can show several classes: the mean of their average precisions."""
    exact: float | None = None
    """And the share of pictures with every class right."""


def score(
    logits: NDArray[Any],
    labels: NDArray[np.int64],
    classes: Sequence[str],
    kept: NDArray[Any] | None = None,
    names: Sequence[str] | None = None,
    worst: int = WORST,
) -> Scores:
    """Judge logits (N, K) by labels (N,), or (N, K) of 0 and 1 where a picture can show several.

    Args:
        kept: (N,) 0 for pictures that count for nothing.
        names: of the pictures; their numbers when not given.
    """
    check(logits, labels, classes)
    rows = np.arange(len(logits)) if kept is None else np.flatnonzero(kept)
    if not len(rows):
        raise InputError("There must be pictures to judge by.", "none that could be read", "Check the data.")
    logits, labels = logits[rows], labels[rows]
    bad = int((~np.isfinite(logits)).any(axis=1).sum())
    if bad:
        raise InputError(
            "A model's logits must be finite.",
            f"NaN or infinity for {bad:,} of {len(logits):,} pictures",
            "Look at the weights with `vitrail info MODEL --check`.",
        )
    called = [str(row) if names is None else names[row] for row in rows.tolist()]
    judge = several if labels.ndim == 2 else single
    return judge(logits, labels, classes, called, worst)


def check(logits: NDArray[Any], labels: NDArray[Any], classes: Sequence[str]) -> None:
    shape = (len(logits), len(classes))
    if logits.shape != shape or labels.shape not in (shape, shape[:1]):
        raise InputError(
            "Logits must be (N, K) and labels (N,) or (N, K), for K classes.",
            f"logits {logits.shape}, labels {labels.shape} and {len(classes)} classes",
            "Compare the model with the data.",
        )
    most = len(classes) - 1 if labels.ndim == 1 else 1
    if labels.size and not 0 <= labels.min() <= labels.max() <= most:
        got = f"{labels.min()} to {labels.max()}"
        raise InputError(f"Labels must be numbers from 0 to {most}.", got, "Check the data.")


def single(
    logits: NDArray[Any], labels: NDArray[np.int64], classes: Sequence[str], names: list[str], worst: int
) -> Scores:
    """One class for each picture."""
    K = len(classes)
    said, sure = surest(logits)
    right = said == labels
    confusion = np.bincount(labels * K + said, minlength=K * K).reshape(K, K) if K <= MOST_CONFUSED else None
    shown, claimed = np.bincount(labels, minlength=K), np.bincount(said, minlength=K)
    hits = np.bincount(labels[right], minlength=K)
    wrong = np.flatnonzero(~right)
    order = wrong[np.argsort(-sure[wrong], kind="stable")][:worst]
    return Scores(
        count=len(labels),
        loss=cross_entropy(logits, labels),
        per_class=[
            PerClass(name, int(shown[k]), share(hits[k], claimed[k]), share(hits[k], shown[k]))
            for k, name in enumerate(classes)
        ],
        mistakes=[Mistake(names[i], classes[said[i]], classes[labels[i]], float(sure[i])) for i in order],
        top1=float(right.mean()),
        top5=float((places(logits, labels) < 5).mean()) if K > 5 else None,
        ece=ece(reliability(sure, right)),
        confusion=None if confusion is None else confusion.tolist(),
    )


def several(
    logits: NDArray[Any], labels: NDArray[np.int64], classes: Sequence[str], names: list[str], worst: int
) -> Scores:
    """Any number of classes for each picture; a logit above 0 says that it shows the class."""
    z = logits.astype(np.float64)
    shows, says = labels > 0, z > 0
    aps = [average_precision(z[:, k], shows[:, k]) for k in range(len(classes))]
    known = [ap for ap in aps if ap is not None]
    top = z.argmax(axis=1)
    sure = 1 / (1 + np.exp(-np.clip(z.max(axis=1), -700, 700)))
    wrong = np.flatnonzero(~shows[np.arange(len(top)), top] & (sure > 0.5))
    order = wrong[np.argsort(-sure[wrong], kind="stable")][:worst]
    hits, shown, claimed = (shows & says).sum(axis=0), shows.sum(axis=0), says.sum(axis=0)
    return Scores(
        count=len(labels),
        loss=float((np.maximum(z, 0) - z * shows + np.log1p(np.exp(-np.abs(z)))).mean()),
        per_class=[
            PerClass(name, int(shown[k]), share(hits[k], claimed[k]), share(hits[k], shown[k]), aps[k])
            for k, name in enumerate(classes)
        ],
        mistakes=[
            Mistake(names[i], classes[top[i]], listed(classes, shows[i]), float(sure[i])) for i in order
        ],
        mean_ap=float(np.mean(known)) if known else None,
        exact=float((shows == says).all(axis=1).mean()),
    )


def real_accuracy(
    logits: NDArray[Any], real: Sequence[Sequence[int]], kept: NDArray[Any] | None = None
) -> tuple[float, int]:
    """The share of answers that are among a picture's labels, and of how many pictures it is.

    ImageNet-ReaL (Beyer et al. 2020, "Are we done with ImageNet?") lists for each picture all classes
    that people saw; pictures where they saw none are left out.
    """
    if len(real) != len(logits):
        got = f"{len(real):,} for {len(logits):,} pictures"
        raise InputError("There must be a row of ReaL labels for each picture.", got, "Use all of val.")
    said = logits.argmax(axis=1)
    counted = [row for row in range(len(real)) if len(real[row]) and (kept is None or kept[row])]
    if not counted:
        raise InputError("ReaL labels must name a class of some picture.", "none that does", "Check them.")
    return sum(int(said[row]) in real[row] for row in counted) / len(counted), len(counted)


def real_labels(
    real: str | Path | Sequence[Sequence[int]], names: Sequence[str], classes: int, notes: list[str]
) -> list[list[int]]:
    """The ReaL labels of each picture: by the number in its file's name, else in their order."""
    rows: Any = real
    if isinstance(real, (str, Path)):
        try:
            rows = read_json_value(Path(real))
        except FileError as error:
            raise FileError("ReaL labels must be JSON.", error.args[1], "Use its real.json.") from error
    if not isinstance(rows, Sequence) or not all(are_classes(row, classes) for row in rows):
        must = f"ReaL labels must be a list of class numbers below {classes:,} for each picture."
        raise InputError(must, "something else", "Use its real.json, with a model of ImageNet's classes.")
    found = [VAL_NAME.search(name) for name in names]
    places = [int(match[1]) - 1 for match in found if match]
    if len(places) == len(names) and 0 <= min(places) <= max(places) < len(rows):
        return [list(rows[place]) for place in places]
    if len(rows) != len(names):
        got = f"{len(rows):,} rows for {len(names):,} pictures without ImageNet's file names"
        raise InputError("ReaL labels must belong to the pictures.", got, "Use ImageNet's val.")
    notes.append("The ReaL labels are taken in the order of the pictures.")
    return [list(row) for row in rows]


def are_classes(row: Any, classes: int) -> bool:
    return isinstance(row, Sequence) and all(type(label) is int and 0 <= label < classes for label in row)


# ---- parts ----------------------------------------------------------------------------------


def share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def listed(classes: Sequence[str], shows: NDArray[np.bool_]) -> str:
    return ", ".join(classes[k] for k in np.flatnonzero(shows).tolist()) or "none"


def cross_entropy(logits: NDArray[Any], labels: NDArray[np.int64]) -> float:
    total, start = 0.0, 0
    for z in below_largest(logits):
        y = labels[start : start + len(z)]
        start += len(z)
        total += float((np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), y]).sum())
    return total / start


def places(logits: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many classes stand before the right one, (N,).

    Among equals the first class stands first, as for argmax: a model that says the same of every class
    is not right five times in five.
    """
    own = logits[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    return ((logits > own) | ((logits == own) & earlier)).sum(axis=1)


def average_precision(scores: NDArray[np.float64], shows: NDArray[np.bool_]) -> float | None:
    """The area below precision over recall, in steps; equal scores are one step. None without pictures."""
    if not shows.any():
        return None
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    found = np.cumsum(shows[order])[ends]
    gained = np.diff(found, prepend=0) / found[-1]
    return float((gained * found / (ends + 1)).sum())
