"""The result of an evaluation as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vitrail.base.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from vitrail.evaluation.calibration import Calibration, ConfidenceThreshold
    from vitrail.evaluation.evaluate_model import Evaluation
    from vitrail.evaluation.metrics import ClassificationMetrics

_MAX_CLASSES = 20  # in the table; of more, those with the lowest recall are shown
_MAX_CONFUSED, _MAX_MISTAKES = 5, 10
_MAX_NAME = 24  # characters of a name in a table


def show_evaluation(result: Evaluation, model: str, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(result.first_line()))
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in _summary(result, model):
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    if result.metrics is not None:
        _show_classes(result.metrics, console)
        _show_mistakes(result.metrics, console)
    _show_probes(result, console)
    for name, reason in list(result.corrupt.items())[:_MAX_MISTAKES]:
        console.print(Text(f"could not be read: {name}: {reason}"))
    if len(result.corrupt) > _MAX_MISTAKES:
        console.print(f"could not be read: {len(result.corrupt) - _MAX_MISTAKES:,} more")
    for note in result.notes:
        console.print(Text(f"note: {note}"))


def _summary(result: Evaluation, model: str) -> Iterator[tuple[str, str]]:
    """Names and values of the metrics that were computed."""
    yield "model", model
    split = "all" if result.split == "all" else f"{result.split} split:"
    yield "data", f"{printable(result.data)}, {split} {result.images:,} images"
    scores = result.metrics
    if scores is not None:
        if scores.count < result.images:
            yield "evaluated", f"{scores.count:,} images; {result.images - scores.count:,} could not be read"
        if scores.top1 is not None:
            correct = round(scores.top1 * scores.count)
            yield "top-1 accuracy", f"{_percent(scores.top1)}, {correct:,} of {scores.count:,} correct"
        names = {"top-5 accuracy": scores.top5, "mean AP": scores.mean_ap, "exact match": scores.exact}
        for name, value in {**names, "macro-F1": scores.macro_f1}.items():
            if value is not None:
                yield name, _percent(value)
        if (real := result.real) is not None:
            yield "ReaL accuracy", f"{_percent(real.accuracy)} of {real.count:,} images with ReaL labels"
        yield "loss", f"{scores.loss:.4f}"
    if result.calibration is not None:
        yield from _calibration_summary(result.calibration, result.split)
    if result.out_of_distribution is not None:
        yield "out of distribution", result.out_of_distribution.sentence()
    yield "time", f"{result.seconds:.1f} s"


def _calibration_summary(calibration: Calibration, split: str) -> Iterator[tuple[str, str]]:
    yield "ECE", _percent(calibration.ece)
    if calibration.fitted:
        images = "these images" if split == "all" else split
        fitted = f"temperature {calibration.temperature:.3f}, fitted on {images}"
        yield "", f"{_percent(calibration.ece_scaled)} with {fitted}"
    none = f"none reaches an accuracy of {calibration.target_accuracy:.4g}"
    yield "threshold", none if calibration.threshold is None else _describe_threshold(calibration.threshold)
    if (stored := calibration.stored) is not None:
        yield "stored", f"ECE {_percent(stored.ece)} with temperature {stored.temperature:.3f}"
        if stored.threshold is not None:
            yield "", f"threshold {_describe_threshold(stored.threshold)}"


def _describe_threshold(threshold: ConfidenceThreshold) -> str:
    accuracy = _percent(threshold.accuracy)
    return f"{threshold.confidence:.4f}: {threshold.accepted:,} predictions above it, accuracy {accuracy}"


def _show_classes(scores: ClassificationMetrics, console: Console) -> None:
    """Precision, recall and F1 of each class, or of those with the lowest recall."""
    classes, title = scores.per_class, "Classes"
    if len(classes) > _MAX_CLASSES:
        with_recall = [one for one in classes if one.recall is not None]
        classes = sorted(with_recall, key=lambda one: one.recall or 0.0)[:_MAX_CLASSES]
        title = f"The {len(classes)} of {len(scores.per_class):,} classes with the lowest recall"
    multilabel = scores.mean_ap is not None
    rows = []
    for one in classes:
        fractions = [one.precision, one.recall, one.f1, *([one.ap] * multilabel)]
        cells = ("-" if fraction is None else _percent(fraction) for fraction in fractions)
        rows.append([one.name, f"{one.count:,}", *cells])
    numbers = ["images", "precision", "recall", "F1", *(["AP"] * multilabel)]
    _print_table(console, title, ["class"], numbers, rows)


def _show_mistakes(scores: ClassificationMetrics, console: Console) -> None:
    """The classes that are confused most often, those at least twice, and the most confident mistakes."""
    names = [one.name for one in scores.per_class]
    pairs = [
        (names[label], names[predicted], count)
        for label, row in enumerate(scores.confusion or [])
        for predicted, count in enumerate(row)
        if label != predicted and count > 1
    ]
    most = sorted(pairs, key=lambda pair: -pair[2])[:_MAX_CONFUSED]
    rows = [[label, predicted, f"{count:,}"] for label, predicted, count in most]
    _print_table(console, "Most often confused", ["class", "predicted as"], ["images"], rows)
    rows = [[m.name, m.predicted, m.label, f"{m.confidence:.3f}"] for m in scores.mistakes[:_MAX_MISTAKES]]
    texts = ["image", "predicted", "label"]
    _print_table(console, "Most confident mistakes", texts, ["confidence"], rows)


def _show_probes(result: Evaluation, console: Console) -> None:
    """One row per probe, setting and layer; one column per feature."""
    features = list(dict.fromkeys(row.feature for row in result.probes))
    rows: dict[tuple[str, str, int], dict[str, str]] = {}
    for probe in result.probes:
        spread = "" if probe.std is None else f" ± {100 * probe.std:.1f}"
        cells = rows.setdefault((probe.probe, probe.setting, probe.layer), {})
        cells[probe.feature] = f"{100 * probe.top1:.2f}{spread}"
    shown = [
        [name, setting, str(layer), *(cells[feature] for feature in features)]
        for (name, setting, layer), cells in rows.items()
    ]
    title = "Probes: top-1 accuracy in %"
    _print_table(console, title, ["probe", "setting"], ["layer", *features], shown)


def _print_table(
    console: Console, title: str, texts: list[str], numbers: list[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print rows of texts, which are shortened, and of numbers; nothing without rows."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(
        title=Text(f"\n{title}", style="bold"), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False
    )
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shortened = (Text(printable(cell, _MAX_NAME)) for cell in row[: len(texts)])
        table.add_row(*shortened, *row[len(texts) :])
    console.print(table)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"
