"""report.html of a run: how it went, and what came of it, on pictures the model has not learned from."""

from __future__ import annotations

import copy
import errno
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.sources import Dataset
from vitrail.errors import FileError, MissingExtra, VitrailError, printable
from vitrail.evaluation.run import Evaluation, evaluate
from vitrail.report import charts
from vitrail.report.evaluation import headline, judged, lead, measured, notes
from vitrail.report.gallery import examples, mistakes
from vitrail.report.numbers import percent, size
from vitrail.report.page import Figure, Page, Section, Table, check_extras, write_page
from vitrail.training.listen import Listener
from vitrail.training.parallel import Ranks
from vitrail.weights.bundle import Bundle

NAME = "report.html"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

CURVES = (
    "An epoch is one time through all training pictures. These are judged while the model learns, often "
    "turned, cut or mixed to make it harder, so the held-out pictures may well do better. Where the held-out "
    "loss rises while the training loss falls, the model has begun to learn its pictures by heart."
)


def write_report(
    out: Path, bundle: Bundle, dataset: Dataset, ranks: Ranks, device: torch.device, say: Listener
) -> None:
    """Judge the best weights and write report.html, where there is none yet.

    A run that has trained for a week does not fail for want of a page: what is wrong becomes a note.
    Only a full disk is loud, since more than the page may be missing then. All processes judge
    together, and the first one writes.
    """
    try:
        missing = ranks.first and not (out / NAME).exists()
        if missing:
            check_extras()
    except MissingExtra:
        say.note("No report: install vitrail[inspect].")
        missing = False
    if not ranks.any(missing, device):
        return
    try:
        found = judge(bundle, dataset, device)
        if ranks.first:
            write_page(out / NAME, run_page(out, bundle, dataset, found))
    except OSError as error:
        if error.errno in FULL:
            raise FileError(
                "A report must be written whole; the run itself is finished and safe.",
                f"{printable(out / NAME)}: {printable(error.strerror)}",
                "Free some space, then write it with --resume.",
            ) from error
        where = f"{printable(error.filename)}: " if error.filename else ""
        say.note(f"No report: {where}{printable(error.strerror or error)}.")
    except Exception as error:  # whatever it is, the run is finished
        said = str(error) if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
        say.note(f"No report: {printable(said, 400)}")


def judge(bundle: Bundle, dataset: Dataset, device: torch.device) -> Evaluation:
    """The model on the pictures that were held out, where it was trained."""
    there = replace(bundle, model=copy.deepcopy(bundle.model).to(device))
    return evaluate(there, dataset, split="val" if dataset.val else "test")


def run_page(out: Path, bundle: Bundle, dataset: Dataset, evaluation: Evaluation) -> Page:
    """The page of the run in `out`.

    Args:
        bundle: the best weights.
        evaluation: these on the held-out pictures.
    """
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    config, environment = (
        json.loads((out / name).read_text()) for name in ("config.json", "environment.json")
    )
    split = dataset.held_out
    return Page(
        title=f"A model for {printable(dataset.name)}",
        lead=[*lead(evaluation), chosen(rows, dataset)],
        headline=list(headline(evaluation)),
        sections=[
            curves(rows),
            *mistakes(evaluation, bundle, split),
            *examples(evaluation, bundle, split),
            *judged(evaluation),
            *notes(evaluation, [*dataset.notes, *left_out(rows)]),
            Section("The run in numbers", facts=list(facts(rows, config, environment, dataset))),
            measured(evaluation, bundle),
            folder(out),
            settings(config),
        ],
        command=command(environment),
    )


def chosen(rows: Sequence[Mapping[str, Any]], dataset: Dataset) -> str:
    """Which epoch's weights these are, and whether the pictures that judge have chosen them."""
    if not dataset.val:
        return (
            f"These are the weights of the last epoch, {rows[-1]['epoch']}; the test pictures chose nothing."
        )
    judged = [row for row in rows if "val_accuracy" in row]
    best = max(judged, key=lambda row: row["val_accuracy"])
    if len(judged) == 1:
        return "The held-out pictures were judged once, after the last epoch."
    return (
        f"These are the weights of epoch {best['epoch']} of {rows[-1]['epoch']}, the best on these held-out "
        "pictures. That choice makes the number a little too kind: on new pictures, expect slightly less."
    )


