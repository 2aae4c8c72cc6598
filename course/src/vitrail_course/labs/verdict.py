"""Verdicts on claims: one rule for all labs.

A claim consists of statements. A measured statement is true, or not true, only if its whole 95 % confidence
interval lies on one side of the threshold; if the interval contains the threshold, it is not clear here. Each
verdict prints measurement, interval and threshold; without one, the threshold is 0. A small run, with
`--small`, gives no verdict: nothing is learned in a few steps, and that says nothing about a claim.

Where a sweep on the held-out images chose the learning rates of the arms with the first seed, statements
leave out that seed (`confirming`, `compare_arms`): its scores are the best of several, and so too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitrail.experiment.interval import fraction_interval
from vitrail.experiment.study import Difference

VerdictWord = Literal["holds", "partly", "does not hold", "not clear here", "too small to judge"]
Interval = tuple[float, float]


def format_verdict(word: str, condition: str) -> str:
    """A verdict as text."""
    return f"{word}: {condition}" if condition else word


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and why."""

    word: VerdictWord
    condition: str = ""
    """The statements of the claim with their measurements, and the conditions under which they hold."""

    def __str__(self) -> str:
        return format_verdict(self.word, self.condition)


TOO_SMALL = Verdict("too small to judge", "run the lab without --small")


@dataclass(frozen=True)
class Statement:
    """A statement of a claim, and whether the measurements show it to be true."""

    text: str
    true: bool | None
    """None if it is not clear here."""
    evidence: str
    """The measurement, with its interval and threshold."""
    condition: str = ""
    """What the claim does not say and must hold for the statement to be true."""

    def __str__(self) -> str:
        condition = f", if {self.condition}" if self.condition and self.true else ""
        return f"{self.text}{condition} ({self.evidence})"


def decide(statements: Sequence[Statement]) -> Verdict:
    """The verdict on a claim that makes these statements.

    It holds if all are true without a condition, and partly if some are true, or only under a condition. If
    none is true, one that is clearly not true refutes the claim as it is stated: it does not hold, and those
    that are not clear are named after it. If all are not clear, neither is the claim.
    """
    groups = {
        "true": [str(statement) for statement in statements if statement.true],
        "not true": [str(statement) for statement in statements if statement.true is False],
        "not clear": [str(statement) for statement in statements if statement.true is None],
    }
    word: VerdictWord = "partly"
    if not groups["true"]:
        word = "does not hold" if groups["not true"] else "not clear here"
    elif len(groups["true"]) == len(statements) and not any(each.condition for each in statements):
        word = "holds"
    texts = [(name, "; ".join(group)) for name, group in groups.items() if group]
    if len(texts) == 1:
        return Verdict(word, texts[0][1])
    return Verdict(word, ". ".join(f"{name.capitalize()}: {text}" for name, text in texts))


# ---- scores of arms -------------------------------------------------------------------------


def confirming(scores: Sequence[float]) -> list[float]:
    """The scores of an arm, one per seed, without the first, with which a sweep chose its learning rate."""
    return list(scores[1:])


def compare_arms(first: Sequence[float], second: Sequence[float], images: int) -> Difference:
    """First minus second, paired by seed, without the seed with which sweeps chose their learning rates."""
    return Difference.of(confirming(first), confirming(second), images)


def arm_reaches(text: str, scores: Sequence[float], items: int, threshold: float) -> Statement:
    """The statement that the mean of an arm's fractions is above a threshold, without that seed."""
    own = confirming(scores)
    return reaches(text, math.fsum(own) / len(own), fraction_interval(own, items), threshold, n=len(own))


# ---- statements -----------------------------------------------------------------------------


def fact(text: str, true: bool, evidence: str, condition: str = "") -> Statement:
    """A statement that is computed and not estimated, so that it has no interval."""
    return Statement(text, true, evidence, condition)


def gain(text: str, difference: Difference, threshold: float = 0.0, condition: str = "") -> Statement:
    """The statement that a difference of accuracies is above a threshold, given as a fraction."""
    evidence = f"{format_points(difference)}, n = {difference.n}"
    if threshold:
        evidence += f", threshold {100 * threshold:g}"
    return Statement(text, is_above(difference.interval, threshold), evidence, condition)


def equal_within(text: str, difference: Difference, margin: float, expected: float = 0.0) -> Statement:
    """The statement that a difference of accuracies is as expected, to within a margin, as fractions.

    True if the whole interval is within the margin, and not true if it is outside.
    """
    low, high, true = expected - margin, expected + margin, None
    if difference.interval is not None and low < difference.interval[0] and difference.interval[1] < high:
        true = True
    elif difference.interval is not None and (difference.interval[0] > high or difference.interval[1] < low):
        true = False
    evidence = f"{format_points(difference)}, n = {difference.n}, equal from {100 * low:g} to {100 * high:g}"
    return Statement(text, true, evidence)


def reaches(
    text: str, mean: float, interval: Interval | None, threshold: float, condition: str = "", n: int = 0
) -> Statement:
    """The statement that a fraction is above a threshold; `n` seeds are printed if given."""
    seeds = f", n = {n}" if n else ""
    evidence = f"{format_fraction(mean, interval)}{seeds}, threshold {100 * threshold:g} %"
    return Statement(text, is_above(interval, threshold), evidence, condition)


def is_above(interval: Interval | None, threshold: float) -> bool | None:
    """Whether a measurement is above a threshold; None if its interval contains it, or it has none."""
    if interval is None or interval[0] <= threshold <= interval[1]:
        return None
    return interval[0] > threshold


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
