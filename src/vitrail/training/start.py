"""`vt.train`: train by a recipe, with changes to its settings."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import FileError, InputError, MissingExtra, VitrailError, option, printable
from vitrail.base.safe_files import DISK_FULL, run_folder
from vitrail.base.summary import Summary
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.images.classes import ClassNames
from vitrail.images.formats.pack_cache import cached_dataset
from vitrail.training.callbacks import Callback, Callbacks, LogFile
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.console_lines import show_run
from vitrail.training.open_data import open_training_data, run_fingerprint
from vitrail.training.parallel import init_process_group
from vitrail.training.plan.batch_size import choose_batch
from vitrail.training.plan.rehearsal import fit_minutes
from vitrail.training.plan.threads import choose_threads, use_threads
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.resolve import AUTO_BATCH, resolve_distillation, resolve_recipe, run_context
from vitrail.training.run_directory import (
    call_to_resume,
    check_empty,
    prepare_run_directory,
    read_saved_run,
)
from vitrail.training.run_plan import RunCall, RunPlan, plan_recipe, run_device
from vitrail.training.session import TrainingSession
from vitrail.training.signals import stop_early
from vitrail.training.trainer import Trainer
from vitrail.views.html_page import check_extras, write_page
from vitrail.views.run_page import REPORT_NAME, best_row, run_page
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.load import load

if TYPE_CHECKING:
    from vitrail.training.run_plan import Data


def train(
    data: Data | None = None,
    *,
    out: str | Path | None = None,
    classes: ClassNames | None = None,
    recipe: str | None = None,
    from_: str | Path | None = None,
    teacher: str | Path | Bundle | None = None,
    size: int | tuple[int, int] | None = None,
    minutes: float | None = None,
    resume: bool = False,
    report: bool = True,
    verbose: bool = True,
    callback: Callback | None = None,
    **changes: Any,
) -> Run:
    """Train a model on labelled images.

    The run is shown while it trains: in a notebook as a table and curves that are updated in place, at a
    terminal with a progress bar, elsewhere as lines of text. `verbose=False` shows nothing.

    Args:
        data: a folder of images, a table, an array file, "digits", or an open Dataset; a torch Dataset of
            (image, label), a pair of arrays (images, labels), or {"train": ..., "val": ...} of them, is read
            into memory. Not needed with `resume`.
        out: the run directory; it must be new or empty, unless `resume` is set. By default runs/NAME for data
            of that name, or runs/NAME-2 and so on.
        classes: names for numbered classes: a list, a mapping from class to name, or a file with one name
            per line or such JSON.
        recipe: the name of the recipe that all other settings come from; `vitrail train --recipes` lists
            them. "auto", the default, chooses by the data, the device and the number of epochs, and says why.
        from_: a weight file of any family to start from; its head is replaced if the classes differ. Some
            recipes have other defaults then (`auto` and `small`: tune="llrd", or "lora" for fewer than 32
            images, and 10 to 40 epochs).
        teacher: a model to distill from: what `vitrail.load` takes, or a Bundle. It must have the classes of
            the data. The field `distill` selects hard (the default) or soft distillation.
        size: the image size, one side or (H, W), of the model and its preprocessing. The position embedding
            of a weight file is resampled.
        minutes: a time budget for training and evaluation: the number of epochs is reduced until they fit, by
            a short rehearsal.
        resume: resume the run in `out` from its newest complete checkpoint. The run directory has the
            settings and knows its data; what is given again must be the same, except for more `epochs`,
            which extend the run, and data that has moved.
        report: at the end, evaluate the best weights and write `out`/report.html.
        verbose: show the run on standard output or in the notebook.
        callback: receives messages, the plan, progress and metrics as well, and may raise an exception to end
            the run (`vitrail.training.callbacks.Callback`).
        changes: fields of TrainConfig, such as epochs=10 or tune="lora" (batch="auto" is the largest that
            fits in memory); and model=, augment=, mixing= and preprocess= with a mapping of their fields.
            model= may also be a name, "Ti/16" or "S/16@128"; in a mapping the name is called "name":
            dict(name="Ti/16", depth=6). preprocess= may be the name of a published one, such as "deit".
    """
    asked = RunCall(
        data=data,
        classes=classes,
        recipe=recipe,
        from_=from_,
        teacher=teacher,
        size=size,
        minutes=minutes,
        changes=changes,
    )
    if resume and out is None:
        raise InputError("resume needs out, the run directory.")
    with run_folder(out, data) as folder:
        saved = read_saved_run(folder) if resume else None
        with stop_early(lambda: _how_to_go_on(folder)), show_run(callback, verbose) as log:
            if saved is not None:
                plan = saved.plan(asked, log)
            elif data is not None:
                plan = new_plan(asked, log)
            else:
                raise InputError(_no_data(folder, resume))
            if plan.recipe.train.cache:
                cached = cached_dataset(plan.data, plan.recipe.preprocess, log.on_message)
                plan = replace(plan, data=cached)
            run = execute(plan, folder, resume=resume, callback=log)
            if report:
                write_report(run.out, run.bundle, plan, log)
            return run


def new_plan(asked: RunCall, callback: Callback) -> RunPlan:
    """The plan of a new run: the data, and the settings of a recipe with the changes applied."""
    changes, name = asked.changes, asked.recipe or "auto"
    data = open_training_data(asked.data, asked.classes, changes, callback)
    where = TrainConfig(**{field: changes[field] for field in ("device", "precision") if field in changes})
    compute = run_device(where, init_process_group())
    gpu = compute.device.type == "cuda"

    def resolve(changes: Mapping[str, Any]) -> tuple[Recipe, Bundle | None]:
        context = run_context(changes, asked.from_, asked.size, asked.minutes, gpu)
        recipe, start = resolve_recipe(name, data, asked.from_, changes, asked.size, context=context)
        train = resolve_distillation(recipe.train, changes, asked.teacher is not None)
        return replace(recipe, train=train), start

    recipe, start = resolve(changes)
    request = replace(asked, recipe=name).as_json(data)
    plan = plan_recipe(data, recipe, start, asked.teacher, compute=compute, request=request)
    if changes.get("batch") == AUTO_BATCH:
        batch, note = choose_batch(plan)
        recipe, start = resolve({**changes, "batch": batch})
        plan = replace(plan, recipe=recipe, start=start).with_settings(note)
    return replace(plan, minutes=asked.minutes, since=asked.since)


def dry_run(data: str | None, *, out: Path | None, callback: Callback, **options: Any) -> dict[str, Any]:
    """Report the plan of a new run, with all checks and messages of `train`, and write no file of it.

    Returns the settings by the names that --set takes, such as "lr" and "model.width".

    Args:
        options: the other arguments of `train`.
    """
    if data is None:
        raise InputError(_no_data(out or Path("runs"), resume=False))
    names = RunCall.__dataclass_fields__
    given = {name: options.pop(name) for name in list(options) if name in names}
    asked = RunCall(data=data, changes=options, **given)
    plan = new_plan(asked, callback)
    plan.check()
    if out is not None:
        check_empty(out, resume=False)
    plan = fit_minutes(plan, callback)
    session = open_session(plan, out or Path("runs"), callback)
    with use_threads(session.threads.count), session.closing():
        session.show_plan()
    settings: dict[str, Any] = {}
    parts = {"model": asdict(plan.recipe.model), "preprocess": asdict(plan.recipe.preprocess)}
    for name, value in (asdict(plan.recipe.train) | parts).items():
        nested = (
            {f"{name}.{field}": inner for field, inner in value.items()} if isinstance(value, dict) else None
        )
        settings |= {name: value} if nested is None else nested
    return settings


def _how_to_go_on(out: Path) -> str:
    """What to do after a signal that came while nothing was trained."""
    if (out / "last.safetensors").exists():
        return f"the run is complete; if its report is missing, write it with: {call_to_resume(out)}"
    if (out / "config.json").exists():
        return f"no step was taken since the start; resume with: {call_to_resume(out)}"
    return "the run had not begun, and nothing was written; start it again."


def _no_data(out: Path, resume: bool) -> str:
    """The message for a run without data."""
    if not resume:
        return "training needs data: a folder of images, a .csv, .jsonl or .npz file, or the word digits."
    if (out / "config.json").exists():
        return f"{printable(out)} does not record its data; give the data and the run's settings again."
    return f"there is no run to resume in {printable(out)}; check the folder, or give data to start a run."


# ---- from a plan to a finished run ----------------------------------------------------------


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
    file = LogFile(out / "log.txt", enabled=plan.ranks.is_main)
    log = Callbacks(callback, file)
    plan.check()  # before there is a folder
    if not (out / "config.json").exists():
        plan = fit_minutes(plan, log)
    with plan.compute.current():  # environment.json has its name
        finished = prepare_run_directory(plan, out, resume, log)
    if not finished:
        file.open()
        session = open_session(plan, out, log)
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


# ---- the report -----------------------------------------------------------------------------


def write_report(out: Path, bundle: Bundle, plan: RunPlan, callback: Callback) -> None:
    """Evaluate the best weights and write report.html, unless it exists.

    A finished run does not fail because of its report: an error becomes a message. Only a full disk is
    raised, since more than the page may be missing then. All processes evaluate; the main one writes.
    """
    data, ranks = plan.data, plan.ranks
    try:
        missing = ranks.is_main and not (out / REPORT_NAME).exists()
        if missing:
            check_extras()
    except MissingExtra:
        callback.on_message("No report: install vitrail[inspect].")
        missing = False
    if not ranks.any(missing):
        return
    try:
        on_device = replace(bundle, model=copy.deepcopy(bundle.model).to(plan.compute.device))
        evaluation = evaluate(on_device, data, split="val" if data.val else "test")
        if ranks.is_main:
            write_page(out / REPORT_NAME, run_page(out, bundle, data, evaluation))
    except OSError as error:
        if error.errno in DISK_FULL:
            name, reason = printable(out / REPORT_NAME), printable(error.strerror)
            raise FileError(
                f"the report {name} could not be written: {reason}. The run itself is complete and saved. "
                f"Free some disk space, then write the report with {option('resume', True)}."
            ) from error
        where = f"{printable(error.filename)}: " if error.filename else ""
        callback.on_message(f"No report: {where}{printable(error.strerror or error)}.")
    except Exception as error:  # whatever it is, the run is finished
        reason = str(error) if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
        callback.on_message(f"No report: {printable(reason, 400)}")
