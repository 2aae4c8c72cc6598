"""`vt.train`: train by a recipe, with changes to its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import InputError, printable
from vitrail.images.class_names import ClassNames
from vitrail.images.formats.pack_cache import cached_dataset
from vitrail.training.callbacks import Callback
from vitrail.training.console_lines import show_run
from vitrail.training.open_data import open_training_data
from vitrail.training.parallel import init_process_group
from vitrail.training.plan.batch_size import choose_batch
from vitrail.training.plan.rehearsal import fit_minutes
from vitrail.training.plan.threads import use_threads
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.report import write_report
from vitrail.training.resolve import AUTO_BATCH, resolve_distillation, resolve_recipe, run_context
from vitrail.training.run import Run, execute, open_session
from vitrail.training.run_directory import check_empty
from vitrail.training.run_plan import RunCall, RunPlan, plan_recipe, run_device
from vitrail.training.saved_run import call_to_resume, read_saved_run
from vitrail.training.signals import stop_early
from vitrail.weights.bundle.bundle import Bundle

if TYPE_CHECKING:
    from vitrail.training.run_plan import Data


def train(
    data: Data | None = None,
    *,
    out: str | Path,
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
        out: the run directory; it must be new or empty, unless `resume` is set.
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
    out = Path(out)
    saved = read_saved_run(out) if resume else None
    with stop_early(lambda: _how_to_go_on(out)), show_run(callback, verbose) as log:
        if saved is not None:
            plan = saved.plan(asked, log)
        elif data is not None:
            plan = new_plan(asked, log)
        else:
            raise InputError(_no_data(out, resume))
        if plan.recipe.train.cache:
            cached = cached_dataset(plan.data, plan.recipe.preprocess, log.on_message)
            plan = replace(plan, data=cached)
        run = execute(plan, out, resume=resume, callback=log)
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


def dry_run(data: str | None, *, out: Path, callback: Callback, **options: Any) -> dict[str, Any]:
    """Report the plan of a new run, with all checks and messages of `train`, and write no file of it.

    Returns the settings by the names that --set takes, such as "lr" and "model.width".

    Args:
        options: the other arguments of `train`.
    """
    if data is None:
        raise InputError(_no_data(out, resume=False))
    names = RunCall.__dataclass_fields__
    given = {name: options.pop(name) for name in list(options) if name in names}
    asked = RunCall(data=data, changes=options, **given)
    plan = new_plan(asked, callback)
    plan.check()
    check_empty(out, resume=False)
    plan = fit_minutes(plan, callback)
    session = open_session(plan, out, callback)
    with use_threads(session.threads.count), session.closing():
        session.show_plan()
    recipe = plan.recipe
    parts = {"model": asdict(recipe.model), "preprocess": asdict(recipe.preprocess)}
    return _flatten(asdict(recipe.train) | parts)


def _flatten(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings by names with a dot: augment.flip."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{field}": inner for field, inner in _flatten(value).items()}
        else:
            flat[name] = value
    return flat


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
