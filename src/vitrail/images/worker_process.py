"""Worker processes that decode images: torch's DataLoader, one for as long as its owner needs it.

The DataLoader's dataset computes tasks, and its sampler is an endless iterator of them, so that its workers
serve any number of streams (training, evaluation) until they are closed. A task holds all that it needs:
workers import `vitrail.images` and torch, and neither a model nor the user's script.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import forkserver, spawn
from multiprocessing.connection import wait
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.base.errors import VitrailError
from vitrail.images.decode import suppress_warnings

PREFETCH = 4  # tasks that each worker has in hand: one may be slow, and results come in order
BLOCKS = PREFETCH + 2  # of shared memory for each worker: for those, and what is being copied into a batch
_PRELOAD = "vitrail.images.preload"
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP")  # sent to the whole group; the parent decides when to stop


class WorkerError(VitrailError):
    """Worker processes that cannot go on: one was killed, or there is no memory for its results."""


@dataclass(frozen=True)
class Task:
    """A function to call with each of several argument tuples. All of it is pickled."""

    function: Callable[..., Any]
    items: Sequence[tuple[Any, ...]]

    def run(self) -> list[Any]:
        with suppress_warnings():  # once for all items, because changing the filters takes time
            return [self.function(*item) for item in self.items]


@dataclass(frozen=True)
class Results:
    """The results of a task. Those of a process have their arrays in one block of shared memory."""

    values: list[Any]
    """Each result; the shape of one that is in the block."""
    in_memory: list[bool]
    memory: Tensor | None = None
    """(bytes,) uint8."""
    block: int | None = None
    """The number of the shared block that it is, which must be released to be used again."""

    def uniform(self) -> Tensor | None:
        """All results as one tensor (n, ...), without a copy, if they are arrays of one shape."""
        if self.memory is None or not all(self.in_memory) or len(set(self.values)) > 1:
            return None
        return self.memory.view(len(self.values), *self.values[0])

    def unpack(self, *, copy: bool = False) -> list[Any]:
        """The results; arrays in the shared memory, or copies of them that outlive its release."""
        unpacked, at = [], 0
        for value, in_memory in zip(self.values, self.in_memory, strict=True):
            if in_memory:
                assert self.memory is not None
                size = int(np.prod(value, dtype=np.int64))
                array = self.memory[at : at + size].view(value).numpy()
                unpacked.append(array.copy() if copy else array)
                at += size
            else:
                unpacked.append(value)
        return unpacked


def share_results(found: list[Any], blocks: Tensor | None = None, block: int | None = None) -> Results:
    """The results of a task, with all arrays (of uint8) in one block of shared memory.

    Args:
        blocks: (n, bytes), memory that is shared already; new memory takes a page fault for every 4 kB, and
            a connection between the processes to hand it over.
        block: which of them to use, if the arrays fit.
    """
    arrays = [isinstance(one, np.ndarray) for one in found]
    values = [one.shape if array else one for one, array in zip(found, arrays, strict=True)]
    if not any(arrays):
        return Results(values, arrays)
    size = sum(one.size for one, array in zip(found, arrays, strict=True) if array)
    fits = blocks is not None and block is not None and size <= blocks.shape[1]
    # Allocated here: an error in the queue's own thread would never reach the parent.
    memory = blocks[block] if fits else _shared(size)  # type: ignore[index]
    flat, at = memory.numpy(), 0
    for one, array in zip(found, arrays, strict=True):
        if array:
            flat[at : at + one.size] = one.reshape(-1)
            at += one.size
    return Results(values, arrays, None, block) if fits else Results(values, arrays, memory)


def _shared(size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))


# ---- in the parent --------------------------------------------------------------------------


class WorkerProcesses:
    """An endless DataLoader over tasks, and sentences for the ways in which its workers can fail.

    Args:
        tasks: an endless iterator; None is answered with None.
        block: bytes of shared memory to use again and again for the results of a task; 0 for none.
    """

    def __init__(self, count: int, tasks: Iterable[Task | None], *, block: int = 0) -> None:
        self.blocks = _shared(BLOCKS * count * block).view(-1, block) if block else None
        self.free = list(range(BLOCKS * count)) if block else []
        start_server()
        loader = DataLoader(
            _Tasks(self.blocks),
            batch_size=None,
            sampler=self._with_blocks(tasks),
            num_workers=count,
            collate_fn=_unchanged,
            prefetch_factor=PREFETCH,
            multiprocessing_context=_Context(),
            worker_init_fn=_init_worker,
            generator=torch.Generator(),  # not the global one: a run's random numbers stay its own
        )
        with _interrupts_blocked():
            self.results: Any = iter(loader)
        # Before multiprocessing's own exit function, which would wait for workers that ignore its SIGTERM.
        atexit.register(self.close)

    def next(self) -> Results | None:
        """The results of the oldest task."""
        try:
            results, unused = next(self.results)
        except (RuntimeError, MemoryError) as error:
            raise self._failure(error) from error
        if unused is not None:
            self.free.append(unused)
        if results is None or results.block is None:
            return results
        assert self.blocks is not None
        pairs = zip(results.values, results.in_memory, strict=True)
        size = sum(int(np.prod(shape, dtype=np.int64)) for shape, in_memory in pairs if in_memory)
        return replace(results, memory=self.blocks[results.block, :size])

    def release(self, results: Results) -> None:
        """Let the shared block of results that have been copied be used again."""
        if results.block is not None:
            self.free.append(results.block)

    def _with_blocks(self, tasks: Iterable[Task | None]) -> Iterator[tuple[Task | None, int | None]]:
        """Each task with a free block for its results, if there is one."""
        for task in tasks:
            yield task, self.free.pop() if task is not None and self.free else None

    def close(self) -> None:
        """End the workers; what they are doing is lost."""
        atexit.unregister(self.close)
        workers = self.results._workers
        self.results._shutdown_workers()  # deleting it is not enough: an error's traceback may hold it
        for worker in workers:
            if worker.is_alive():
                worker.kill()

    def _failure(self, error: Exception) -> Exception:
        """A sentence for a worker that has died, or has no memory; other errors stay what they are."""
        codes = {worker.exitcode for worker in self.results._workers} - {None, 0}
        advice = "use fewer workers, or none (0)"
        if -getattr(signal, "SIGBUS", 0) in codes or "shared memory" in str(error):
            free = shared_memory_free()
            return WorkerError(
                "Worker processes return images through shared memory, and /dev/shm is full "
                f"({(free or 0) / 1e6:.0f} MB are free); make it larger (docker run --shm-size=2g), or "
                f"{advice}."
            )
        if isinstance(error, MemoryError):
            return WorkerError(f"A worker process has no memory left to decode an image; {advice}.")
        if not codes:
            return error
        code = min(codes)
        if code == -signal.SIGKILL:
            return WorkerError(
                "A worker process that decodes images was killed (signal 9), most often because the machine "
                f"has run out of memory; {advice}."
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerError(
            f"A worker process that decodes images has crashed ({how}); use no workers (0), or "
            "check the files with vitrail doctor."
        )


def start_method() -> str:
    """forkserver, or spawn where it does not exist. A plain fork is unsafe once torch has threads or CUDA."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class _Spawn:
    """multiprocessing.spawn, but new processes are not told which script is the main module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(spawn, name)

    def get_preparation_data(self, name: str) -> dict[str, Any]:
        data = spawn.get_preparation_data(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main")}


@functools.cache
def _launcher() -> Any:
    """multiprocessing's class that launches a process, with `_Spawn` in place of the module it asks for data.

    Its method differs between systems and versions of Python, so it is given other globals rather than
    written again.
    """
    windows = sys.platform == "win32"
    kind = "spawn_win32" if windows else {"spawn": "spawn_posix"}.get(start_method(), start_method())
    popen, name = import_module(f"multiprocessing.popen_{kind}").Popen, "__init__" if windows else "_launch"
    launch = getattr(popen, name)
    launch = FunctionType(launch.__code__, {**launch.__globals__, "spawn": _Spawn()})
    return type("Popen", (popen,), {name: launch})


_MultiprocessingContext: Any = multiprocessing.get_context(start_method())


class _Process(_MultiprocessingContext.Process):  # type: ignore[misc]
    """A process that does not run the user's script again.

    Tasks need nothing from it, and a script without `if __name__ == "__main__":` would start processes
    without end.
    """

    @staticmethod
    def _Popen(process: Any) -> Any:
        return _launcher()(process)


class _Context(type(_MultiprocessingContext)):  # type: ignore[misc]
    """What the DataLoader starts its workers with."""

    Process = _Process


def start_server() -> None:
    """Start the process that workers are forked from, without waiting until it has imported torch.

    The workers share the memory of what it imports.
    """
    if start_method() == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOAD])
        with _interrupts_blocked():
            forkserver.ensure_running()


def shared_memory_free() -> int | None:
    """The bytes that are free in /dev/shm; None where there is no such folder."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Have the new processes start with Ctrl-C blocked; this one gets it when the block ends."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a worker ----------------------------------------------------------------------------


class _Tasks(Dataset[Any]):
    """The dataset: its indices are tasks with blocks for their results, and its items the results.

    An item is the results, and the block if they are not in it.
    """

    def __init__(self, blocks: Tensor | None) -> None:
        self.blocks = blocks

    def __getitem__(self, index: tuple[Task | None, int | None]) -> tuple[Results | None, int | None]:
        task, block = index
        results = None if task is None else share_results(task.run(), self.blocks, block)
        return results, None if results is not None and results.block is not None else block


def _unchanged(results: Any) -> Any:
    return results


def _init_worker(number: int) -> None:
    """Leave signals to the parent, and die with it. (torch has set the number of threads to one.)"""
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "SIGBUS"):
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # torch's handler prints; the parent has the words
    exit_with_parent()


def exit_with_parent() -> None:
    """End this process when the one that asked for it ends, however that happens.

    The fork server, which is its parent for the system, lives as long as any worker does.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
