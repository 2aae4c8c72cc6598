"""The report on an evaluation: accuracy, mistakes, confusion, metrics per class, and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vitrail.base.errors import printable
from vitrail.evaluation.calibration import Calibration, ConfidenceThreshold
from vitrail.evaluation.evaluate_model import Evaluation
from vitrail.evaluation.metrics import ClassificationMetrics
from vitrail.images.formats.sources import Split
from vitrail.model.config import format_sides
from vitrail.views import charts
from vitrail.views.gallery import example_section, mistake_section
from vitrail.views.html_page import Figure, Page, Section, Table, percent, wilson
from vitrail.weights.bundle.bundle import Bundle

_MAX_CORRUPT = 50  # unreadable files listed by name
_PAIRS_WITH_MATRIX, _PAIRS_ALONE = 8, 1000  # confused pairs in the table, with and without a drawn matrix
_MAX_ROWS = 1000  # in the table of classes
_SEARCHED = 30  # tables with more rows than this can be searched
_TOLERANCE = 0.01  # a smaller difference between confidence and accuracy counts as calibrated

_MATRIX = (
    "Rows are true classes, columns are predicted classes. Correct predictions are on the diagonal; a dark "
    "cell elsewhere is a class that is often mistaken for another. Numbers are images, colors are fractions "
    "of the row."
)
_METRICS = (
    "Recall is the fraction of the images of a class that are predicted as that class. Precision is the "
    "fraction of the images predicted as a class that belong to it. F1 is their harmonic mean. A dash means "
    "that there are no such images."
)
_AVERAGE_PRECISION = " Average precision measures how well the images of a class are ranked above all others."
_RELIABILITY = (
    "The confidence of a prediction is the probability of the predicted class. The upper plot shows accuracy "
    "by confidence: on the dashed line, 80 of 100 predictions with a confidence of 80 % are correct. Below "
    "the line the model is overconfident, above it underconfident. Points with few images (see the lower "
    "plot) are noisy. A temperature divides the logits; it changes the confidence but no prediction."
)
_REAL = (
    "ImageNet-ReaL lists all classes that annotators saw in an image; a prediction is correct if it is one "
    "of them. Images without any label are skipped."
)
_PROBES = (
    "A probe is a simple classifier trained on the features of the frozen model, on the training images. "
    "knn: k nearest neighbors. linear: logistic regression. fewshot: a linear classifier fitted to a few "
    "images of each class; ± is the standard deviation over several samples. Features: the class token, the "
    "mean of the patches, or both concatenated."
)
_SETUP = (
    "Every image was passed through the model once, without augmentation. Metrics were computed in double "
    "precision from the logits of all images."
)


def evaluation_page(
    evaluation: Evaluation, bundle: Bundle, split: Split, *, model: str = "", command: str = ""
) -> Page:
    """Build the report on an evaluation of the images of a split."""
    name = model or bundle.card.name or "A model"
    return Page(
        title=f"{printable(name)} on {printable(evaluation.data)}",
        lead=lead(evaluation),
        headline=list(headline(evaluation)),
        sections=[
            *evaluation_sections(evaluation, bundle, split),
            *notes_sections(evaluation),
            setup_section(evaluation, bundle),
        ],
        command=command,
    )


def evaluation_sections(evaluation: Evaluation, bundle: Bundle, split: Split) -> list[Section]:
    """The sections on images and on metrics."""
    return [
        *mistake_section(evaluation, bundle, split),
        *example_section(evaluation, bundle, split),
        *confusion_section(evaluation),
        *class_section(evaluation),
        *calibration_section(evaluation),
        *real_labels_section(evaluation),
        *probe_section(evaluation),
    ]


# ---- summary --------------------------------------------------------------------------------


def lead(evaluation: Evaluation) -> list[str]:
    """The result in a few sentences."""
    scores = evaluation.metrics
    if scores is None:
        return ["This model has no classification head. Its features are evaluated with probes below."]
    images = f"{scores.count:,} images of {printable(evaluation.data)} ({split_name(evaluation)})"
    trained = [] if evaluation.trained_on is None else [evaluation.trained_on.sentence()]
    if scores.top1 is None:
        return [f"Multi-label evaluation on {images}.", *trained]
    correct = round(scores.top1 * scores.count)
    most = max(scores.per_class, key=lambda one: one.count)
    return [
        f"The model predicts {correct:,} of {images} correctly, an accuracy of {percent(scores.top1)}. "
        f"Always predicting “{printable(most.name, 60)}”, the most frequent of the "
        f"{len(evaluation.classes):,} classes, would reach {percent(most.count / scores.count)}.",
        *trained,
    ]


def split_name(evaluation: Evaluation) -> str:
    return "all images" if evaluation.split == "all" else f"split “{evaluation.split}”"


def headline(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """The most important numbers, and what each is."""
    scores = evaluation.metrics
    if scores is None:
        best = max(evaluation.probes, key=lambda row: row.top1)
        probe = " ".join([best.probe, best.setting, f"on layer {best.layer}"])
        yield percent(best.top1), f"accuracy of the best probe: {probe}"
        return
    if scores.top1 is not None:
        low, high = wilson(round(scores.top1 * scores.count), scores.count)
        interval = f"95 % confidence interval {100 * low:.1f} to {100 * high:.1f} %"
        yield percent(scores.top1), f"top-1 accuracy on {scores.count:,} images; {interval}"
    exact = f"of {scores.count:,} images with all labels correct (exact match)"
    error = None if evaluation.calibration is None else evaluation.calibration.ece
    for fraction, meaning in (
        (scores.top5, "top-5 accuracy"),
        (scores.mean_ap, "mean average precision over the classes"),
        (scores.exact, exact),
        (scores.macro_f1, "macro-F1: the mean F1 of the classes"),
        (error, "expected calibration error (ECE)"),
    ):
        if fraction is not None:
            yield percent(fraction), meaning
    yield f"{scores.loss:.3f}", "cross-entropy loss"


# ---- classes --------------------------------------------------------------------------------


def confusion_section(evaluation: Evaluation) -> list[Section]:
    """The confusion matrix, if there are few classes, and the most frequent confusions."""
    scores = evaluation.metrics
    if scores is None or scores.confusion is None:
        return []
    few = len(evaluation.classes) <= charts.MAX_CLASSES
    most = _PAIRS_WITH_MATRIX if few else _PAIRS_ALONE
    pairs = confused_pairs(scores, most)
    figures = []
    if few:
        worst = "{} mistaken for {} {:,} times".format(*pairs[0]) if pairs else "no mistakes"
        alt = f"Confusion matrix of {len(evaluation.classes)} classes: {worst}"
        figures = [Figure(charts.confusion_matrix(scores.confusion, evaluation.classes), alt, wide=True)]
    caption = f"The {most:,} most frequent confusions" if len(pairs) == most else "All confusions"
    caption += ", the most frequent first" if len(pairs) > _SEARCHED else ""
    rows = [[true, predicted, f"{count:,}", percent(fraction)] for true, predicted, count, fraction in pairs]
    header = ["true class", "predicted class", "images", "fraction of the true class"]
    text = [] if pairs else ["No class was mistaken for another."]
    search = "class" if len(rows) > _SEARCHED else ""
    tables = [Table(caption, header, rows, text_columns=2, search=search)] if pairs else []
    return [Section("Confusion", text, figures, tables=tables, how_to_read=_MATRIX if few else "")]


def confused_pairs(scores: ClassificationMetrics, most: int) -> list[tuple[str, str, int, float]]:
    """The most confused pairs: true class, predicted class, count, and fraction of the true class."""
    names = [one.name for one in scores.per_class]
    pairs = [
        (names[true], names[predicted], count, count / sum(row))
        for true, row in enumerate(scores.confusion or [])
        for predicted, count in enumerate(row)
        if true != predicted and count
    ]
    return sorted(pairs, key=lambda pair: -pair[2])[:most]


def class_section(evaluation: Evaluation) -> list[Section]:
    """Precision, recall and F1 per class, the lowest recall first."""
    if evaluation.metrics is None:
        return []
    per_class, multi_label = evaluation.metrics.per_class, evaluation.metrics.mean_ap is not None
    figures = []
    if len(per_class) <= charts.MAX_CLASSES:
        alt = f"Precision and recall of {len(per_class)} classes as bars; the numbers are in the table below"
        figures = [Figure(charts.class_bars(per_class), alt, wide=True)]
    ranked = sorted(per_class, key=lambda one: (one.recall is None, one.recall or 0.0))[:_MAX_ROWS]
    some = "All" if len(ranked) == len(per_class) else f"{_MAX_ROWS:,} of {len(per_class):,}"
    rows = []
    for one in ranked:
        metrics = [one.precision, one.recall, one.f1, *([one.ap] * multi_label)]
        cells = ("–" if value is None else percent(value) for value in metrics)
        rows.append([one.name, f"{one.count:,}", *cells])
    header = ["class", "images", "precision", "recall", "F1", *(["average precision"] * multi_label)]
    search = "class" if len(rows) > _SEARCHED else ""
    table = Table(f"{some} classes, lowest recall first", header, rows, search=search)
    how_to_read = _METRICS + _AVERAGE_PRECISION * multi_label
    return [Section("Classes", figures=figures, tables=[table], how_to_read=how_to_read)]


# ---- calibration ----------------------------------------------------------------------------


def calibration_section(evaluation: Evaluation) -> list[Section]:
    """The reliability diagram, the temperature and the threshold."""
    c = evaluation.calibration
    if c is None:
        return []
    scaled = f", or {percent(c.ece_scaled)} with temperature scaling" if c.fitted else ""
    alt = f"Reliability diagram: ECE {percent(c.ece)}{scaled}"
    figures = [Figure(charts.reliability_diagram(c), alt, wide=True)]
    count = sum(one.count for one in c.bins)
    confidence = sum(one.confidence * one.count for one in c.bins) / count
    accuracy = sum(one.accuracy * one.count for one in c.bins) / count
    verdict = "well calibrated on average"
    if abs(confidence - accuracy) > _TOLERANCE:
        verdict = "overconfident" if confidence > accuracy else "underconfident"
    text = (
        f"The mean confidence is {percent(confidence)} and the accuracy {percent(accuracy)}: the model is "
        f"{verdict}."
    )
    facts = list(_calibration_facts(c, count))
    return [Section("Calibration", [text], figures, facts=facts, how_to_read=_RELIABILITY)]


def _calibration_facts(c: Calibration, count: int) -> Iterator[tuple[str, object]]:
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
    return (
        f"a confidence of at least {percent(threshold.confidence)} accepts {threshold.accepted:,} of "
        f"{count:,} predictions, {percent(threshold.accuracy)} of them correct"
    )


# ---- further sections -----------------------------------------------------------------------


def real_labels_section(evaluation: Evaluation) -> list[Section]:
    """Accuracy on the ImageNet-ReaL labels, if they were given."""
    if evaluation.real is None or evaluation.metrics is None or evaluation.metrics.top1 is None:
        return []
    rows = [
        ["original", percent(evaluation.metrics.top1), f"{evaluation.metrics.count:,}"],
        ["ReaL", percent(evaluation.real.accuracy), f"{evaluation.real.count:,}"],
    ]
    table = Table("Accuracy by labels", ["labels", "accuracy", "images"], rows)
    return [Section("ReaL labels", tables=[table], how_to_read=_REAL)]


def probe_section(evaluation: Evaluation) -> list[Section]:
    """The accuracy of probes on the features."""
    if not evaluation.probes:
        return []
    rows = []
    for row in evaluation.probes:
        spread = "" if row.std is None else percent(row.std)
        rows.append([row.probe, row.setting, row.feature, row.layer, percent(row.top1), spread])
    header = ["probe", "setting", "feature", "layer", "accuracy", "±"]
    table = Table("Accuracy of the probes", header, rows, text_columns=3)
    return [Section("Feature probes", tables=[table], how_to_read=_PROBES)]


def notes_sections(evaluation: Evaluation, more: Sequence[str] = ()) -> list[Section]:
    """Files that could not be read, and the notes of the evaluation."""
    sections = []
    if evaluation.corrupt:
        rows = list(evaluation.corrupt.items())[:_MAX_CORRUPT]
        caption = f"{len(evaluation.corrupt):,} unreadable files, not included in any metric"
        caption += f"; the first {len(rows)}" if len(rows) < len(evaluation.corrupt) else ""
        table = Table(caption, ["image", "error"], rows, text_columns=2)
        sections.append(Section("Images that could not be read", tables=[table]))
    points = list(dict.fromkeys([*more, *evaluation.notes]))
    return [*sections, Section("Notes", points=points)] if points else sections


def setup_section(evaluation: Evaluation, bundle: Bundle) -> Section:
    """The data, the preprocessing and the model of the evaluation."""
    config, spec = bundle.model.config, bundle.preprocess
    count = sum(parameter.numel() for parameter in bundle.model.parameters())
    data = f"{printable(evaluation.data)}, {split_name(evaluation)}"
    facts: list[tuple[str, object]] = [
        ("images", f"{evaluation.images:,} of {data}, {len(evaluation.classes):,} classes"),
        ("preprocessing", "; ".join(spec.describe()) if spec else "none"),
        (
            "model",
            f"{count:,} parameters, {config.depth} layers, width {config.width}, {config.heads} heads",
        ),
        ("scores", bundle.scores.summary()),
        ("patches", f"{format_sides(config.grid)} of {format_sides(config.patch_pixels)} pixels"),
        ("time", f"{evaluation.seconds:.1f} s"),
    ]
    return Section("Evaluation setup", [_SETUP], facts=facts)
