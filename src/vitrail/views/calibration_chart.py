"""The calibration section of a report."""

from __future__ import annotations

from collections.abc import Iterator

from vitrail.evaluation.calibration import Calibration, ConfidenceThreshold
from vitrail.evaluation.evaluate_model import Evaluation
from vitrail.views import charts
from vitrail.views.html_page import Figure, Section
from vitrail.views.numbers import percent

_TOLERANCE = 0.01  # a smaller difference between confidence and accuracy counts as calibrated

_HOW_TO_READ = (
    "The confidence of a prediction is the probability of the predicted class. The upper plot shows accuracy "
    "by confidence: on the dashed line, 80 of 100 predictions with a confidence of 80 % are correct. Below "
    "the line the model is overconfident, above it underconfident. Points with few images (see the lower "
    "plot) are noisy. A temperature divides the logits; it changes the confidence but no prediction."
)


def calibration_section(evaluation: Evaluation) -> list[Section]:
    """The reliability diagram, the temperature and the threshold."""
    c = evaluation.calibration
    if c is None:
        return []
    scaled = f", or {percent(c.ece_scaled)} with temperature scaling" if c.fitted else ""
    alt = f"Reliability diagram: ECE {percent(c.ece)}{scaled}"
    figures = [Figure(charts.reliability_diagram(c), alt, wide=True)]
    facts = list(_facts(c, evaluation))
    return [Section("Calibration", [_summary(c)], figures, facts=facts, how_to_read=_HOW_TO_READ)]


def _summary(c: Calibration) -> str:
    """Whether the model is overconfident or underconfident, over all images."""
    count = sum(one.count for one in c.bins)
    confidence, accuracy = (
        sum(getattr(one, field) * one.count for one in c.bins) / count for field in ("confidence", "accuracy")
    )
    verdict = "well calibrated on average"
    if abs(confidence - accuracy) > _TOLERANCE:
        verdict = "overconfident" if confidence > accuracy else "underconfident"
    return (
        f"The mean confidence is {percent(confidence)} and the accuracy {percent(accuracy)}: the model is "
        f"{verdict}."
    )


def _facts(c: Calibration, evaluation: Evaluation) -> Iterator[tuple[str, object]]:
    count = evaluation.metrics.count if evaluation.metrics else evaluation.images
    yield "ECE", f"{percent(c.ece)}, expected calibration error: the mean distance from the dashed line"
    if c.fitted:
        yield "temperature", f"{c.temperature:.3f}, fitted on these images; ECE {percent(c.ece_scaled)}"
    else:
        yield "temperature", "1; no temperature could be fitted on these images"
    if c.threshold is None:
        yield "threshold", f"none reaches an accuracy of {percent(c.target_accuracy)}"
    else:
        scaled = ", with temperature scaling" if c.fitted else ""
        yield "threshold", f"{_describe_threshold(c.threshold, count)}{scaled}"
    if c.stored is not None:
        yield "stored temperature", f"{c.stored.temperature:.3f}; ECE {percent(c.stored.ece)}"
        if c.stored.threshold is not None:
            yield "stored threshold", _describe_threshold(c.stored.threshold, count)


def _describe_threshold(threshold: ConfidenceThreshold, count: int) -> str:
    accepted = (
        f"{threshold.accepted:,} of {count:,} predictions, {percent(threshold.accuracy)} of them correct"
    )
    return f"a confidence of at least {percent(threshold.confidence)} accepts {accepted}"
