"""Calibration on a page: how far a model's scores can be believed."""

from __future__ import annotations

from collections.abc import Iterator

from vitrail.evaluation.calibration import Calibration, Threshold
from vitrail.evaluation.run import Evaluation
from vitrail.report import charts
from vitrail.report.numbers import percent
from vitrail.report.page import Figure, Section

NEAR = 0.01  # a difference of score and share that is not worth a word

HOW = (
    "A score is the probability that the model gives its own answer. The upper part shows how often answers "
    "of each score were right: on the dashed line, of 100 answers with a score of 80 %, 80 are right. Below "
    "the line the model is too sure, above it not sure enough. Points of few pictures (see the lower part) "
    "jump by chance. A temperature divides the logits: it changes no answer, only how sure it sounds."
)


def trust(found: Evaluation) -> list[Section]:
    """The reliability diagram, the temperature and the threshold."""
    c = found.calibration
    if c is None:
        return []
    alt = f"Reliability diagram: ECE {percent(c.before)} as it is, {percent(c.after)} with the temperature"
    figures = [Figure(charts.reliability(c), alt, wide=True)]
    facts = list(facts_of(c, found))
    return [
        Section("How far its scores can be believed", [in_words(c)], figures, facts=facts, how_to_read=HOW)
    ]


def in_words(c: Calibration) -> str:
    """Too sure or not sure enough, over all pictures."""
    count = sum(one.count for one in c.bins)
    score, right = (
        sum(getattr(one, word) * one.count for one in c.bins) / count for word in ("score", "right")
    )
    verdict = "about as sure as it may be"
    if abs(score - right) > NEAR:
        verdict = "too sure of itself" if score > right else "better than it thinks"
    return (
        f"Its mean score is {percent(score)}, and {percent(right)} of its answers are right: it is {verdict}."
    )


def facts_of(c: Calibration, found: Evaluation) -> Iterator[tuple[str, object]]:
    count = found.scores.count if found.scores else found.pictures
    yield "ECE", f"{percent(c.before)}, the mean distance from the dashed line (expected calibration error)"
    if c.fitted:
        yield "temperature", f"{c.temperature:.3f}, fitted on these same pictures: ECE {percent(c.after)}"
    else:
        yield "temperature", "1, as these pictures hold nothing to fit it by"
    if c.threshold is None:
        yield "“don't know”", f"no threshold would make {percent(c.wanted)} of the answers right"
    else:
        yield "“don't know”", f"{threshold(c.threshold, count)}, with the temperature"
    if c.stored is not None:
        yield "stored temperature", f"{c.stored.temperature:.3f}: ECE {percent(c.stored.ece)}"
        if c.stored.threshold is not None:
            yield "stored threshold", threshold(c.stored.threshold, count)


def threshold(found: Threshold, count: int) -> str:
    answers = f"{found.answered:,} of {count:,} pictures, {percent(found.precision)} of them rightly"
    return f"answering only from a score of {percent(found.score)} on, it answers {answers}"
