"""The report on an evaluation: accuracy, mistakes, confusion, metrics per class, and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vitrail.base.errors import printable
from vitrail.evaluation.evaluate_model import Evaluation
from vitrail.images.formats.sources import Split
from vitrail.model.config import format_sides
from vitrail.views.calibration_chart import calibration_section
from vitrail.views.class_table import class_section, confusion_section
from vitrail.views.gallery import example_section, mistake_section
from vitrail.views.html_page import Page, Section, Table
from vitrail.views.numbers import percent, wilson
from vitrail.weights.bundle.bundle import Bundle

_MAX_CORRUPT = 50  # unreadable files listed by name

_PROBES = (
    "A probe is a simple classifier trained on the features of the frozen model, on the training images. "
    "knn: k nearest neighbors. linear: logistic regression. fewshot: a linear classifier fitted to a few "
    "images of each class; ± is the standard deviation over several samples. Features: the class token, the "
    "mean of the patches, or both concatenated."
)


def evaluation_page(
    evaluation: Evaluation, bundle: Bundle, split: Split, *, model: str = "", command: str = ""
) -> Page:
    """Build the report on an evaluation.

    Args:
        split: the evaluated images.
        model: the name of the model.
        command: the command that wrote the page.
    """
    name = model or bundle.card.name or "A model"
    return Page(
        title=f"{printable(name)} on {printable(evaluation.data)}",
        lead=lead(evaluation),
        headline=list(headline(evaluation)),
        sections=[
            *mistake_section(evaluation, bundle, split),
            *example_section(evaluation, bundle, split),
            *metric_sections(evaluation),
            *notes_sections(evaluation),
            setup_section(evaluation, bundle),
        ],
        command=command,
    )


def metric_sections(evaluation: Evaluation) -> list[Section]:
    """The sections on metrics, without images."""
    return [
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
    seen = evaluation.trained_on
    trained = [] if seen is None else [seen.sentence()]
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
    if scores.top5 is not None:
        yield percent(scores.top5), "top-5 accuracy"
    if scores.mean_ap is not None:
        yield percent(scores.mean_ap), "mean average precision over the classes"
    if scores.exact is not None:
        yield percent(scores.exact), f"of {scores.count:,} images with all labels correct (exact match)"
    if scores.macro_f1 is not None:
        yield percent(scores.macro_f1), "macro-F1: the mean F1 of the classes"
    if evaluation.calibration is not None:
        yield percent(evaluation.calibration.ece), "expected calibration error (ECE)"
    yield f"{scores.loss:.3f}", "cross-entropy loss"


# ---- further sections -----------------------------------------------------------------------


def real_labels_section(evaluation: Evaluation) -> list[Section]:
    """Accuracy on the ImageNet-ReaL labels, if they were given."""
    if evaluation.real is None or evaluation.metrics is None or evaluation.metrics.top1 is None:
        return []
    rows = [
        ["original", percent(evaluation.metrics.top1), f"{evaluation.metrics.count:,}"],
        ["ReaL", percent(evaluation.real.accuracy), f"{evaluation.real.count:,}"],
    ]
    how_to_read = (
        "ImageNet-ReaL lists all classes that annotators saw in an image; a prediction is correct if it is "
        "one of them. Images without any label are skipped."
    )
    table = Table("Accuracy by labels", ["labels", "accuracy", "images"], rows)
    return [Section("ReaL labels", tables=[table], how_to_read=how_to_read)]


def probe_section(evaluation: Evaluation) -> list[Section]:
    """The accuracy of probes on the features."""
    if not evaluation.probes:
        return []
    rows = [
        [
            row.probe,
            row.setting,
            row.feature,
            row.layer,
            percent(row.top1),
            "" if row.std is None else percent(row.std),
        ]
        for row in evaluation.probes
    ]
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
    model = f"{count:,} parameters, {config.depth} layers, width {config.width}, {config.heads} heads"
    facts: list[tuple[str, object]] = [
        ("images", f"{evaluation.images:,} of {data}, {len(evaluation.classes):,} classes"),
        ("preprocessing", "; ".join(spec.describe()) if spec else "none"),
        ("model", model),
        ("scores", bundle.scores.summary()),
        ("patches", f"{format_sides(config.grid)} of {format_sides(config.patch_pixels)} pixels"),
        ("time", f"{evaluation.seconds:.1f} s"),
    ]
    text = (
        "Every image was passed through the model once, without augmentation. Metrics were computed in "
        "double precision from the logits of all images."
    )
    return Section("Evaluation setup", [text], facts=facts)
