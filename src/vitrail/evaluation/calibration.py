"""How far a model's scores can be believed, and what can be done about it.

A score is the largest probability that a model gives; it should be right as often as it says. ECE
measures how far it is from that, a temperature brings it nearer without changing an answer (Guo et al.
2017, "On calibration of modern neural networks"), and a threshold leaves the unsure ones unanswered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.weights.bundle import Bundle

BINS = 15
COLDEST, HOTTEST = 0.01, 100.0  # temperatures are looked for between these
ROWS = 8192  # that are worked on at a time


@dataclass(frozen=True)
class Bin:
    """The pictures whose scores lie above `low`, up to and with `high`."""

    low: float
    high: float
    count: int
    score: float
    """Their mean score, 0 where there are none."""
    right: float
    """The share of them that is right, 0 where there are none."""


@dataclass(frozen=True)
class Threshold:
    """Pictures with at least this score are answered; of the others the model says: don't know."""

    score: float
    answered: int
    precision: float
    """The share of the answered pictures that is right."""


@dataclass(frozen=True)
class Stored:
    """What the temperature and the threshold in a model's file are worth on these pictures."""

    temperature: float
    ece: float
    threshold: Threshold | None


@dataclass(frozen=True)
class Calibration:
    """The temperature that fits these pictures best, and what it changes."""

    temperature: float
    fitted: bool
    """False where the pictures hold nothing to fit it by, and it stays 1."""
    before: float
    """ECE of the scores as they are."""
    after: float
    """ECE with the temperature."""
    bins: list[Bin]
    """For a reliability picture, of the scores as they are."""
    wanted: float
    """The precision that the threshold is for."""
    threshold: Threshold | None
    """On scores with the temperature; None where no threshold gives the precision."""
    stored: Stored | None = None
    cooled: list[Bin] = field(default_factory=list)
    """For the same picture, of the scores with the temperature."""


def calibrate(
    logits: NDArray[Any], labels: NDArray[np.int64], precision: float, stored: dict[str, Any] | None = None
) -> Calibration:
    """Fit a temperature (N, K) to (N,), then find the threshold for a precision.

    Args:
        stored: the metrics in the model's file, which may hold a temperature and a threshold.
    """
    said, scores = surest(logits)
    right = said == labels
    found = fit_temperature(logits, labels)
    fitted = COLDEST < found < HOTTEST
    temperature = found if fitted else 1.0
    cooled = surest(logits, temperature)[1]
    bins, after = reliability(scores, right), reliability(cooled, right)
    return Calibration(
        temperature=temperature,
        fitted=fitted,
        before=ece(bins),
        after=ece(after),
        bins=bins,
        wanted=precision,
        threshold=threshold_for(cooled, right, precision),
        stored=judge_stored(logits, right, stored or {}),
        cooled=after,
    )