# ---- how it went ----------------------------------------------------------------------------


def curves(rows: Sequence[Mapping[str, Any]]) -> Section:
    """Loss, accuracy and learning rate over epochs."""
    first, last = rows[0], rows[-1]
    losses = {"loss": "training", "val_loss": "held out"}
    shares = {"accuracy": "training", "val_accuracy": "held out"}
    fell = f"from {first['loss']:.3f} to {last['loss']:.3f} in {last['epoch']} epochs"
    rose = f"held out {percent(last['val_accuracy'])} at the end, training {percent(last['accuracy'])}"
    figures = [
        Figure(charts.curve(rows, losses, "loss"), f"Loss over epochs: the training loss went {fell}"),
        Figure(
            charts.curve(rows, shares, "right, in %", share=True), f"Share that is right over epochs: {rose}"
        ),
        Figure(charts.curve(rows, {"rate": "rate"}, "learning rate"), "The learning rate over epochs"),
    ]
    return Section("How it learned", [f"The training loss went {fell}."], figures, how_to_read=CURVES)


def left_out(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What training did without."""
    if steps := sum(row.get("left_out", 0) for row in rows):
        yield f"{steps:,} step{'s were' if steps > 1 else ' was'} left out: the gradient was no number."
    if files := rows[-1].get("corrupt", 0):
        yield f"{files:,} training picture{'s' * (files > 1)} could not be read; log.txt says more."


# ---- what it was ----------------------------------------------------------------------------


def facts(
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    dataset: Dataset,
) -> Iterator[tuple[str, object]]:
    train = config["train"]
    yield "learned from", f"{len(dataset.train):,} pictures in {len(dataset.classes):,} classes"
    yield "judged by", f"{len(dataset.held_out):,} others, which it never learned from"
    yield (
        "steps",
        f"{rows[-1]['step']:,} in {rows[-1]['epoch']:,} epochs, up to {train['batch']:,} pictures each",
    )
    yield "highest rate", f"{train['lr']:g}, with {train['optimizer']}"
    yield "began", "with the weights of a file" if config["start"].get("from_file") else "with random weights"
    yield "seed", train["seed"]
    gpu = environment.get("gpu") or f"no GPU, {environment.get('threads')} CPU threads"
    yield "machine", f"{gpu}; {environment.get('system')}"
    versions = [f"{name} {environment.get(name)}" for name in ("vitrail", "torch", "python")]
    yield "versions", ", ".join(versions)


def command(environment: Mapping[str, Any]) -> str:
    """What was typed, the program by its name alone."""
    words = [str(word) for word in environment.get("command") or []]
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def folder(out: Path) -> Section:
    """What lies beside this page."""
    about = {
        "best.safetensors": "the weights judged here: a whole model, for vitrail.load",
        "last.safetensors": "those of the last step",
        "metrics.jsonl": "the numbers of every epoch",
        "config.json": "the settings",
        "environment.json": "machine, versions, command",
        "log.txt": "what the run said",
        "checkpoints": "what --resume goes on from",
    }
    sizes = {name: total(out / name) for name in about if (out / name).exists()}
    rows = [[name, about[name], size(count)] for name, count in sizes.items()]
    return Section(
        "Beside this page", tables=[Table("The run's folder", ["file", "what it is", "size"], rows, 2)]
    )


def total(place: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = [p for p in place.rglob("*") if p.is_file()] if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files)


def settings(config: Mapping[str, Any]) -> Section:
    """config.json, without the list of classes, which may be long."""
    data = {name: value for name, value in config["data"].items() if name != "classes"}
    lines = json.dumps({**config, "data": data}, indent=2).splitlines()
    return Section("All settings", listing=lines, folded=True)
