"""Classes on a page: what is taken for what, and how each fared."""

from __future__ import annotations

from vitrail.evaluation.metrics import PerClass, Scores
from vitrail.evaluation.run import Evaluation
from vitrail.report import charts
from vitrail.report.numbers import percent
from vitrail.report.page import Figure, Section, Table

FEW, PAIRS = 8, 20  # pairs of classes that are confused, beside a drawing and without one
ROWS = 200  # of the table of classes

MATRIX = (
    "A row for each class that was shown, a column for each that was said. What is right lies on the "
    "diagonal; a strong colour elsewhere is a class that is often taken for another. Colours are shares of a "
    "row, numbers are pictures."
)
SHARES = (
    "Recall: of the pictures that show the class, the share that was said to. Precision: of the pictures "
    "said to show it, the share that does. A dash: there was none to count."
)
RANKED = " Average precision: how well the pictures of a class are ranked before all others."


def confusions(found: Evaluation) -> list[Section]:
    """A drawing of few classes, and the worst pairs of any number."""
    scores = found.scores
    if scores is None or scores.confusion is None:
        return []
    few = len(found.classes) <= charts.MOST_CLASSES
    most = FEW if few else PAIRS
    pairs = confused(scores, most)
    figures = []
    if few:
        worst = "{} was taken for {} {:,} times".format(*pairs[0]) if pairs else "none was taken for another"
        alt = f"Confusion matrix of {len(found.classes)} classes: {worst}"
        figures = [Figure(charts.confusion(scores.confusion, found.classes), alt, wide=True)]
    caption = f"The {most} most frequent confusions" if len(pairs) == most else "All confusions"
    rows = [[was, said, f"{times:,}", percent(share)] for was, said, times, share in pairs]
    table = Table(caption, ["shows", "taken for", "times", "of its pictures"], rows, words=2)
    text = [] if pairs else ["No class was taken for another."]
    tables = [table] if pairs else []
    return [Section("What it confuses", text, figures, tables=tables, how_to_read=MATRIX if few else "")]


def confused(scores: Scores, most: int) -> list[tuple[str, str, int, float]]:
    """Pairs of classes, how often the first was taken for the second, and which share of it that is."""
    names, found = [one.name for one in scores.per_class], []
    for was, row in enumerate(scores.confusion or []):
        for said, times in enumerate(row):
            if was != said and times:
                found.append((names[was], names[said], times, times / sum(row)))
    return sorted(found, key=lambda pair: -pair[2])[:most]


def classes(found: Evaluation) -> list[Section]:
    """How each class fared, the hardest first."""
    if found.scores is None:
        return []
    each, several = found.scores.per_class, found.scores.mean_ap is not None
    figures = []
    if len(each) <= charts.MOST_CLASSES:
        alt = f"Bars of precision and recall of {len(each)} classes; the table below has the numbers"
        figures = [Figure(charts.classes(each), alt, wide=True)]
    ranked = sorted(each, key=lambda one: (one.recall is None, one.recall or 0.0))[:ROWS]
    caption = "Every class" if len(ranked) == len(each) else f"{ROWS} of {len(each):,} classes"
    header = ["class", "pictures", "precision", "recall", *(["average precision"] if several else [])]
    table = Table(f"{caption}, the lowest recall first", header, [class_row(one, several) for one in ranked])
    how = SHARES + RANKED * several
    return [Section("Class by class", figures=figures, tables=[table], how_to_read=how)]


def class_row(one: PerClass, several: bool) -> list[object]:
    shares = [one.precision, one.recall, *([one.ap] if several else [])]
    return [one.name, f"{one.count:,}", *("–" if share is None else percent(share) for share in shares)]
