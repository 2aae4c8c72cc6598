"""A run in progress: the trainer's epochs are evaluated, logged and saved, and a signal stops it."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vitrail.base.errors import ConfigError, VitrailError, option, setting
from vitrail.base.machine import is_out_of_memory
from vitrail.base.safe_files import write_text
from vitrail.images.fingerprint import Fingerprint
from vitrail.images.loader import CorruptFiles
from vitrail.model import ViT
from vitrail.model.config import format_sides
from vitrail.training.callbacks import Callback, Progress
from vitrail.training.checkpoint import Checkpoint, CheckpointManager
from vitrail.training.epoch import (
    complete_bundle,
    early_stop,
    evaluate_epoch,
    initial_scores,
    with_thresholds,
)
from vitrail.training.loggers import Loggers
from vitrail.training.parallel import LostProcess, is_lost_process
from vitrail.training.plan.batch_size import fitting_batch
from vitrail.training.plan.rehearsal import training_plan
from vitrail.training.plan.threads import CpuWait, Threads
from vitrail.training.run_directory import call_to_resume, explain_errors, read_config, record_resolved
from vitrail.training.signals import Interrupted, StopSignal
from vitrail.training.trainer import Trainer
from vitrail.views.run_page import best_row
from vitrail.weights.bundle.bundle import Bundle, Card
from vitrail.weights.load import load

_BUSY_SECONDS, _PLAN_SECONDS = 60.0, 1.0  # in which waiting for a core is measured, and before the first step
_REQUEST = 64  # images that are read at once where no step uses them


@dataclass
class TrainingSession:
    """The progress of a run: its history, and what happens when an epoch ends."""

    trainer: Trainer
    checkpoints: CheckpointManager
    log: Callback
    threads: Threads
    stop: StopSignal = field(default_factory=StopSignal)
    started: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    pending: bool = False
    """Whether the last epoch is over but not evaluated yet."""
    corrupt_eval: dict[str, str] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    busy: CpuWait | None = field(default_factory=CpuWait)
    """Watches for other processes; None once it has been said that there are some."""
    fingerprint: Fingerprint | None = None
    loggers: Loggers | None = None

    def run(self) -> None:
        """Train to the end. When a signal comes, save a checkpoint and raise Interrupted."""
        t, first = self.trainer, self.trainer.step
        # Of several processes, all must stop after the same step, even if the first one is still compiled.
        self.stop.has_progress = lambda: (
            self.started and (t.step > first or self.pending or t.ranks.count > 1)
        )
        with self.closing(), self.stop.handle(several=t.ranks.count > 1):  # also while it saves
            self.prepare()
            self.started = True
            try:
                if self.pending:  # stopped during evaluation
                    self.evaluate()
                t.run(self.end_epoch, self.on_progress, lambda: self.stop.number)
                self.finish()
            except Interrupted:
                self.checkpoints.save(self.checkpoint())
                self.checkpoints.wait()
                command = call_to_resume(self.checkpoints.out)
                self.log.on_message(f"Stopped at step {t.step:,} of {t.steps:,}; resume with: {command}")
                raise

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Explain errors of memory and of lost processes, and end workers, files and loggers."""
        t = self.trainer
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise out_of_memory(t) from error
            if t.ranks.count > 1 and is_lost_process(error):
                raise LostProcess from error
            raise
        finally:
            t.workers.close()
            self.checkpoints.close()
            if self.loggers is not None:
                self.loggers.close()

    def show_plan(self) -> None:
        """Choose how steps are computed, and show the plan."""
        self.trainer.choose_mode()
        self.log.on_plan(training_plan(self.trainer, self.threads))

    def prepare(self) -> None:
        """Show the plan, record what was chosen and start the loggers."""
        t = self.trainer
        self.show_plan()
        self.report_busy(_PLAN_SECONDS)
        if t.ranks.is_main:
            resolved = {"precision": t.compute.precision, "threads": self.threads.count}
            resolved |= {"compile": t.choose_mode().compile, "processes": t.ranks.count}
            if t.ranks.count > 1:
                resolved["parallel"] = t.parallel.mode
            record_resolved(self.checkpoints.out, resolved, self.log)
            rows = self.history[:-1] if self.pending else self.history  # those that are evaluated
            self.loggers = Loggers(t.settings.log, self.checkpoints.out, rows, self.log)
        t.clock.start(t.step)

    def on_progress(self, progress: Progress) -> None:
        self.log.on_progress(progress)
        self.report_busy(_BUSY_SECONDS)

    def report_busy(self, least: float) -> None:
        """Say once that the machine is busy, by what at least so many seconds show."""
        on_cpu = self.trainer.compute.device.type == "cpu"
        if self.busy and on_cpu and (text := self.busy.warning(least)):
            self.log.on_message(text)
            self.busy = None

    # ---- epochs -----------------------------------------------------------------------------

    def end_epoch(self, metrics: dict[str, Any]) -> None:
        t, speed = self.trainer, self.trainer.clock.end_training()
        if t.step == t.steps_per_epoch:
            self.read_unused()
            metrics["corrupt_files"] = len(t.corrupt.reasons)
        self.history.append({**metrics, "images_per_second": speed})
        self.pending = True
        self.evaluate()

    def read_unused(self) -> None:
        """Read the images of the first epoch's incomplete last batch, which no step uses.

        So a file that cannot be read is found in the first epoch, wherever it is in the order.
        """
        t, count = self.trainer, len(self.trainer.data.train)
        rest = torch.arange(min(t.steps_per_epoch * t.batch, count), count)
        if t.data.train.paths is None or not len(rest):
            return
        own = t.order(0)[rest][t.ranks.rank :: t.ranks.count]
        deque(t.reader(t.corrupt).batches((0, part) for part in own.split(_REQUEST)), maxlen=0)
        t.corrupt.reasons = t.ranks.union(t.corrupt.reasons)

    def evaluate(self) -> None:
        """Evaluate the last epoch, then write metrics, the best weights and a checkpoint, as configured."""
        t, s, row = self.trainer, self.trainer.settings, self.history[-1]
        last = row["epoch"] == s.epochs
        if row["epoch"] % s.evaluate_every == 0 or last:
            model = t.averaged_model
            corrupt = CorruptFiles(s.corrupt)
            row |= evaluate_epoch(
                model,
                t.data.eval_split,
                t.reading,
                t.compute,
                ranks=t.ranks,
                workers=t.workers,
                corrupt=corrupt,
                on_batch=self.check_stop,
            )
            self.corrupt_eval = corrupt.reasons
            t.clock.evaluated()
        why = early_stop(self.history, s.patience)
        t.stopped = why is not None
        row["time"], row["seconds"] = t.clock.end_epoch()
        row["seconds_left"] = 0.0 if t.stopped else round(t.seconds_left or 0.0, 1)
        if t.ranks.is_main:
            lines = "".join(json.dumps(one) + "\n" for one in self.history)
            with explain_errors(self.checkpoints.out):
                write_text(self.checkpoints.out / "metrics.jsonl", lines, overwrite=True)
            if self.loggers is not None:
                self.loggers.log(self.history)
            if t.data.val and "val_accuracy" in row and best_row(self.history, t.data) is row:
                self.checkpoints.save_best(self.bundle(model))
        self.report_corrupt_files(t.corrupt.reasons | self.corrupt_eval)
        self.log.on_epoch(row)
        self.pending = False
        if why is not None and not last:
            self.log.on_message(why)
        if row["epoch"] % s.save_every == 0 or last or t.stopped:
            self.checkpoints.save(self.checkpoint())

    def check_stop(self, done: int) -> None:
        """Stop between two batches; several processes would have to stop at the same batch."""
        if self.stop.number is not None and self.trainer.ranks.count == 1:
            raise Interrupted(self.stop.number)

    def report_corrupt_files(self, corrupt: dict[str, str]) -> None:
        """Name the files that could not be read, each once; or report how many there are so far."""
        new = {name: reason for name, reason in corrupt.items() if name not in self.reported}
        if self.trainer.settings.corrupt == "warn":
            for name, reason in new.items():
                self.log.on_message(f"{name} could not be read: {reason}")
        elif new:
            count = f"{len(corrupt):,} file{'s' * (len(corrupt) > 1)}"
            names = setting("corrupt", "warn")
            self.log.on_message(f"{count} could not be read so far; {names} names them.")
        self.reported |= set(new)

    # ---- checkpoints ------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        state = self.trainer.state()
        own = {"history": self.history, "pending": self.pending, "seconds": self.trainer.clock.epoch_seconds}
        return Checkpoint(state.step, state.tensors, {**own, **state.state})

    def resume(self) -> None:
        """Restore the newest complete checkpoint, if there is one."""
        checkpoint = self.checkpoints.restore_newest(self.log.on_message)
        if checkpoint is None:
            self.log.on_message("There is no complete checkpoint; training starts at step 0.")
            return
        self.trainer.restore(checkpoint)
        self.history, self.pending = list(checkpoint.state["history"]), bool(checkpoint.state["pending"])
        self.trainer.stopped = early_stop(self.history, self.trainer.settings.patience) is not None
        self.trainer.clock.epoch_seconds = float(checkpoint.state.get("seconds", 0.0))
        self.reported = set(self.trainer.corrupt.reasons)
        self.log.on_message(f"Resuming at step {checkpoint.step:,} of {self.trainer.steps:,}.")

    def bundle(self, model: ViT) -> Bundle:
        """A plain model (`Trainer.plain`) as a bundle."""
        t, start = self.trainer, read_config(self.checkpoints.out / "config.json")["start"]
        rows = [row for row in self.history if "val_accuracy" in row]
        card = Card(
            name=t.data.name,
            source=f"trained on {t.data.name}" + (f", from {start['source']}" if start.get("source") else ""),
            license=start.get("license", "unknown"),  # of the weights that it started from
            metrics={"accuracy": rows[-1]["val_accuracy"], "epoch": rows[-1]["epoch"]} if rows else {},
        )
        return Bundle(
            model=model,
            preprocess=t.preprocess,
            native={} if t.settings.native else None,
            labels=list(t.data.classes),
            scores=initial_scores(t.data, t.settings),
            card=card,
            fingerprint=self.fingerprint,
        )

    def finish(self) -> None:
        """Write last.safetensors, and best.safetensors anew: with all that a finished model's file holds."""
        t, out = self.trainer, self.checkpoints.out
        if not t.data.val:  # the test set must not select a model: the last weights it is
            bundle = self.bundle(t.averaged_model)
            if t.ranks.is_main:
                self.checkpoints.save_best(bundle)
        t.ranks.barrier()
        best, last = load(out / "best.safetensors"), self.bundle(t.plain(t.trained))
        weights = last.model.state_dict()
        same = all(torch.equal(one, weights[name].cpu()) for name, one in best.model.state_dict().items())
        best = complete_bundle(best, t.plan, t.workers, self.check_stop)
        if same:  # after a run without EMA that improved to the end
            last = replace(last, scores=best.scores, statistics=best.statistics)
        elif last.scores.thresholds is not None:
            last = with_thresholds(last, t.plan, t.workers, self.check_stop)
        self.checkpoints.wait()
        if t.ranks.is_main:
            self.checkpoints.save_best(best)
            self.checkpoints.save_last(last)
        t.ranks.barrier()


def out_of_memory(trainer: Trainer) -> VitrailError:
    s, size = trainer.settings, format_sides(trainer.preprocess.target)
    parts = f" in {s.accumulate} parts" if s.accumulate > 1 else ""
    processes = trainer.ranks.count
    part = trainer.batch // processes // s.accumulate
    fitting = fitting_batch(trainer.model.config, trainer.compute, part)
    accumulate = s.accumulate * 2 ** math.ceil(math.log2(part / fitting))
    return ConfigError(
        f"a step of {trainer.batch} images of {size}{parts} ({trainer.compute.dtype}) does not fit in the "
        f"device's memory. A batch of {fitting * processes * s.accumulate} should fit: use "
        f"{option('batch', fitting * processes * s.accumulate)}, or {setting('accumulate', accumulate)}, "
        "which computes the same in smaller parts."
    )