def surest(logits: NDArray[Any], temperature: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The most probable class of each picture and its probability, both (N,); ties go to the first."""
    said = logits.argmax(axis=1).astype(np.int64)
    scores = [1 / np.exp(part / temperature).sum(axis=1) for part in below_largest(logits)]
    return said, np.concatenate([np.zeros(0), *scores])


def below_largest(logits: NDArray[Any]) -> list[NDArray[np.float64]]:
    """Logits minus the largest of their row, in float64: their exponentials are finite."""
    parts = [logits[first : first + ROWS].astype(np.float64) for first in range(0, len(logits), ROWS)]
    return [part - part.max(axis=1, keepdims=True) for part in parts]


# ---- ECE ------------------------------------------------------------------------------------


def reliability(scores: NDArray[Any], right: NDArray[Any], bins: int = BINS) -> list[Bin]:
    """Bins of equal width from 0 to 1; a score on an edge belongs to the bin below, as in the paper."""
    place = np.clip(np.ceil(scores * bins).astype(np.int64) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    some = np.maximum(count, 1)
    mean = np.bincount(place, scores, minlength=bins) / some
    share = np.bincount(place, right.astype(np.float64), minlength=bins) / some
    return [
        Bin(i / bins, (i + 1) / bins, int(count[i]), float(mean[i]), float(share[i])) for i in range(bins)
    ]


def ece(bins: list[Bin]) -> float:
    """Expected calibration error: how far scores and shares lie apart, over all pictures."""
    count = sum(one.count for one in bins)
    return sum(one.count * abs(one.score - one.right) for one in bins) / max(count, 1)


# ---- temperature ----------------------------------------------------------------------------


def fit_temperature(logits: NDArray[Any], labels: NDArray[np.int64]) -> float:
    """The T at which softmax(logits / T) gives the labels the smallest loss.

    The loss is convex in b = 1 / T, so its slope crosses zero once: Newton's steps, and half-way
    (in log b) between what is known to be too little and too much where a step leaves these.
    Where the loss falls all the way (as when every picture is right) it is COLDEST or HOTTEST.
    """
    parts = below_largest(logits)
    low, high = 1 / HOTTEST, 1 / COLDEST
    b = 1.0
    slope, curve = slopes(parts, labels, b)
    if slope == 0 and curve == 0:  # every class has the same logit: any temperature is as good
        return 1.0
    if slopes(parts, labels, high)[0] <= 0:
        return COLDEST
    if slopes(parts, labels, low)[0] >= 0:
        return HOTTEST
    for _ in range(200):
        low, high = (low, b) if slope > 0 else (b, high)
        step = b - slope / curve if curve > 0 else 0.0
        last, b = b, step if low < step < high else math.sqrt(low * high)
        if abs(b - last) <= 1e-12 * b:
            break
        slope, curve = slopes(parts, labels, b)
    return 1 / b


def slopes(parts: list[NDArray[np.float64]], labels: NDArray[np.int64], b: float) -> tuple[float, float]:
    """First and second derivative of the mean loss of softmax(b z) in b."""
    first = second = 0.0
    start = 0
    for z in parts:
        y = labels[start : start + len(z)]
        start += len(z)
        p = np.exp(b * z)
        p /= p.sum(axis=1, keepdims=True)
        mean = (p * z).sum(axis=1)
        first += float((mean - z[np.arange(len(z)), y]).sum())
        second += float((p * (z - mean[:, None]) ** 2).sum())
    return first / start, second / start


# ---- a threshold ----------------------------------------------------------------------------


def threshold_for(scores: NDArray[Any], right: NDArray[Any], precision: float) -> Threshold | None:
    """The lowest score from which on at least `precision` of the answers are right; None if there is none."""
    check_precision(precision)
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    share = np.cumsum(right[order]) / np.arange(1, len(order) + 1)
    last_of_equals = np.append(falling[1:] != falling[:-1], True)[: len(order)]  # they are answered together
    good = np.flatnonzero((share >= precision) & last_of_equals)
    if not len(good):
        return None
    found = good[-1]
    return Threshold(float(falling[found]), int(found) + 1, float(share[found]))


def check_precision(precision: float) -> None:
    if not 0 < precision <= 1:
        raise InputError("A precision must be above 0 and at most 1.", f"{precision:g}", "Such as 0.95.")


# ---- in a model's file ----------------------------------------------------------------------


def judge_stored(logits: NDArray[Any], right: NDArray[Any], metrics: dict[str, Any]) -> Stored | None:
    """Temperature and threshold of a file, tried here; None where it has none that can be used."""
    temperature, threshold = metrics.get("temperature"), metrics.get("threshold")
    if not isinstance(temperature, (int, float)) or not COLDEST <= temperature <= HOTTEST:
        return None
    scores = surest(logits, temperature)[1]
    judged = None
    if isinstance(threshold, (int, float)):
        answered = scores >= threshold
        share = float(right[answered].mean()) if answered.any() else 0.0
        judged = Threshold(float(threshold), int(answered.sum()), share)
    return Stored(float(temperature), ece(reliability(scores, right)), judged)


def with_calibration(bundle: Bundle, found: Calibration) -> Bundle:
    """The bundle with this temperature and threshold in its card, in place of any before."""
    metrics = {n: value for n, value in bundle.card.metrics.items() if n not in ("temperature", "threshold")}
    metrics["temperature"] = found.temperature
    if found.threshold is not None:
        metrics["threshold"] = found.threshold.score
    return replace(bundle, card=replace(bundle.card, metrics=metrics))
