"""The report on a training run (report.html): training curves, and the evaluation of the best weights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.base.errors import printable
from vitrail.base.machine import format_bytes
from vitrail.evaluation.evaluate_model import Evaluation
from vitrail.images.formats.sources import Dataset
from vitrail.views import charts
from vitrail.views.evaluation_page import evaluation_sections, headline, lead, notes_sections, setup_section
from vitrail.views.html_page import Figure, Page, Section, Table, percent
from vitrail.weights.bundle.bundle import Bundle

REPORT_NAME = "report.html"

_CURVES = (
    "An epoch is one pass over the training set. Training loss and accuracy are measured during the epoch, "
    "on augmented images and often with dropout, so the validation results may well be better. If the "
    "validation loss rises while the training loss falls, the model is overfitting."
)
_FILES = {
    "best.safetensors": "the evaluated model, for vitrail.load",
    "last.safetensors": "the model after the last step",
    "fingerprint.npz": "the content keys of the training images",
    "metrics.jsonl": "metrics of every epoch",
    "config.json": "settings",
    "environment.json": "machine, versions, command",
    "log.txt": "log of the run",
    "checkpoints": "the state for resuming",
}


def run_page(out: Path, bundle: Bundle, dataset: Dataset, evaluation: Evaluation) -> Page:
    """Build the report on the run in `out`, with the evaluation of its best weights."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    config, environment = (
        json.loads((out / name).read_text()) for name in ("config.json", "environment.json")
    )
    return Page(
        title=f"Training on {printable(dataset.name)}",
        lead=[*lead(evaluation), describe_selection(rows, dataset)],
        headline=list(headline(evaluation)),
        sections=[
            _curve_section(rows, dataset),
            *evaluation_sections(evaluation, bundle, dataset.eval_split),
            *notes_sections(evaluation, [*dataset.notes, *_training_notes(rows)]),
            Section("Training run", facts=list(_facts(rows, config, environment, dataset))),
            setup_section(evaluation, bundle),
            Section("Files", tables=[_file_table(out)]),
            Section("All settings", listing=_settings(config), folded=True),
        ],
        command=command_line(environment),
    )


def row_score(row: Mapping[str, Any]) -> tuple[float, float]:
    """What the epochs of a run are ranked by: the validation accuracy, and for equal ones the lower loss.

    With few held-out images, many epochs have the same accuracy.
    """
    return row["val_accuracy"], -row["val_loss"]


def best_row(rows: Sequence[Mapping[str, Any]], dataset: Dataset) -> Mapping[str, Any]:
    """The metrics of the epoch whose weights are in best.safetensors: the best on val, or the last one."""
    evaluated = [row for row in rows if "val_accuracy" in row]
    return max(evaluated, key=row_score) if dataset.val else evaluated[-1]


def describe_selection(rows: Sequence[Mapping[str, Any]], dataset: Dataset) -> str:
    """Which epoch the weights are from, and whether they were selected on the evaluated images."""
    if not dataset.val:
        last = f"These are the weights of the last epoch, {rows[-1]['epoch']}"
        return f"{last}; the test set was not used to select them."
    best = best_row(rows, dataset)
    if sum("val_accuracy" in row for row in rows) == 1:
        return "The validation set was evaluated once, after the last epoch."
    return (
        f"These are the weights of epoch {best['epoch']} of {rows[-1]['epoch']}, the best on this validation "
        "set. This selection makes the accuracy slightly optimistic; expect a little less on new images."
    )


# ---- training -------------------------------------------------------------------------------


def _curve_section(rows: Sequence[Mapping[str, Any]], dataset: Dataset) -> Section:
    """Loss, accuracy and learning rate over epochs."""
    accuracy = "accuracy of single labels" if dataset.multilabel else "accuracy"
    first, last = rows[0], rows[-1]
    losses = {"loss": "training", "val_loss": "validation"}
    accuracies = {"accuracy": "training", "val_accuracy": "validation"}
    epochs = f"{last['epoch']} epoch{'s' * (last['epoch'] > 1)}"
    change = f"from {first['loss']:.3f} to {last['loss']:.3f} in {epochs}"
    final = f"validation {percent(last['val_accuracy'])}, training {percent(last['accuracy'])} at the end"
    figures = [
        Figure(charts.curve(rows, losses, "loss"), f"Loss over epochs: training loss {change}"),
        Figure(
            charts.curve(rows, accuracies, f"{accuracy}, %", percent=True), f"{accuracy} over epochs: {final}"
        ),
        Figure(charts.curve(rows, {"lr": "learning rate"}, "learning rate"), "Learning rate over epochs"),
    ]
    return Section("Training curves", [f"The training loss went {change}."], figures, how_to_read=_CURVES)


def _training_notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Skipped steps and unreadable files."""
    if steps := sum(row.get("skipped_steps", 0) for row in rows):
        yield f"{steps:,} step{'s were' if steps > 1 else ' was'} skipped: the gradient was not finite."
    if files := rows[-1].get("corrupt_files", 0):
        yield f"{files:,} training image{'s' * (files > 1)} could not be read; see log.txt."


# ---- settings and files ---------------------------------------------------------------------


def _facts(
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    dataset: Dataset,
) -> Iterator[tuple[str, object]]:
    train = config["train"]
    yield "training set", f"{len(dataset.train):,} images in {len(dataset.classes):,} classes"
    yield "validation set" if dataset.val else "test set", f"{len(dataset.eval_split):,} images"
    yield "steps", f"{rows[-1]['step']:,} in {rows[-1]['epoch']:,} epochs, batch size {train['batch']:,}"
    if seconds := sum(row.get("seconds", 0.0) for row in rows):
        yield "time", f"{seconds:,.0f} s" if seconds < 90 else f"{seconds / 60:,.0f} minutes"
    yield "optimizer", f"{train['optimizer']}, maximum learning rate {train['lr']:g}"
    start = config["start"]
    yield "initial weights", (start.get("source") or "from a file") if start.get("from_file") else "random"
    yield "seed", train["seed"]
    threads = (config.get("resolved") or environment).get("threads")
    gpu = environment.get("gpu") or f"no GPU, {threads} CPU thread{'s' * (threads != 1)}"
    yield "machine", f"{gpu}; {environment.get('system')}"
    versions = [f"{name} {environment.get(name)}" for name in ("vitrail", "torch", "python")]
    yield "versions", ", ".join(versions)


def command_line(environment: Mapping[str, Any]) -> str:
    """The command line of the run, with the program's name instead of its path."""
    words = [str(word) for word in environment.get("command") or []]
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def _file_table(out: Path) -> Table:
    """List the files in the run directory."""
    rows = []
    for name, contents in _FILES.items():
        if (path := out / name).exists():
            files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
            rows.append([name, contents, format_bytes(sum(file.stat().st_size for file in files))])
    return Table("Run directory", ["file", "contents", "size"], rows, text_columns=2)


def _settings(config: Mapping[str, Any]) -> list[str]:
    """config.json without the list of classes, which may be long."""
    data = {name: value for name, value in config["data"].items() if name != "classes"}
    return json.dumps({**config, "data": data}, indent=2).splitlines()
