"""Process pools for studies and labs, and the trials of a study, each run only once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Self, TypeVar

import torch

from vitrail.base.errors import FileError, InputError, option, printable
from vitrail.base.safe_files import PARTIAL, write_text
from vitrail.images.formats.sources import Dataset
from vitrail.images.worker_process import exit_with_parent
from vitrail.training.epoch import Diverged
from vitrail.training.plan.threads import use_threads
from vitrail.training.recipes.settings import Recipe
from vitrail.training.run_directory import check_same_run, describe_run
from vitrail.training.run_plan import plan_recipe
from vitrail.training.start import execute
from vitrail.weights.bundle.bundle import Bundle

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TrialTask:
    """A trial to run."""

    arm: str
    lr: float
    seed: int
    recipe: Recipe
    out: Path
    start: Bundle | None = None

    @property
    def record(self) -> Path:
        """The file beside the run directory with the result; it exists when the trial is finished."""
        return self.out.with_name(f"{self.out.name}.json")


@dataclass(frozen=True)
class Trial:
    """The result of one training run of a study; of one that diverged, the score is 0 and the loss None."""

    arm: str
    lr: float
    seed: int
    score: float
    """The held-out accuracy after the last epoch."""
    loss: float | None
    seconds: float
    """Since the run was last started or resumed."""


class ProcessPool:
    """A pool of single-threaded processes that stay alive between calls, so that each loads torch once.

    Results do not depend on the number of processes.
    """

    advice = (
        'In a script, use it below `if __name__ == "__main__":`; if memory ran out, close other programs or '
        "use less data."
    )

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The function's results for all items, in their order."""
        if self.processes == 1 or (self.pool is None and len(items) < 2):
            with one_thread():
                return [function(item) for item in items]
        if self.pool is None:
            if current_process().name != "MainProcess":  # a worker that imports an unguarded script
                raise self._failure("a worker process was about to start processes of its own")
            spawn = get_context("spawn")  # a fork would copy torch's threads in an undefined state
            self.pool = ProcessPoolExecutor(self.processes, spawn, _init_worker)
        # Everything a worker needs is sent with each item: large arguments to the initializer would block
        # the parent for ever if a worker died before reading them.
        try:
            futures = [self.pool.submit(function, item) for item in items]
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise self._failure("a worker process ended unexpectedly") from error

    def _failure(self, reason: str) -> InputError:
        return InputError(f"the work could not be done in several processes: {reason}. {self.advice}")


class StudyPool(ProcessPool):
    """The processes of a study."""

    advice = (
        'In a script, call study() below `if __name__ == "__main__":`, or use processes=1; if memory ran '
        "out, use fewer processes. Finished runs are kept."
    )

    def __init__(self, data: Dataset, processes: int) -> None:
        super().__init__(processes)
        self.data = data

    def run(self, tasks: Sequence[TrialTask]) -> list[Trial]:
        """The trials of all tasks, in their order; finished ones are read from their files."""
        trials = {task.out: _read_trial(task, self.data) for task in tasks}
        left = [task for task in tasks if trials[task.out] is None]
        done = self.map(partial(_run_trial, data=self.data), left)
        trials |= {task.out: trial for task, trial in zip(left, done, strict=True)}
        return [trial for task in tasks if (trial := trials[task.out]) is not None]


def map_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> list[Result]:
    """The function's results for all items, by a pool for this call only."""
    with ProcessPool(processes) as pool:
        return pool.map(function, items)


def check_folder(folder: Path, what: str, ours: Sequence[str]) -> None:
    """Refuse a folder with anything in it but the files of a study or sweep, or what a kill left."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    foreign = {name for name in names - {"runs", *ours} if not PARTIAL.fullmatch(name)}
    if foreign or (folder.exists() and not folder.is_dir()):
        reason = f"contains {printable(min(foreign))}" if foreign else "is a file"
        raise FileError(
            f"{option('out')} must be a new or empty folder, or a {what}'s, and {printable(folder)} {reason}."
        )


# ---- in a worker process --------------------------------------------------------------------


def _init_worker() -> None:
    """Use one thread, and never outlive the parent."""
    torch.set_num_threads(1)
    exit_with_parent()  # at any step: runs survive that, and are resumed


def _run_trial(task: TrialTask, data: Dataset) -> Trial:
    """Run or resume the training, and write the result."""
    start, score, loss = time.perf_counter(), 0.0, None
    with suppress(Diverged):
        plan = plan_recipe(data, task.recipe, task.start)
        last = execute(plan, task.out, resume=True).metrics[-1]
        score, loss = last["val_accuracy"], last["val_loss"]
    trial = Trial(task.arm, task.lr, task.seed, score, loss, round(time.perf_counter() - start, 3))
    write_text(task.record, json.dumps(asdict(trial), indent=2), overwrite=True)
    return trial


def _read_trial(task: TrialTask, data: Dataset) -> Trial | None:
    """The result of a finished trial; an error if the run directory has other settings."""
    if not task.record.exists():
        return None
    check_same_run(task.out / "config.json", describe_run(plan_recipe(data, task.recipe, task.start)))
    try:
        return Trial(**json.loads(task.record.read_text()))
    except (ValueError, TypeError):
        return None  # unreadable: the run directory has the result, too


def one_thread() -> AbstractContextManager[None]:
    """Run torch on one thread: the same order of additions on every machine."""
    return use_threads(1)
