"""Tasks run ahead of their use, with results in order: by processes, by threads, or in the calling thread.

Threads fight for Python's interpreter lock: on 16 cores four of them decode as much as sixteen. Processes do
not, but take a second or two to start. `choose_workers` decides, and says why.

Both are a `ThreadPoolExecutor`: where processes do the work, its threads send it to them and wait.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from vitrail.base.errors import ConfigError
from vitrail.base.fields import as_integer
from vitrail.base.machine import usable_cores
from vitrail.images.worker_process import (
    LANES,
    Task,
    WorkerProcess,
    shared_memory_free,
    start_method,
    start_server,
)

__all__ = ["Task", "WorkerPlan", "Workers", "choose_workers"]

PREFETCH = 4  # tasks in hand for each process: one may be slow, and results come in order
CHUNK = 16  # images of a task for a process: enough that the messages between them do not count
MIN_IMAGES = 400  # below which processes take longer to start than they save
_THREADS = 2  # more hardly help
_MAX_AUTO = 32
MAX_WORKERS = 1024

T = TypeVar("T")
Kind = Literal["processes", "threads", "none"]


@dataclass(frozen=True)
class WorkerPlan:
    """How files are decoded, and why."""

    kind: Kind
    count: int
    why: str

    def __str__(self) -> str:
        many = self.count != 1
        what = {
            "processes": f"{self.count} worker process{'es' * many} ({start_method()})",
            "threads": f"{self.count} thread{'s' * many}",
            "none": "no workers",
        }[self.kind]
        return f"{what}; {self.why}" if self.why else what


def check_workers(value: Any) -> int | Literal["auto"]:
    """A number of workers, or "auto"."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    try:
        return as_integer("workers", value, 0, MAX_WORKERS)
    except ConfigError as error:
        raise ConfigError(str(error).replace("must be", 'must be "auto" or', 1)) from error


def choose_workers(
    requested: int | Literal["auto"], images: int, *, image_bytes: int = 0, busy: bool = False
) -> WorkerPlan:
    """How to decode a number of image files.

    Args:
        requested: a number of workers, or "auto" to choose by the cores that this process may use.
        image_bytes: the size of a decoded image, of which a task's must fit in shared memory for each worker.
        busy: whether the cores are busy with the model, too: it is computed on the CPU.
    """
    cores = usable_cores()
    if requested == 0:
        return WorkerPlan("none", 0, "files are decoded in the calling thread")
    auto = requested == "auto"
    count = min(_MAX_AUTO, cores // 4 if busy else cores) if requested == "auto" else requested
    threads = _THREADS if auto else count
    if auto and (cores <= _THREADS or count == 0):
        return WorkerPlan("threads", threads, f"{cores} core{'s' * (cores > 1)} for this process")
    if images < MIN_IMAGES:
        return WorkerPlan("threads", threads, f"fewer than {MIN_IMAGES} images")
    if why := _cannot_start():
        return WorkerPlan("threads", threads, why)
    free = shared_memory_free()
    needed = LANES * CHUNK * image_bytes  # for each worker
    if free is not None and needed * count > free:
        count = free // needed
        if count < 2:
            return WorkerPlan(
                "threads",
                threads,
                f"/dev/shm has only {free / 1e6:.0f} MB free (docker run --shm-size=2g gives more)",
            )
        return WorkerPlan("processes", count, f"as many as fit in /dev/shm ({free / 1e6:.0f} MB free)")
    return WorkerPlan("processes", count, f"{cores} cores" if auto else "")


def expect_files(requested: int | Literal["auto"], images: int) -> None:
    """Prepare for so many files to be decoded soon: worker processes import torch while a model is loaded."""
    if choose_workers(requested, images).kind == "processes":
        start_server()


def _cannot_start() -> str:
    """Why this process should not start others; empty if it may."""
    import torch.distributed as dist

    if multiprocessing.current_process().daemon:
        return "a daemonic process cannot start processes"
    ranked = dist.is_available() and dist.is_initialized()
    if multiprocessing.parent_process() is not None and not ranked:
        return "this is one of several worker processes itself"
    return ""


class Workers:
    """Runs tasks ahead of their use, for any number of callers, each with its results in order.

    Processes are started with the first task and reused until `close`; what they import is loaded before.

    Args:
        image_bytes: the size of an image: processes return a task's images in as much shared memory.
    """

    def __init__(self, plan: WorkerPlan, *, image_bytes: int = 0) -> None:
        self.plan, self.image_bytes = plan, image_bytes
        threads = plan.count * (LANES if plan.kind == "processes" else 1)
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._processes: list[WorkerProcess] = []
        self._idle: SimpleQueue[tuple[WorkerProcess, int]] = SimpleQueue()  # processes and their free lanes
        if plan.kind == "processes":
            start_server()

    @property
    def chunk(self) -> int:
        """How many images a task should have."""
        return CHUNK if self.plan.kind == "processes" else 1

    def map(self, tasks: Iterable[Task], ahead: int) -> Generator[list[Any]]:
        """The results of each task, in order.

        Args:
            ahead: tasks that threads finish before they are needed. Processes have `PREFETCH` each in hand.
        """
        if self._pool is None:
            yield from (task.run() for task in tasks)
        elif self.plan.kind == "threads":
            yield from take_ahead((self._pool.submit(task.run) for task in tasks), ahead)
        else:
            self._start_processes()
            futures = (self._pool.submit(self._run_in_process, task) for task in tasks)
            yield from take_ahead(futures, PREFETCH * self.plan.count)

    def close(self) -> None:
        """Stop without waiting for results that are no longer needed."""
        atexit.unregister(self.close)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()

    def _start_processes(self) -> None:
        if not self._processes:
            # Before multiprocessing's own exit function, which would wait: workers ignore its SIGTERM.
            atexit.register(self.close)
            self._processes = [WorkerProcess(CHUNK * self.image_bytes) for _ in range(self.plan.count)]
            for lane in range(LANES):
                for process in self._processes:
                    self._idle.put((process, lane))

    def _run_in_process(self, task: Task) -> list[Any]:
        process, lane = self._idle.get()  # there are as many lanes as threads
        try:
            return process.run(lane, task)
        finally:
            self._idle.put((process, lane))


def take_ahead(futures: Iterable[Future[T]], count: int) -> Generator[T]:
    """The results in order, each future taken from the iterator `count` futures before it is needed."""
    waiting: deque[Future[T]] = deque()
    try:
        for future in futures:
            waiting.append(future)
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def in_background(items: Generator[T], ahead: int) -> Generator[T]:
    """The items in order, taken by a thread of its own `ahead` items before they are needed."""
    end: Any = object()
    with closing(items), ThreadPoolExecutor(1) as pool:
        futures = (pool.submit(next, items, end) for _ in repeat(None))
        with closing(take_ahead(futures, ahead)) as taken:
            for item in taken:
                if item is end:
                    return
                yield item
