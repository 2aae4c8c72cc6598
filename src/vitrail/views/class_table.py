"""The sections of a report about classes: the confusion matrix, and precision and recall per class."""

from __future__ import annotations

from vitrail.evaluation.evaluate_model import Evaluation
from vitrail.evaluation.metrics import ClassificationMetrics, ClassMetrics
from vitrail.views import charts
from vitrail.views.html_page import Figure, Section, Table
from vitrail.views.numbers import percent

_PAIRS_WITH_MATRIX, _PAIRS_ALONE = 8, 1000  # confused pairs in the table, with and without a drawn matrix
_MAX_ROWS = 1000  # in the table of classes
_SEARCHED = 30  # tables with more rows than this can be searched

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
    names, pairs = [one.name for one in scores.per_class], []
    for true, row in enumerate(scores.confusion or []):
        for predicted, count in enumerate(row):
            if true != predicted and count:
                pairs.append((names[true], names[predicted], count, count / sum(row)))
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
    caption = (
        "All classes" if len(ranked) == len(per_class) else f"{_MAX_ROWS:,} of {len(per_class):,} classes"
    )
    header = ["class", "images", "precision", "recall", "F1", *(["average precision"] if multi_label else [])]
    rows = [_class_row(one, multi_label) for one in ranked]
    search = "class" if len(rows) > _SEARCHED else ""
    table = Table(f"{caption}, lowest recall first", header, rows, search=search)
    how_to_read = _METRICS + _AVERAGE_PRECISION * multi_label
    return [Section("Classes", figures=figures, tables=[table], how_to_read=how_to_read)]


def _class_row(one: ClassMetrics, multi_label: bool) -> list[object]:
    metrics = [one.precision, one.recall, one.f1, *([one.ap] if multi_label else [])]
    return [one.name, f"{one.count:,}", *("–" if value is None else percent(value) for value in metrics)]
