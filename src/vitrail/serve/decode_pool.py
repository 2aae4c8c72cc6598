"""The decoder processes: started, asked one image at a time, killed when a decode must end, and replaced.

One more process than may be at work is kept ready, so that a kill costs the next image nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.preprocess import Preprocess
from vitrail.serve.decode_queue import QUICK, DecodeQueue, Job
from vitrail.serve.decode_worker import ANSWER, LENGTH, PIXELS, READY, REFUSED
from vitrail.serve.messages import Client, Refusal
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import ServeConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

COMMAND = [sys.executable, "-P", "-c", "from vitrail.serve.decode_worker import main; main()"]
SECRETS = ("VITRAIL_TOKEN",)  # what decodes the images of strangers need not know
STARTING = 60.0  # seconds for a process to be ready
PAUSE = 1.0  # seconds before another try where one could not be started
ABANDONED = 0.2  # seconds to end by itself for a decode whose client has gone: a new process costs as much
LONGEST_REFUSAL = 4096  # bytes


class Ended(Exception):
    """The process has ended."""


class Worker:
    """A decoder process, and the socket to it. Where it says what it should not, it counts as ended."""

    def __init__(self, setup: dict[str, Any], most: int) -> None:
        self.most = most  # bytes of pixels
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        nowhere = subprocess.DEVNULL
        try:
            with theirs:
                self.process = subprocess.Popen(
                    COMMAND, stdin=theirs.fileno(), stdout=nowhere, stderr=nowhere, env=environment()
                )
        except OSError:
            self.socket.close()
            raise
        self.setup = json.dumps(setup | {"parent": os.getpid()}).encode()

    async def ready(self) -> None:
        await self.send(self.setup)
        if (await self.head())[0] != READY:
            raise Ended

    async def decode(self, data: memoryview | bytes) -> Pixels | Refusal:
        await self.send(data)
        kind, *shape = await self.head()
        if kind == PIXELS and 0 < shape[0] * shape[1] * shape[2] <= self.most:
            pixels = np.empty(shape, np.uint8)
            await self.receive(pixels.data.cast("B"))
            return pixels
        if kind == REFUSED and shape[0] <= LONGEST_REFUSAL:
            text = bytearray(shape[0])
            await self.receive(memoryview(text))
            return Refusal(**json.loads(text))
        raise Ended

    async def send(self, data: memoryview | bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.socket, LENGTH.pack(len(data)))
            await loop.sock_sendall(self.socket, data)
        except OSError:
            raise Ended from None

    async def head(self) -> tuple[int, ...]:
        head = bytearray(ANSWER.size)
        await self.receive(memoryview(head))
        return ANSWER.unpack(head)

    async def receive(self, view: memoryview) -> None:
        loop, found = asyncio.get_running_loop(), 0
        while found < len(view):
            try:
                part = await loop.sock_recv_into(self.socket, view[found:])
            except OSError:
                part = 0
            if not part:
                raise Ended
            found += part

    def seconds(self) -> float:
        """A clock that goes while the process computes; where the system has none, one that always goes."""
        try:
            return time.clock_gettime(
                (~self.process.pid << 3) | 2
            )  # as clock_getcpuclockid makes it on Linux
        except OSError:
            return time.monotonic()

    def kill(self) -> None:
        self.process.kill()
        self.socket.close()

    async def reaped(self) -> int:
        """Its exit code. After `kill`, or when its socket was closed: it takes no more than moments."""
        while (code := self.process.poll()) is None:
            await asyncio.sleep(0.005)
        return code


class DecodePool:
    """Images to pixels, in processes. Everything here runs on the event loop.

    Args:
        whole: whether images keep their own size.
        log: is told of processes that could not be started.
    """

    def __init__(
        self,
        preprocess: Preprocess,
        settings: ServeConfig,
        metrics: Metrics,
        *,
        whole: bool,
        log: Callable[[str], None],
    ) -> None:
        self.settings, self.metrics, self.log = settings, metrics, log
        plain = asdict(preprocess)
        self.setup = {
            "preprocess": {one.name: plain[one.name] for one in fields(Preprocess)},
            "whole": whole,
            "pixels": settings.pixels,
            "side": settings.side,
            "memory": settings.decode_memory,
            "seconds": settings.decode_time,
        }
        self.most = settings.pixels * preprocess.channels
        self.queue = DecodeQueue(settings.decoders)
        self.workers: set[Worker] = set()
        self.idle: list[Worker] = []
        self.running: set[Job] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    # ---- for the routes ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start all processes; an error where that fails. Images may have come before, and wait."""
        await asyncio.gather(*(self.add_worker() for _ in range(self.settings.decoders + 1)))

    async def decode(self, data: memoryview, client: Client) -> Pixels:
        """uint8 pixels (H, W, C), or a Refusal. Cancelled, it leaves the queue, or the decode is ended."""
        job = Job(data, client, asyncio.get_running_loop().create_future())
        self.queue.put(job)
        self.dispatch()
        try:
            found: Pixels | Refusal = await job.future
        finally:
            self.queue.discard(job)
            if job.future.cancelled():
                end(job, ABANDONED)
        if isinstance(found, Refusal):
            raise found
        return found

    async def close(self) -> None:
        """End every process. Nobody waits for an image any more."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for worker in self.workers:
            worker.kill()
        await asyncio.gather(*(worker.reaped() for worker in self.workers))

    # ---- jobs -------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Start what may run now. Where a quick image finds only slow ones at work, one makes room."""
        for worker in [worker for worker in self.idle if worker.process.poll() is not None]:
            self.idle.remove(worker)  # somebody has killed it
            self.begin(self.replace(worker))
        while self.idle:
            job = self.queue.take(self.running) if len(self.running) < self.settings.decoders else None
            if job:
                self.running.add(job)
                self.begin(self.run(self.idle.pop(), job))
            elif job := self.queue.to_postpone(self.running):
                job.postponed = True
                self.running.discard(job)
                end(job)
            else:
                return

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self, worker: Worker, job: Job) -> None:
        """One decode, and what becomes of its process."""
        job.started = time.monotonic()
        watch, begin, ended = asyncio.create_task(self.watch(worker, job)), worker.seconds(), ""
        try:
            async with asyncio.timeout(None) as job.timeout:
                if not job.future.done():  # or its client has gone in the meantime
                    settle(job, await worker.decode(job.data))
        except TimeoutError:
            ended = "abandoned" if job.future.done() else "postponed"
        except Ended:
            ended = "crashed"
        watch.cancel()
        job.timeout = None
        self.running.discard(job)
        self.queue.ran(job, worker.seconds() - begin)
        if ended:
            worker.kill()
        else:
            self.idle.append(worker)
        if ended == "postponed":
            self.queue.put(job)
        self.dispatch()
        if ended == "crashed":
            ended = self.verdict(job, await worker.reaped())
            self.dispatch()
        if ended:
            self.metrics.killed.add(ended)
            await self.replace(worker)

    async def watch(self, worker: Worker, job: Job) -> None:
        """Find out whether a decode is slow."""
        end = worker.seconds() + QUICK
        while (left := end - worker.seconds()) > 0:
            await asyncio.sleep(max(left, 0.01))
        job.slow = job.client.slow = True
        self.dispatch()

    def verdict(self, job: Job, code: int) -> str:
        """Why a decoder died over an image, by its exit code."""
        if code == -signal.SIGPROF:
            settle(job, too_slow(self.settings.decode_time))
            return "late"
        job.crashes += 1
        if job.crashes > 1:  # one may be the fault of whoever else uses this machine
            settle(job, crashed())
        elif not job.future.done():
            self.queue.put(job)
        return "crashed"

    # ---- processes --------------------------------------------------------------------------

    async def replace(self, worker: Worker) -> None:
        """Another process for one that has ended."""
        worker.kill()
        await worker.reaped()
        self.workers.discard(worker)
        while True:
            try:
                return await self.add_worker()
            except (OSError, Ended, TimeoutError):
                self.log("a decoder process could not be started: trying again")
                await asyncio.sleep(PAUSE)

    async def add_worker(self) -> None:
        worker = Worker(self.setup, self.most)
        self.workers.add(worker)
        try:
            async with asyncio.timeout(STARTING):
                await worker.ready()
        except (Ended, TimeoutError):
            worker.kill()
            await worker.reaped()
            self.workers.discard(worker)
            raise
        self.idle.append(worker)
        self.dispatch()


def end(job: Job, seconds: float = 0.0) -> None:
    """Let a decode that runs have no more than these seconds."""
    if job.timeout and not job.timeout.expired():
        job.timeout.reschedule(asyncio.get_running_loop().time() + seconds)


def settle(job: Job, found: Pixels | Refusal) -> None:
    if not job.future.done():
        job.future.set_result(found)


def environment() -> dict[str, str]:
    """That of this process, with its import path, one thread, and no secrets."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    path = os.pathsep.join(filter(None, sys.path))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def too_slow(seconds: float) -> Refusal:
    message = f"The image took more than {seconds:g} seconds to decode; save it again in a simpler form."
    return Refusal(422, "slow_image", message)


def crashed() -> Refusal:
    return Refusal(422, "broken_picture", "The image made the decoder fail; save it again, or use another.")
