"""A training run from start to finish: everything a run needs, wired together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, setting
from vitrail.base.summary import Summary
from vitrail.fast.lora import check_rank
from vitrail.images.formats.sources import Dataset
from vitrail.model.device import ComputeDevice, choose_device
from vitrail.model.model_memory import check_fits, training_bytes
from vitrail.training.build_model import build_trainer, fit_recipe
from vitrail.training.callbacks import Callback, NullCallback
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.data_fingerprint import run_fingerprint
from vitrail.training.log import LogFile
from vitrail.training.loggers import check_loggers
from vitrail.training.parallel import ProcessGroup, global_batch_size, init_process_group
from vitrail.training.plan.minutes import TimeBudget
from vitrail.training.plan.threads import choose_threads, use_threads
from vitrail.training.recipes.settings import Recipe
from vitrail.training.run_directory import Origin, prepare_run_directory, record_resolved
from vitrail.training.saved_run import read_config
from vitrail.training.session import TrainingSession
from vitrail.training.sharding import check_processes
from vitrail.training.teacher import Teacher
from vitrail.views.run_page import best_row
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.digest import bundle_digest
from vitrail.weights.load import load


@dataclass(frozen=True, repr=False)
class Run(Summary):
    """A finished run."""

    out: Path
    bundle: Bundle
    """The best weights: their EMA if there is one."""
    metrics: list[dict[str, Any]]
    """One row per epoch, as in metrics.jsonl."""
    best: Mapping[str, Any]
    """The row of the epoch whose weights are in `bundle` and best.safetensors."""

    def summary(self) -> dict[str, str]:
        """The run directory, and the accuracy of the best weights."""
        accuracy = f"{self.best['val_accuracy']:.2%} on {self.best['val_images']:,} held-out images"
        epochs = f"{self.best['epoch']} of {self.metrics[-1]['epoch']}"
        return {"run": str(self.out), "accuracy": accuracy, "best epoch": epochs}


def run_training(
    dataset: Dataset,
    recipe: Recipe,
    out: str | Path,
    *,
    start: Bundle | None = None,
    teacher: Bundle | None = None,
    resume: bool = False,
    request: Mapping[str, Any] | None = None,
    reuse: Mapping[str, Any] | None = None,
    budget: TimeBudget | None = None,
    callback: Callback | None = None,
) -> Run:
    """Train by a recipe, from the first step or from the newest checkpoint in `out`.

    Args:
        start: the weights to start from; not needed if there is a checkpoint.
        request: what the user asked for, for config.json (`describe_request`).
        reuse: what automatic settings were resolved to when the run started.
        budget: for a new run, the time that the number of epochs is reduced to fit.
    """
    ranks, out = init_process_group(), Path(out)
    log = LogFile(callback or NullCallback(), out / "log.txt", enabled=ranks.is_main)
    reuse = reuse or {}
    precision = reuse.get("precision", recipe.train.precision)
    compute = choose_device(precision, ranks.local_rank, recipe.train.device)
    check_batch(dataset, recipe, compute, ranks)  # before there is a folder
    check_loggers(recipe.train.log)
    distiller = None if teacher is None else Teacher(teacher, dataset, recipe.model.channels, compute)
    origin = _describe_origin(start, distiller, request)
    rehearsed = None
    if budget is not None and not (out / "config.json").exists():
        recipe, rehearsed = fit_recipe(recipe, dataset, budget, compute, ranks, distiller, log)
    with compute.current():  # environment.json has its name
        finished = prepare_run_directory(out, resume, recipe, dataset, origin, ranks, log)
    if finished:
        return _finished_run(out, dataset)
    log.open()
    recipe = replace(recipe, train=replace(recipe.train, compile=reuse.get("compile", recipe.train.compile)))
    trainer = build_trainer(dataset, recipe, start, distiller, compute, ranks, log)
    threads = rehearsed.threads if rehearsed else choose_threads(trainer, reuse.get("threads"))
    if ranks.is_main:
        record_resolved(out, {"precision": compute.precision, "threads": threads.count}, log)
    session = TrainingSession(trainer, CheckpointManager(out, recipe.train.keep, ranks), log, threads)
    session.planned_seconds = rehearsed.seconds if rehearsed else None
    session.start = read_config(out / "config.json")["start"]
    if recipe.train.fingerprint and ranks.is_main:  # which writes the files
        session.fingerprint = run_fingerprint(out, dataset, start, log)
    with compute.current(), use_threads(threads.count):
        if resume:
            session.resume()
        session.run()
    return Run(out, load(out / "best.safetensors"), session.history, best_row(session.history, dataset))


def _describe_origin(
    start: Bundle | None,
    teacher: Teacher | None,
    request: Mapping[str, Any] | None,
) -> Origin:
    from_file = start is not None or bool(request and request["from"])
    digests: dict[str, Any] = {"from_file": from_file, "teacher": teacher and teacher.digest}
    if start is not None:
        digests |= {"from_digest": bundle_digest(start), "license": start.card.license}
        digests["source"] = start.card.source
    return Origin(digests, request)


def check_batch(dataset: Dataset, recipe: Recipe, compute: ComputeDevice, ranks: ProcessGroup) -> None:
    """Check that the settings fit the data, and that a step fits in memory (GPUs raise their own error)."""
    if recipe.train.patience is not None and not dataset.val:
        raise ConfigError(
            "patience needs a validation set, and this data has only a test set, which must not decide when "
            "training stops; remove patience, or add a validation set."
        )
    batch = global_batch_size(dataset, recipe.train, ranks)
    check_processes(recipe.train, ranks)
    if recipe.train.tune == "lora":
        check_rank(recipe.model, recipe.train.lora_rank)
    if compute.device.type == "cpu":
        part = batch // ranks.count // recipe.train.accumulate
        advice = f"use a smaller image size, batch or model, or {setting('accumulate', 2)}"
        check_fits(training_bytes(recipe.model, part), recipe.model, part, "A training step", advice)


def _finished_run(out: Path, dataset: Dataset) -> Run:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Run(out, load(out / "best.safetensors"), rows, best_row(rows, dataset))
