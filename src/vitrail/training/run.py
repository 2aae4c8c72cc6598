"""Executes the plan of a run, from start to finish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.base.summary import Summary
from vitrail.training.callbacks import Callback, NullCallback
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.data_fingerprint import run_fingerprint
from vitrail.training.log import LogFile
from vitrail.training.plan.rehearsal import fit_minutes
from vitrail.training.plan.threads import choose_threads, use_threads
from vitrail.training.run_directory import prepare_run_directory
from vitrail.training.run_plan import RunPlan
from vitrail.training.saved_run import read_config
from vitrail.training.session import TrainingSession
from vitrail.training.trainer import Trainer
from vitrail.views.run_page import best_row
from vitrail.weights.bundle.bundle import Bundle
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


def execute(plan: RunPlan, out: Path, *, resume: bool = False, callback: Callback | None = None) -> Run:
    """Train by a plan, from the first step or from the newest checkpoint in `out`."""
    log = LogFile(callback or NullCallback(), out / "log.txt", enabled=plan.ranks.is_main)
    plan.check()  # before there is a folder
    if not (out / "config.json").exists():
        plan = fit_minutes(plan, log)
    with plan.compute.current():  # environment.json has its name
        finished = prepare_run_directory(plan, out, resume, log)
    if not finished:
        log.open()
        session = open_session(plan, out, log)
        session.start = read_config(out / "config.json")["start"]
        if plan.recipe.train.fingerprint and plan.ranks.is_main:  # which writes the files
            session.fingerprint = run_fingerprint(out, plan.data, plan.start, log)
        with plan.compute.current(), use_threads(session.threads.count):
            if resume:
                session.resume()
            session.run()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Run(out, load(out / "best.safetensors"), rows, best_row(rows, plan.data))


def open_session(plan: RunPlan, out: Path, log: Callback) -> TrainingSession:
    """The run at step 0; what was decided on the way is reported."""
    for note in plan.notes():
        log.on_message(note)
    trainer = Trainer(plan)
    trainer.on_message = log.on_message
    threads = plan.threads or choose_threads(trainer)
    return TrainingSession(trainer, CheckpointManager(out, plan.recipe.train.keep, plan.ranks), log, threads)
