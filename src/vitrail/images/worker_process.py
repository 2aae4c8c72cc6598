"""One worker process, which runs the tasks that threads of this process send it.

A task holds all that it needs: workers import `vitrail.images` and torch, and neither a model nor the user's
script.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from vitrail.base.errors import VitrailError
from vitrail.images.decode import suppress_warnings

LANES = 2  # tasks that a worker process is sent at once: it runs one, and the other waits for it
_NAME = "vitrail-worker"
_PRELOAD = "vitrail.images.preload"
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP")  # sent to the whole group; the parent decides when to stop
_ADVICE = "use fewer workers, or none (0)"


class WorkerError(VitrailError):
    """A worker process that was killed, has crashed, or has no memory left."""


@dataclass(frozen=True)
class Task:
    """A function to call with each of several argument tuples. All of it is pickled."""

    function: Callable[..., Any]
    items: Sequence[tuple[Any, ...]]

    def run(self) -> list[Any]:
        with suppress_warnings():  # once for all items, because changing the filters takes time
            return [self.function(*item) for item in self.items]


class WorkerProcess:
    """A process with `LANES` connections, each for the tasks of one thread at a time.

    Args:
        block: bytes of shared memory for the arrays of a task's results; larger ones are sent through a pipe.
    """

    def __init__(self, block: int) -> None:
        context: Any = multiprocessing.get_context(start_method())
        _hide_main_module()
        # In files, if /dev/shm is too small.
        blocks = [context.RawArray("B", block) if block else bytearray() for _ in range(LANES)]
        pipes = [context.Pipe() for _ in range(LANES)]
        theirs = [other for _, other in pipes]
        self.lanes = [(own, memory) for (own, _), memory in zip(pipes, blocks, strict=True)]
        self.process = context.Process(target=_run_tasks, args=(theirs, blocks), name=_NAME, daemon=True)
        self.process.start()
        for other in theirs:
            other.close()

    def run(self, lane: int, task: Task) -> list[Any]:
        """Send a task, and wait for its results."""
        connection, memory = self.lanes[lane]
        try:
            connection.send(task)
            pickled, ends = connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise _failure(self.process.exitcode) from error
        # By NumPy, which lets other threads run while it copies.
        copy = np.frombuffer(memory, np.uint8, ends[-1]).copy() if ends[-1] else bytearray()
        results = pickle.loads(pickled, buffers=[copy[start:end] for start, end in pairwise(ends)])
        if isinstance(results, MemoryError):
            raise WorkerError(f"A worker process has no memory left to decode an image; {_ADVICE}.")
        if isinstance(results, Exception):
            raise results
        return list(results)

    def kill(self) -> None:
        """End the process; what it is doing is lost."""
        self.process.kill()
        self.process.join()


def _failure(code: int) -> WorkerError:
    """A sentence for the exit code of a process that has ended."""
    if code == -getattr(signal, "SIGBUS", 0):
        free = (shared_memory_free() or 0) / 1e6
        return WorkerError(
            f"Worker processes return images through shared memory, and /dev/shm is full ({free:.0f} MB are "
            f"free); make it larger (docker run --shm-size=2g), or {_ADVICE}."
        )
    if code == -getattr(signal, "SIGKILL", 0):
        return WorkerError(
            "A worker process that decodes images was killed (signal 9), most often because the machine has "
            f"run out of memory; {_ADVICE}."
        )
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return WorkerError(
        f"A worker process that decodes images has crashed ({how}); use no workers (0), or check the files "
        "with vitrail doctor."
    )


def start_method() -> str:
    """forkserver, or spawn where it does not exist. A plain fork is unsafe once torch has threads or CUDA."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_server() -> None:
    """Start the process that workers are forked from, without waiting until it has imported torch.

    The workers share the memory of what it imports.
    """
    if start_method() == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOAD])
        with _interrupts_blocked():
            forkserver.ensure_running()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Have the new process start with Ctrl-C blocked; this one gets it when the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _hide_main_module() -> None:
    """Have multiprocessing not tell workers, known by their names, which script is the main module.

    Tasks need nothing from it, and a worker that ran a script without `if __name__ == "__main__":` would
    start workers without end. Other processes are told as before.
    """
    complete = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = complete(name)
        return {key: data[key] for key in data if name != _NAME or not key.startswith("init_main")}

    spawn.get_preparation_data = get_preparation_data


def shared_memory_free() -> int | None:
    """The bytes that are free in /dev/shm; None where there is no such folder."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


# ---- in a worker ----------------------------------------------------------------------------


def _run_tasks(connections: list[Connection], blocks: list[Any]) -> None:
    """Run tasks, one after the other, until the parent ends or kills this process."""
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    exit_with_parent()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # a connection has ended
        while True:
            ready = wait(connections)
            for connection, block in zip(connections, blocks, strict=True):
                if connection in ready:
                    connection.send(_pickle(_run(connection.recv()), block))


def _run(task: Task) -> list[Any] | Exception:
    try:
        return task.run()
    except Exception as error:
        error.add_note(f"In a worker process:\n{traceback.format_exc()}")
        return error


def _pickle(results: Any, block: Any) -> tuple[bytes, list[int]]:
    """The pickled results without their arrays, and where each of these ends in the shared memory."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(results, protocol=5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    ends = [0, *accumulate(map(len, arrays))]
    if ends[-1] > len(block):
        return pickle.dumps(results), [0]
    for array, (start, end) in zip(arrays, pairwise(ends), strict=True):
        memoryview(block).cast("B")[start:end] = array
    return pickled, ends


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
