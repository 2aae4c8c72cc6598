"""Verdicts on claims: one rule for all labs, and three kinds of statements.

- identity: computed, and exact up to rounding
- replication: the setting of the source, and the number that it states
- toy experiment: a small setting of our own; its verdict is about that setting alone

A claim consists of statements, each with a kind and a threshold whose source is named. A measured statement
is true, or not true, only if its whole 95 % confidence interval lies on one side of the threshold; otherwise
it is not clear. A small run, with `--small`, gives no verdict.

Where a sweep on the held-out images chose the learning rates of the arms with the first seed, statements
leave out that seed (`confirming`, `compare_arms`): its scores are the best of several, and so too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitrail.experiment.interval import confidence_interval, fraction_interval
from vitrail.experiment.study import Difference

Kind = Literal["identity", "replication", "toy experiment"]
Interval = tuple[float, float]

IDENTITY: Kind = "identity"
REPLICATION: Kind = "replication"
TOY: Kind = "toy experiment"
# If all statements of a kind are true without a condition, if some are, and if none is and one is not true.
WORDS: dict[Kind, tuple[str, str, str]] = {
    "identity": ("holds", "partly holds", "does not hold"),
    "replication": ("replicated", "partly", "not replicated"),
    "toy experiment": ("seen", "partly seen", "not seen"),
}
NOT_CLEAR = "not clear"
TOO_SMALL = "too small to judge: run the lab without --small"

NO_DIFFERENCE = "no difference"
ROUNDING = "rounding of float64"
EXACT = "exact"
OURS = "our choice"


@dataclass(frozen=True)
class Statement:
    """A statement of a claim, and whether the measurements show it to be true."""

    text: str
    kind: Kind
    true: bool | None
    """None if it is not clear."""
    evidence: str
    """The measurement with its interval."""
    threshold: str
    source: str
    """Where the threshold comes from."""
    condition: str = ""
    """What the claim does not say and must hold for the statement to be true."""

    @property
    def answer(self) -> str:
        """The finding, in the words of its kind."""
        if self.true is None:
            return NOT_CLEAR
        yes, _, no = WORDS[self.kind]
        return (f"{yes}, if {self.condition}" if self.condition else yes) if self.true else no

    def __str__(self) -> str:
        return f"{self.text}: {self.answer} ({self.evidence}; threshold {self.threshold}, {self.source})"


@dataclass(frozen=True)
class Verdict:
    """What a lab says about a claim."""

    statements: Sequence[Statement]

    @property
    def words(self) -> dict[Kind, str]:
        """The verdict of each kind of statement that there is."""
        by_kind = {
            kind: [statement for statement in self.statements if statement.kind == kind] for kind in WORDS
        }
        return {kind: _decide(kind, some) for kind, some in by_kind.items() if some}

    def __str__(self) -> str:
        return "; ".join(f"{kind}: {word}" for kind, word in self.words.items())


def _decide(kind: Kind, statements: Sequence[Statement]) -> str:
    """One clearly untrue statement refutes a claim of which none is true; an unclear one does not."""
    yes, partly, no = WORDS[kind]
    if not any(statement.true for statement in statements):
        return no if any(statement.true is False for statement in statements) else NOT_CLEAR
    return yes if all(statement.true and not statement.condition for statement in statements) else partly


# ---- scores of arms -------------------------------------------------------------------------


def confirming(scores: Sequence[float]) -> list[float]:
    """The scores of an arm, one per seed, without the first, with which a sweep chose its learning rate."""
    return list(scores[1:])


def compare_arms(first: Sequence[float], second: Sequence[float], images: int) -> Difference:
    """First minus second, paired by seed, without the seed with which sweeps chose their learning rates."""
    return Difference.of(confirming(first), confirming(second), images)


def percent_interval(difference: Difference) -> Interval | None:
    """The interval of a difference of accuracies, in percentage points."""
    return difference.interval and (100 * difference.interval[0], 100 * difference.interval[1])


# ---- statements -----------------------------------------------------------------------------


def identity(
    text: str, true: bool, evidence: str, threshold: str, source: str = ROUNDING, condition: str = ""
) -> Statement:
    """A statement that is computed and not estimated, so that it has no interval."""
    return Statement(text, IDENTITY, true, evidence, threshold, source, condition)


def gain(text: str, difference: Difference, *, kind: Kind = TOY, condition: str = "") -> Statement:
    """The statement that a difference of accuracies is above 0."""
    evidence = f"{format_points(difference)}, n = {difference.n}"
    return Statement(text, kind, is_above(difference.interval, 0), evidence, "0", NO_DIFFERENCE, condition)


def equal_within(
    text: str, difference: Difference, margin: float, source: str, *, expected: float = 0, kind: Kind = TOY
) -> Statement:
    """The statement that a difference of accuracies is as expected, to within a margin, as fractions.

    True if the whole interval is within the margin, and not true if it is outside.
    """
    low, high, true = expected - margin, expected + margin, None
    if difference.interval is not None and low < difference.interval[0] and difference.interval[1] < high:
        true = True
    elif difference.interval is not None and (difference.interval[0] > high or difference.interval[1] < low):
        true = False
    evidence = f"{format_points(difference)}, n = {difference.n}"
    return Statement(text, kind, true, evidence, f"{100 * low:g} to {100 * high:g} points", source)


def reaches(
    text: str, scores: Sequence[float], items: int, threshold: float, source: str, *, kind: Kind = TOY
) -> Statement:
    """The statement that the mean of fractions of so many items is above a threshold."""
    interval, mean = fraction_interval(scores, items), math.fsum(scores) / len(scores)
    evidence = f"{format_fraction(mean, interval)}, n = {len(scores)}"
    return Statement(text, kind, is_above(interval, threshold), evidence, f"{100 * threshold:g} %", source)


def exceeds(
    text: str,
    values: Sequence[float],
    threshold: float,
    source: str,
    *,
    form: str = ".2g",
    unit: str = "",
    below: bool = False,
    kind: Kind = TOY,
) -> Statement:
    """The statement that the mean of values, one per seed, is above a threshold, or below it."""
    interval = confidence_interval(values)
    above = is_above(interval, threshold)
    evidence = f"{format_interval(math.fsum(values) / len(values), interval, form)}{unit}, n = {len(values)}"
    true = None if above is None else above != below
    return Statement(text, kind, true, evidence, f"{threshold:g}", source)


def is_above(interval: Interval | None, threshold: float) -> bool | None:
    """Whether a measurement is above a threshold; None if its interval contains it, or it has none."""
    if interval is None or interval[0] <= threshold <= interval[1]:
        return None
    return interval[0] > threshold


# ---- as text ------------------------------------------------------------------------------------


def format_points(difference: Difference) -> str:
    """A difference of accuracies in percentage points: "+20.0 [+13.1, +26.9] points".

    It has a second decimal if one would hide that a bound is not 0.
    """
    bounds = [100 * bound for bound in difference.interval or ()]
    form = "+.2f" if any(0 < abs(bound) < 0.05 for bound in bounds) else "+.1f"
    text = f"{100 * difference.mean:{form}}"
    if bounds:
        text += f" [{bounds[0]:{form}}, {bounds[1]:{form}}]"
    return f"{text} points"


def format_fraction(mean: float, interval: Interval | None) -> str:
    """A fraction in percent: "89.7 [83.0, 93.9] %", with more decimals if a bound rounds to the mean."""
    bounds = interval and (100 * interval[0], 100 * interval[1])
    form = distinct_form(100 * mean, bounds, (".1f", ".2f", ".3f"))
    return f"{format_interval(100 * mean, bounds, form)} %"


def distinct_form(mean: float, interval: Interval | None, forms: Sequence[str]) -> str:
    """The first format by which no bound looks like the mean, unless it equals it; the last if none does."""

    def is_hidden(bound: float, form: str) -> bool:
        return f"{bound:{form}}" == f"{mean:{form}}" and not math.isclose(bound, mean, rel_tol=1e-9)

    suitable = (form for form in forms if not any(is_hidden(bound, form) for bound in interval or ()))
    return next(suitable, forms[-1])


def format_interval(mean: float, interval: Interval | None, form: str = ".2g") -> str:
    """Any measurement with its interval."""
    if interval is None:
        return f"{mean:{form}}"
    return f"{mean:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"
