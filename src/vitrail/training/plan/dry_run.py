"""`vitrail train --dry-run`: the plan and the settings of a run that is not started."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitrail.base.errors import InputError
from vitrail.base.machine import is_out_of_memory
from vitrail.model.device import choose_device
from vitrail.training.build_model import build_trainer, fit_recipe
from vitrail.training.callbacks import Callback
from vitrail.training.loggers import check_loggers
from vitrail.training.parallel import init_process_group
from vitrail.training.plan.minutes import TimeBudget
from vitrail.training.plan.summary_of_plan import training_plan
from vitrail.training.plan.threads import choose_threads, use_threads
from vitrail.training.run import check_batch
from vitrail.training.run_directory import check_empty
from vitrail.training.session import out_of_memory
from vitrail.training.start import DEFAULT_RECIPE, new_setup, no_data
from vitrail.training.teacher import Teacher


def dry_run(
    data: str | None,
    *,
    out: Path,
    callback: Callback,
    classes: Path | None = None,
    recipe: str | None = None,
    from_: str | Path | None = None,
    teacher: str | Path | None = None,
    size: int | tuple[int, int] | None = None,
    minutes: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Report the plan of a new run, with all checks and messages of `train`, and write no file of it.

    Returns the settings by the names that --set takes, such as "lr" and "model.width".
    """
    if data is None:
        raise InputError(no_data(out, resume=False))
    budget = None if minutes is None else TimeBudget(minutes)
    setup = new_setup(
        data, classes, recipe or DEFAULT_RECIPE, from_, teacher, size, minutes, changes, callback
    )
    ranks, resolved = init_process_group(), setup.recipe
    compute = choose_device(resolved.train.precision, ranks.local_rank, resolved.train.device)
    check_batch(setup.dataset, resolved, compute, ranks)
    check_loggers(resolved.train.log)
    distiller = None
    if setup.teacher is not None:
        distiller = Teacher(setup.teacher, setup.dataset, resolved.model.channels, compute)
    check_empty(out, resume=False)
    rehearsed = None
    if budget is not None:
        resolved, rehearsed = fit_recipe(resolved, setup.dataset, budget, compute, ranks, distiller, callback)
    trainer = build_trainer(setup.dataset, resolved, setup.start, distiller, compute, ranks, callback)
    try:
        threads = rehearsed.threads if rehearsed else choose_threads(trainer, None)
        with use_threads(threads.count):
            trainer.choose_mode()
            seconds = rehearsed.seconds if rehearsed else None
            callback.on_plan(training_plan(trainer, threads, seconds))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(trainer) from error
        raise
    finally:
        trainer.workers.close()
    parts = {"model": asdict(resolved.model), "preprocess": asdict(resolved.preprocess)}
    return _flatten(asdict(resolved.train) | parts)


def _flatten(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings by names with a dot: augment.flip."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{field}": inner for field, inner in _flatten(value).items()}
        else:
            flat[name] = value
    return flat
