"""Work done ahead of its use, with results in order: by processes, by threads, or in the calling thread.

Threads fight for Python's interpreter lock: on 16 cores four of them decode as much as sixteen. Processes do
not, but take a second or two to start. `choose_workers` decides, and says why.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Literal, TypeVar, cast

from vitrail.base.errors import ConfigError
from vitrail.base.fields import as_integer
from vitrail.base.machine import usable_cores
from vitrail.images.worker_process import (
    BLOCKS,
    PREFETCH,
    Results,
    Task,
    WorkerProcesses,
    shared_memory_free,
    start_method,
    start_server,
)

__all__ = ["Results", "Task", "WorkerPlan", "Workers", "choose_workers", "look_ahead", "submit"]

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
        image_bytes: the size of a decoded image, which must fit in shared memory a few hundred times.
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
    needed = BLOCKS * CHUNK * image_bytes  # for each worker
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


@dataclass(eq=False)
class _Stream:
    """Tasks of one caller that are under way, and results that it has not taken yet."""

    tasks: Iterator[Task]
    waiting: int = 0
    ready: deque[Results] = field(default_factory=deque)
    ended: bool = False


class Workers:
    """Runs tasks ahead of their use. Several streams share the workers, each with its results in order.

    Processes are started with the first task and reused until `close`; what they import is loaded before.

    Args:
        image_bytes: the size of a result, if all have the same one and are given to `release`: processes then
            return them in shared memory that is used again.
    """

    def __init__(self, plan: WorkerPlan, *, image_bytes: int = 0) -> None:
        self.plan, self.image_bytes = plan, image_bytes
        self._pool = ThreadPoolExecutor(plan.count) if plan.kind == "threads" else None
        self._processes: WorkerProcesses | None = None
        self._streams: list[_Stream] = []  # the one that started last comes first
        self._owners: deque[_Stream | None] = deque()  # of all tasks under way, in order

        if plan.kind == "processes":
            start_server()

    @property
    def chunk(self) -> int:
        """How many images a task should have."""
        return CHUNK if self.plan.kind == "processes" else 1

    def map(self, tasks: Iterable[Task], ahead: int) -> Generator[Results]:
        """The results of the tasks, in order.

        Args:
            ahead: tasks that threads finish before they are needed. Processes have `PREFETCH` each in hand.
        """
        if self.plan.kind == "processes":
            return self._map_in_processes(iter(tasks))
        futures = (submit(self._pool, _run_here, task) for task in tasks)
        return (future.result() for future in look_ahead(futures, ahead if self._pool else 0))

    def release(self, results: Results) -> None:
        """Let go of results that have been copied: the workers may use their memory again."""
        if self._processes is not None:
            self._processes.release(results)

    def close(self) -> None:
        """Stop without waiting for results that are no longer needed."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _map_in_processes(self, tasks: Iterator[Task]) -> Generator[Results]:
        stream = _Stream(tasks)
        self._streams.insert(0, stream)
        try:
            if self._processes is None:
                self._owners.clear()
                block = CHUNK * self.image_bytes
                self._processes = WorkerProcesses(self.plan.count, self._feed(), block=block)
            while True:
                while not stream.ready:
                    if stream.ended and not stream.waiting:
                        return
                    self._advance()
                yield stream.ready.popleft()
        finally:
            self._streams.remove(stream)

    def _feed(self) -> Iterator[Task | None]:
        """The next task, whenever a worker is free for one; None if no stream has any.

        The stream that started last comes first: training waits while an epoch is evaluated, and is
        prefetched again as soon as the evaluation has no more tasks.
        """
        while True:
            for stream in self._streams:
                if stream.ended or stream.waiting + len(stream.ready) > PREFETCH * self.plan.count:
                    continue
                task = next(stream.tasks, None)
                if task is not None:
                    stream.waiting += 1
                    self._owners.append(stream)
                    yield task
                    break
                stream.ended = True
            else:
                self._owners.append(None)
                yield None

    def _advance(self) -> None:
        """Take the oldest result, which makes room for another task."""
        assert self._processes is not None, "the workers are closed"
        results = self._processes.next()
        owner = self._owners.popleft()
        if owner is not None and results is not None:
            owner.waiting -= 1
            owner.ready.append(results)


def _run_here(task: Task) -> Results:
    found = task.run()
    return Results(found, [False] * len(found))


# ---- threads --------------------------------------------------------------------------------


def submit(pool: ThreadPoolExecutor | None, function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread of the pool; without a pool, at once."""
    if pool is not None:
        return pool.submit(function, *args)
    done: Future[T] = Future()
    try:
        done.set_result(function(*args))
    except Exception as error:
        done.set_exception(error)
    return done


def look_ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """The items in order, each taken from the iterator `count` items before it is needed.

    If taking an item submits work to a pool, that work is done in the meantime.
    """
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def in_background(items: Generator[T], ahead: int) -> Generator[T]:
    """The items in order, taken by a thread of its own until so many wait for the caller.

    The thread closes the generator, also if the caller stops early; an error in it is raised here.
    """
    ready: Queue[tuple[T | None, BaseException | None]] = Queue(ahead)
    stopped = Event()

    def take() -> None:
        last: BaseException | None = None
        try:
            with closing(items):
                for item in items:
                    if not _put(ready, (item, None), stopped):
                        return
        except BaseException as error:  # raised in the caller's thread
            last = error
        _put(ready, (None, last or StopIteration()), stopped)

    thread = Thread(target=take, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield cast(T, item)
    finally:
        stopped.set()
        thread.join()


def _put(ready: Queue[T], item: T, stopped: Event) -> bool:
    """Put an item into a queue as soon as there is room; False if nobody will take it."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.1)
        except Full:
            continue
        return True
    return False
