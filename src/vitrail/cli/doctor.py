"""`vitrail doctor`: check a data set for problems."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from vitrail.base.errors import printable
from vitrail.base.progress import ProgressBars
from vitrail.cli.option_values import parse_workers, refuse_given
from vitrail.cli.options import DATA, WORKERS, ModelOptions
from vitrail.cli.outputs import check_new_files, this_command

if TYPE_CHECKING:
    from vitrail.images.formats.sources import Dataset
    from vitrail.images.problems import DatasetReport
    from vitrail.weights.bundle.bundle import Bundle

_MAX_LINES = 5  # of each kind of finding; the JSON has all
_WIDTH = 80


def doctor(
    data: str = DATA,
    model: str | None = Option(
        None,
        "--model",
        metavar="MODEL",
        help="Count the images that this model was trained on, and compare all images by its features. "
        "DATA needs no training set then.",
    ),
    features: bool = Option(
        True,
        "--features/--no-features",
        help="With --model: run it to find near-duplicates, outliers and label errors; or only count.",
    ),
    html_file: Path | None = Option(
        None,
        "--html",
        help="With --model: save a page with the images that its features tell about to this new HTML file.",
    ),
    batch: int = Option(64, min=1, max=1_000_000, help="Images per forward pass of --model."),
    as_json: bool = Option(False, "--json", help="Print the complete report as JSON."),
    workers: str = WORKERS,
    *,
    opening: ModelOptions,
) -> None:
    """Check a data set: corrupt files, leaks between splits, classes.

    Every image is decoded; no file is changed. The exit code is 1 if something must be repaired: files
    that cannot be read or are skipped, the same image in two splits or with two labels, classes without
    training images or with almost the same name, and whatever training would refuse. Small classes,
    duplicates within a split and other files are only reported. It is 2 if the data cannot be opened.

    With --model, images that only look the same, images that are unlike all others and labels that are
    probably wrong are reported too. These are guesses: look at the images, on the page of --html, before you
    change anything.
    """
    if model is None or not features:
        how = "give --model as well" if model is None else "leave out --no-features"
        refuse_given(
            {"--html": html_file}, f"OPTION shows what a model's features tell about the data; {how}."
        )
        refuse_given(opening.named(), f"OPTION says how the model is loaded that computes features; {how}.")
    check_new_files({"--html": html_file})

    from vitrail.images.formats.sources import open_labeled
    from vitrail.images.problems import check_images, count_trained, open_for_check
    from vitrail.weights.bundle.bundle_header import stored_fingerprint
    from vitrail.weights.readers.folder import open_model

    fingerprint = None
    if model is not None:
        with open_model(model, offline=opening.offline) as files:  # its file alone
            fingerprint = stored_fingerprint(files)
    count = parse_workers(workers)
    with ProgressBars(enabled=not opening.quiet) as bars:
        bars("listing files", 0, None)
        if model is None:
            dataset, problems = open_for_check(data, bars)
        else:
            rows = partial(bars, "reading rows", total=None)
            dataset, problems = open_labeled(data, rows, need_readable=False), []
        report = check_images(dataset, count, bars)
        if fingerprint is not None:
            report.trained_on = count_trained(dataset, fingerprint, bars)
        if features and model is not None:
            bundle = opening.load(model, channels=dataset.channels)
            _compare(html_file, bundle, dataset, report, count, batch, bars)
    report.problems = problems
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        if model is not None:
            _print_wrapped(_trained_line(report, model))
        _show_report(report, notes=not opening.quiet)
        if html_file is not None:
            print(f"Page: {printable(html_file)}")
        elif report.near_leaks is not None and not opening.quiet:
            print("Add --html PAGE to see the images.")
    if report.has_faults:
        raise typer.Exit(1)


def _compare(
    page: Path | None,
    bundle: Bundle,
    data: Dataset,
    report: DatasetReport,
    workers: Any,
    batch: int,
    bars: ProgressBars,
) -> None:
    """Compare the images by a model's features: findings into the report, and a page if one is wanted."""
    from vitrail.evaluation.curation import add_findings, curate, embed_dataset
    from vitrail.views.curation_page import curation_page
    from vitrail.views.html_page import write_page

    total = sum(map(len, data.splits.values()))
    images = embed_dataset(
        bundle, data, workers=workers, batch=batch, progress=lambda done: bars("features", done, total)
    )
    found = curate(images)
    add_findings(report, found, images, data)
    if page is not None:
        write_page(page, curation_page(found, images, data, command=this_command()))


def _trained_line(report: DatasetReport, model: str) -> str:
    if report.trained_on is None:
        return (
            f"{printable(model)} does not record which images it was trained on; files that vitrail train "
            "writes do."
        )
    counts, total = report.trained_on, sum(report.images.values())
    parts = [f"{count:,} of {report.images[name]:,} in {name}" for name, count in counts.items()]
    detail = f": {', '.join(parts)}" if len(parts) > 1 else ""
    count = f"{sum(counts.values()):,}" if any(counts.values()) else "none"
    return f"The model was trained on {count} of these {total:,} images{detail}."


_Section = tuple[str, int, list[str]]
"""A kind of finding: its title, the number of findings, and lines for the first few."""


