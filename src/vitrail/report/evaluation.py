"""The page of an evaluation: how good a model is, what it gets wrong, how far it can be believed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vitrail.data.sources import Split
from vitrail.errors import printable
from vitrail.evaluation.run import Evaluation
from vitrail.report.classes import classes, confusions
from vitrail.report.gallery import examples, mistakes
from vitrail.report.numbers import percent, wilson
from vitrail.report.page import Page, Section, Table
from vitrail.report.trust import trust
from vitrail.weights.bundle import Bundle

CORRUPT = 50  # files that could not be read, by name

PROBES = (
    "A probe learns the classes from the model's features alone, on the training pictures. knn: the nearest "
    "of these vote. linear: logistic regression. fewshot: a linear fit to a few pictures of each class; ± is "
    "the spread over several draws. Features: the class token, the mean of the patches, or both side by side."
)


def evaluation_page(
    evaluation: Evaluation, bundle: Bundle, split: Split, *, model: str = "", command: str = ""
) -> Page:
    """Everything that was found out, for a reader.

    Args:
        split: the pictures that were judged.
        model: what the model is called.
        command: what made the page.
    """
    name = model or bundle.card.name or "A model"
    return Page(
        title=f"{printable(name)} on {printable(evaluation.data)}",
        lead=lead(evaluation),
        headline=list(headline(evaluation)),
        sections=[
            *mistakes(evaluation, bundle, split),
            *examples(evaluation, bundle, split),
            *judged(evaluation),
            *notes(evaluation),
            measured(evaluation, bundle),
        ],
        command=command,
    )


def judged(found: Evaluation) -> list[Section]:
    """What follows from the answers alone."""
    return [*confusions(found), *classes(found), *trust(found), *real(found), *probes(found)]


# ---- in short -------------------------------------------------------------------------------


def lead(found: Evaluation) -> list[str]:
    """What it comes to, in a few sentences."""
    scores = found.scores
    if scores is None:
        return ["This model has no head and gives no answers; what its features are worth, probes say below."]
    where = f"{scores.count:,} pictures of {printable(found.data)} (its split “{found.split}”)"
    if scores.top1 is None:
        return [f"Judged by {where}, each of which can show several classes."]
    right = round(scores.top1 * scores.count)
    most = max(scores.per_class, key=lambda one: one.count)
    return [
        f"Of {where}, the model named {right:,} rightly, {percent(scores.top1)}. Always saying "
        f"“{printable(most.name, 60)}”, the most frequent of the {len(found.classes):,} classes, would be "
        f"right for {percent(most.count / scores.count)}."
    ]


def headline(found: Evaluation) -> Iterator[tuple[str, str]]:
    """The numbers to see first."""
    scores = found.scores
    if scores is None:
        best = max(found.probes, key=lambda row: row.top1)
        words = " ".join(["right by the best probe:", best.probe, best.setting, f"on layer {best.layer}"])
        yield percent(best.top1), words
        return
    if scores.top1 is not None:
        low, high = wilson(round(scores.top1 * scores.count), scores.count)
        sure = f"95 % interval {100 * low:.1f} to {100 * high:.1f} %"
        yield percent(scores.top1), f"right (top-1), of {scores.count:,} pictures; {sure}"
    if scores.top5 is not None:
        yield percent(scores.top5), "have the right class among the model's five best (top-5)"
    if scores.mean_ap is not None:
        yield percent(scores.mean_ap), "mean average precision over the classes"
    if scores.exact is not None:
        yield percent(scores.exact), f"of {scores.count:,} pictures with every class right"
    if found.calibration is not None:
        yield percent(found.calibration.before), "how far its scores are off on average (ECE)"
    yield f"{scores.loss:.3f}", "loss (cross-entropy); 0 is right and sure of it"


# ---- the rest -------------------------------------------------------------------------------


def real(found: Evaluation) -> list[Section]:
    """Accuracy by the better labels of ImageNet, where they were given."""
    if found.real is None or found.scores is None or found.scores.top1 is None:
        return []
    rows = [
        ["by the data's own labels", percent(found.scores.top1), f"{found.scores.count:,}"],
        ["by the ReaL labels", percent(found.real.accuracy), f"{found.real.count:,}"],
    ]
    how = (
        "ImageNet-ReaL lists for each picture the classes that people saw in it; an answer is right if it "
        "is one of them. Pictures in which they saw none are left out."
    )
    table = Table("Right by either labels", ["labels", "right", "pictures"], rows)
    return [Section("By better labels", tables=[table], how_to_read=how)]


def probes(found: Evaluation) -> list[Section]:
    """What the features are worth without the head."""
    if not found.probes:
        return []
    rows = [
        [row.probe, row.setting, row.feature, row.layer, percent(row.top1), spread(row.spread)]
        for row in found.probes
    ]
    table = Table("Right, by probe", ["probe", "with", "feature", "layer", "right", "±"], rows, words=3)
    return [Section("What its features are worth", tables=[table], how_to_read=PROBES)]


def spread(found: float | None) -> str:
    return "" if found is None else percent(found)


def notes(found: Evaluation, more: Sequence[str] = ()) -> list[Section]:
    """Files that could not be read, and decisions on the way."""
    sections = []
    if found.corrupt:
        some = list(found.corrupt.items())[:CORRUPT]
        caption = f"{len(found.corrupt):,} could not be read and count for nothing"
        caption += f"; the first {len(some)}" if len(some) < len(found.corrupt) else ""
        table = Table(caption, ["picture", "why"], some, words=2)
        sections.append(Section("Pictures that could not be read", tables=[table]))
    points = list(dict.fromkeys([*more, *found.notes]))
    return [*sections, Section("Notes", points=points)] if points else sections


def measured(found: Evaluation, bundle: Bundle) -> Section:
    """How a picture became the model's input, and how the numbers were made."""
    c, spec = bundle.model.config, bundle.preprocess
    count = sum(parameter.numel() for parameter in bundle.model.parameters())
    where = f"{found.pictures:,} in {found.split} of {printable(found.data)}, {len(found.classes):,} classes"
    grid, patch = (" x ".join(map(str, sides)) for sides in (c.grid, c.patch_pixels))
    facts: list[tuple[str, object]] = [
        ("pictures", where),
        ("each picture", "; ".join(spec.describe()) if spec else "as it is"),
        ("the model", f"{count:,} parameters; {c.depth} layers of width {c.width} with {c.heads} heads each"),
        ("its patches", f"{grid}, of {patch} pixels each"),
        ("time", f"{found.seconds:.1f} s"),
    ]
    text = (
        "Every picture went through the model once, changed by nothing but the steps below. All numbers were "
        "computed in double precision from what came out, over all pictures at once."
    )
    return Section("How this was measured", [text], facts=facts)
