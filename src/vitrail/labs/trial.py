"""The runs of labs and studies, one after the other or in processes of their own; a study's only once."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from vitrail.data.sources import Dataset
from vitrail.errors import InputError
from vitrail.training.checkpoint import replace_text
from vitrail.training.place import compare, describe
from vitrail.training.run import run
from vitrail.training.settings import Recipe
from vitrail.training.tally import Diverged

if TYPE_CHECKING:
    from vitrail.labs.lab import Size

Given = TypeVar("Given")
Got = TypeVar("Got")
START = {"from_file": False, "teacher": None}  # what a study's run begins with


@dataclass(frozen=True)
class Task:
    """A run to do."""

    arm: str
    rate: float
    seed: int
    chosen: Recipe
    place: Path
    """The run's folder."""

    @property
    def record(self) -> Path:
        """Beside the folder, what came out: with it, the run is finished."""
        return self.place.with_name(f"{self.place.name}.json")


@dataclass(frozen=True)
class Trial:
    """What came out of one run."""

    arm: str
    rate: float
    seed: int
    score: float
    """The share of the held-out pictures that it got right after the last epoch; 0 if it diverged."""
    loss: float | None
    """On the same pictures; None if it diverged."""
    seconds: float
    """Since it was last begun or gone on with."""


class Pool:
    """Processes with one thread each, that stay for all they are asked, so that torch is loaded once in each.

    What comes out does not depend on how many there are.
    """

    cure = (
        'In a script, begin below `if __name__ == "__main__":`; if memory ran out, end other programs or '
        "give less data."
    )

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def each(self, function: Callable[[Given], Got], given: Sequence[Given]) -> list[Got]:
        """What a function gives for each, in their order."""
        if self.processes == 1 or (self.pool is None and len(given) < 2):
            with one_thread():
                return [function(one) for one in given]
        if self.pool is None:
            if current_process().name != "MainProcess":  # a script's lines, run again by its own process
                raise self.lost("one that was about to start others itself")
            spawn = get_context("spawn")  # a fork would copy torch's threads, halfway through anything
            self.pool = ProcessPoolExecutor(self.processes, spawn, begin)
        # All that a process needs goes with each: handed over at the start, much of it would block the
        # parent for ever where a process does not come up to read it.
        try:
            waiting = [self.pool.submit(function, one) for one in given]
            return [one.result() for one in waiting]
        except BrokenProcessPool as error:
            raise self.lost("one that ended by itself") from error

    def lost(self, got: str) -> InputError:
        return InputError("Processes must be able to start and go on.", got, self.cure)


class Workers(Pool):
    """The processes of a study."""

    cure = (
        'In a script, call study() below `if __name__ == "__main__":`, or give processes=1; if memory ran '
        "out, give fewer processes. What is finished is kept."
    )

    def __init__(self, data: Dataset, processes: int) -> None:
        super().__init__(processes)
        self.data = data

    def run(self, tasks: Sequence[Task]) -> list[Trial]:
        """Every task's trial, in their order; those finished before are read."""
        known = {task.place: finished(task, self.data) for task in tasks}
        left = [task for task in tasks if known[task.place] is None]
        done = self.each(partial(work, data=self.data), left)
        known |= {task.place: trial for task, trial in zip(left, done, strict=True)}
        return [trial for task in tasks if (trial := known[task.place]) is not None]


def each(function: Callable[[Given], Got], given: Sequence[Given], processes: int) -> list[Got]:
    """The same with processes that go when it is done."""
    with Pool(processes) as pool:
        return pool.each(function, given)


def processes_for(size: Size) -> int:
    """How many runs of a lab there are at a time: as many as there are cores, up to 16."""
    return 1 if size == "small" else max(2, min(16, os.cpu_count() or 2))


# ---- in a process of its own ----------------------------------------------------------------


def begin() -> None:
    """What every process does first: one thread, and never outlive its parent."""
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)  # at any step: a run survives that, and is gone on with


def work(task: Task, data: Dataset) -> Trial:
    """Do the run, or go on with it, and write down what came out."""
    start = time.perf_counter()
    score, loss = 0.0, None
    try:
        last = run(data, task.chosen, task.place, resume=True).metrics[-1]
        score, loss = last["val_accuracy"], last["val_loss"]
    except Diverged:
        pass
    seconds = time.perf_counter() - start
    trial = Trial(task.arm, task.rate, task.seed, score, loss, round(seconds, 3))
    replace_text(task.record, json.dumps(asdict(trial), indent=2))
    return trial


def finished(task: Task, data: Dataset) -> Trial | None:
    """The trial of a run that is finished; a run with other settings in its place is an error."""
    if not task.record.exists():
        return None
    compare(task.place / "config.json", describe(task.chosen, data, START))
    try:
        return Trial(**json.loads(task.record.read_text()))
    except (ValueError, TypeError):
        return None  # not ours to read: the run's own folder says what came out


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in the same order on every machine, however many cores it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