def _show_report(report: DatasetReport, *, notes: bool) -> None:
    counts = ", ".join(f"{count:,} in {name}" for name, count in report.images.items()) or "none"
    _print_wrapped(f"images: {counts}; {report.classes:,} class{'es' * (report.classes != 1)}")
    modes = ", ".join(f"{mode} {count:,}" for mode, count in report.modes.items()) or "none"
    _print_wrapped(f"color modes: {modes}")
    for note in report.notes if notes else []:
        _print_wrapped(printable(note, 400))
    findings = {
        "MUST BE REPAIRED": list(_faults(report)),
        "WORTH KNOWING": list(_remarks(report)),
        "GUESSES BY THE MODEL'S FEATURES": list(_guesses(report)),
    }
    for heading, sections in findings.items():
        if sections:
            print(f"\n{heading}")
        for title, total, lines in sections:
            print(f"{title} ({total:,}):")
            print("\n".join(lines))
    verdict = "Nothing must be repaired."
    if report.has_faults:
        kinds = len(findings["MUST BE REPAIRED"])
        verdict = f"{kinds} kind{'s' * (kinds > 1)} of problem must be repaired."
    print(f"\n{verdict}")


def _faults(report: DatasetReport) -> Iterator[_Section]:
    """Findings that make the exit code 1."""
    from vitrail.images.formats.folders import FAULTS

    if report.problems:
        lines = [line for text in report.problems for line in _wrap(printable(text, 600))]
        yield "training would refuse this data", len(report.problems), lines
    if report.corrupt:
        yield "cannot be read", len(report.corrupt), _group_by_reason(report.corrupt)
    yield from _list_groups("the same image in two splits", report.leaked)
    yield from _list_groups("the same image under two labels", report.conflicting_labels)
    yield from _list_names("classes without a training image", report.empty_classes.get("train"))
    title = "classes whose names differ only in case, blanks or separators"
    yield from _list_names(title, report.similar_classes)
    for kind, title in FAULTS.items():
        yield from _list_names(f"not read: {title}", report.skipped.get(kind))


def _remarks(report: DatasetReport) -> Iterator[_Section]:
    """Findings that may be intended."""
    from vitrail.images.formats.folders import HARMLESS

    yield from _list_groups("the same image twice", report.duplicates)
    for split, names in report.empty_classes.items():
        if split != "train":
            yield from _list_names(f"classes without an image in {split}", names)
    few = [f"{name}: {count}" for name, count in report.small_classes.items()]
    yield from _list_names("classes with few training images", few)
    yield from _list_names("very small images", report.small_images)
    for kind, title in HARMLESS.items():
        yield from _list_names(f"not read: {title}", report.skipped.get(kind))


def _guesses(report: DatasetReport) -> Iterator[_Section]:
    """What the features of a model tell; nothing if they were not computed."""
    if report.near_leaks is None:
        return
    yield from _list_groups("probably the same image in two splits", report.near_leaks)
    yield from _list_groups("probably the same image twice", report.near_duplicates or [])
    errors = report.label_errors or []
    lines = [f"{_short(one['image'])}: {one['label']}, or {one['suggested']}?" for one in errors]
    yield from _list_names("labels that may be wrong", lines)
    yield from _list_names("unlike all other images", [_short(name) for name in report.outliers or []])
    if not (report.near_leaks or report.near_duplicates or errors or report.outliers):
        yield "near-duplicates, labels that may be wrong, outliers", 0, ["  none found"]


# ---- lines of at most 80 columns ------------------------------------------------------------


def _print_wrapped(text: str) -> None:
    print(textwrap.fill(text, _WIDTH, subsequent_indent="  "))


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _short(name: str) -> str:
    """The name of an image without its split, if the name starts with that anyway: train: train/ant/1.png."""
    split, _, path = name.partition(": ")
    return path if path.startswith(f"{split}/") else name


def _list_names(title: str, names: Sequence[str] | None) -> Iterator[_Section]:
    if names:
        yield title, len(names), _first_names(names, "  ")


def _first_names(names: Sequence[str], indent: str) -> list[str]:
    """The first few names on one line, or one per line if they are long."""
    more = [f"and {len(names) - _MAX_LINES:,} more (--json has all)"] if len(names) > _MAX_LINES else []
    line = indent + " ".join([", ".join(names[:_MAX_LINES]), *more])
    if len(line) <= _WIDTH:
        return [line]
    lines = [indent + printable(name, _WIDTH - len(indent)) for name in names[:_MAX_LINES]]
    return lines + [indent + text for text in more]


def _list_groups(title: str, groups: list[list[str]]) -> Iterator[_Section]:
    """One line per group of equal images."""
    if groups:
        lines = []
        for names in groups[:_MAX_LINES]:
            more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
            room = (_WIDTH - len("   = ") - len(more)) // 2
            lines.append("  " + " = ".join(printable(_short(name), room) for name in names[:2]) + more)
        if len(groups) > _MAX_LINES:
            lines.append(f"  and {len(groups) - _MAX_LINES:,} more (--json has all)")
        yield title, len(groups), lines


def _group_by_reason(corrupt: dict[str, str]) -> list[str]:
    """Files that cannot be read, grouped by reason."""
    files = defaultdict(list)
    for name, reason in corrupt.items():
        files[reason].append(name)
    lines = []
    for reason, names in list(files.items())[:_MAX_LINES]:
        lines += [*_wrap(f"{len(names):,}: {reason}"), *_first_names(names, "    ")]
    if len(files) > _MAX_LINES:
        lines.append(f"  and {len(files) - _MAX_LINES:,} more reasons (--json has all)")
    return lines
