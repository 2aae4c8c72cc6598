"""`vt.train`: train by a recipe, with changes to its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import InputError, printable
from vitrail.fast.lora import check_rank
from vitrail.images.classes import ClassNames
from vitrail.images.formats.pack_cache import cached_dataset
from vitrail.images.formats.sources import Dataset
from vitrail.model.device import choose_device
from vitrail.training.callbacks import Callback
from vitrail.training.display import show_run
from vitrail.training.open_data import SPLIT_FIELDS, open_training_data
from vitrail.training.parallel import init_process_group
from vitrail.training.plan.batch_size import choose_batch
from vitrail.training.plan.minutes import TimeBudget
from vitrail.training.recipes.settings import Recipe
from vitrail.training.report import write_report
from vitrail.training.resolve import (
    AUTO_BATCH,
    named_fields,
    resolve_distillation,
    resolve_recipe,
    split_changes,
    with_size,
)
from vitrail.training.run import Run, run_training
from vitrail.training.saved_run import SavedRun, call_to_resume, describe_request, read_saved_run
from vitrail.training.signals import stop_early
from vitrail.training.teacher import Teacher
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.load import load

if TYPE_CHECKING:
    from torch.utils.data import Dataset as TorchDataset

    Arrays = tuple[Any, Any]  # images and labels
    Part = TorchDataset[Any] | Arrays
    Data = str | Path | Dataset | Part | Mapping[str, Part]

DEFAULT_RECIPE = "auto"


@dataclass(frozen=True)
class _Setup:
    """What a run needs, as it was asked for or as it was saved."""

    dataset: Dataset
    recipe: Recipe
    start: Bundle | None
    teacher: Bundle | None
    request: Mapping[str, Any]
    reuse: Mapping[str, Any]


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
    budget = None if minutes is None else TimeBudget(minutes)
    saved = read_saved_run(Path(out)) if resume else None
    with stop_early(lambda: _how_to_go_on(Path(out))), show_run(callback, verbose) as log:
        if saved is not None:
            saved.check_name("minutes", minutes)
            if minutes is not None and changes.get("epochs") == saved.request["changes"].get("epochs"):
                changes.pop("epochs", None)  # the same command again, not an extension
            setup = _saved_setup(saved, data, classes, recipe, from_, teacher, size, changes, log)
        elif data is not None:
            name = recipe or DEFAULT_RECIPE
            setup = new_setup(data, classes, name, from_, teacher, size, minutes, changes, log)
        else:
            raise InputError(no_data(Path(out), resume))
        return _run_setup(setup, Path(out), resume, budget, report, log)


def _run_setup(
    setup: _Setup, out: Path, resume: bool, budget: TimeBudget | None, report: bool, callback: Callback
) -> Run:
    """Train, and write the report."""
    if setup.recipe.train.cache:
        cached = cached_dataset(setup.dataset, setup.recipe.preprocess, callback.on_message)
        setup = replace(setup, dataset=cached)
    run = run_training(
        setup.dataset,
        setup.recipe,
        out,
        start=setup.start,
        teacher=setup.teacher,
        resume=resume,
        request=setup.request,
        reuse=setup.reuse,
        budget=budget,
        callback=callback,
    )
    if report:
        ranks = init_process_group()
        device = choose_device("auto", ranks.local_rank, setup.recipe.train.device).device
        write_report(run.out, run.bundle, setup.dataset, ranks, device, callback)
    return run


def new_setup(
    data: Data,
    classes: ClassNames | None,
    recipe: str,
    from_: str | Path | None,
    teacher: str | Path | Bundle | None,
    size: int | tuple[int, int] | None,
    minutes: float | None,
    changes: Mapping[str, Any],
    callback: Callback,
) -> _Setup:
    """The settings of a recipe with the changes applied, and the data."""
    dataset = open_training_data(data, classes, changes, callback)

    def resolve(changes: Mapping[str, Any]) -> tuple[Recipe, Bundle | None]:
        resolved, start = resolve_recipe(recipe, dataset, from_, changes, size, minutes)
        settings = resolve_distillation(resolved.train, changes, teacher is not None)
        return replace(resolved, train=settings), start

    resolved, start = resolve(changes)
    teacher_bundle = _load_teacher(teacher)  # after the settings are known to be right
    if changes.get("batch") == AUTO_BATCH:
        batch, note = _largest_batch(resolved, dataset, teacher_bundle)
        resolved, start = resolve({**changes, "batch": batch})
        resolved = replace(resolved, notes=(*resolved.notes, note))
    request = describe_request(data, recipe, from_, teacher, size, changes)
    request["minutes"] = minutes
    request["classes"] = None if classes is None else dataset.classes
    return _Setup(dataset, resolved, start, teacher_bundle, request, {})


def _largest_batch(recipe: Recipe, dataset: Dataset, teacher: Bundle | None) -> tuple[int, str]:
    """The largest batch of a run with these settings that fits in memory, and a sentence about it."""
    ranks = init_process_group()
    compute = choose_device(recipe.train.precision, ranks.local_rank, recipe.train.device)
    if recipe.train.tune == "lora":
        check_rank(recipe.model, recipe.train.lora_rank)
    distiller = None if teacher is None else Teacher(teacher, dataset, recipe.model.channels, compute)
    return choose_batch(recipe, dataset, distiller, compute, ranks)


def _saved_setup(
    saved: SavedRun,
    data: Data | None,
    classes: ClassNames | None,
    recipe: str | None,
    from_: str | Path | None,
    teacher: str | Path | Bundle | None,
    size: int | tuple[int, int] | None,
    changes: Mapping[str, Any],
    callback: Callback,
) -> _Setup:
    """The settings and the data of a run that is resumed; what is given again is checked."""
    saved.check_name("recipe", recipe)
    fields, model, nested, preprocess = split_changes(changes)
    saved.check_preprocess(preprocess)
    resolved = saved.with_changes(fields, named_fields(with_size(model, size)), nested)
    split = {name: getattr(resolved.train, name) for name in SPLIT_FIELDS}
    dataset = open_training_data(saved.locate("data") if data is None else data, classes, split, callback)
    if classes is None and saved.request.get("classes"):
        dataset = replace(dataset, classes=list(saved.request["classes"]))
    start = None
    if from_ is not None or (saved.request["from"] and not saved.has_checkpoint):
        asked = saved.request
        _, start = resolve_recipe(
            asked["recipe"], dataset, from_ or saved.locate("from"), asked["changes"], asked["size"]
        )
    if teacher is None and saved.request["teacher"]:
        teacher = saved.locate("teacher")
    request = saved.moved({"data": data, "from": from_, "teacher": teacher})
    return _Setup(dataset, resolved, start, _load_teacher(teacher), request, saved.reused(fields))


def _how_to_go_on(out: Path) -> str:
    """What to do after a signal that came while nothing was trained."""
    if (out / "last.safetensors").exists():
        return f"the run is complete; if its report is missing, write it with: {call_to_resume(out)}"
    if (out / "config.json").exists():
        return f"no step was taken since the start; resume with: {call_to_resume(out)}"
    return "the run had not begun, and nothing was written; start it again."


def _load_teacher(teacher: str | Path | Bundle | None) -> Bundle | None:
    return teacher if teacher is None or isinstance(teacher, Bundle) else load(teacher)


def no_data(out: Path, resume: bool) -> str:
    """The message for a run without data."""
    if not resume:
        return "training needs data: a folder of images, a .csv, .jsonl or .npz file, or the word digits."
    if (out / "config.json").exists():
        return f"{printable(out)} does not record its data; give the data and the run's settings again."
    return f"there is no run to resume in {printable(out)}; check the folder, or give data to start a run."
