"""Images to pixels: which decoder gets which image, when a decode is ended, and what comes of that."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from vitrail.preprocess import Preprocess
from vitrail.serve.decode_process import Decoder, Ended, Template
from vitrail.serve.decode_queue import QUICK, DecodeQueue, Job
from vitrail.serve.messages import Client, Refusal
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.serve.decode_process import Pixels

STARTING = 60.0  # seconds for a process to be ready
PAUSE = 1.0  # seconds before another try where none could be started
ABANDONED = 0.2  # seconds for a decode to end by itself when its client has gone: most do


class DecodePool:
    """The decoders. Everything here runs on the event loop.

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
        self.most = settings.pixels * preprocess.channels  # bytes of an answer
        self.queue = DecodeQueue(settings.decoders)
        self.template: Template | None = None
        self.forking = asyncio.Lock()
        self.decoders: set[Decoder] = set()
        self.idle: list[Decoder] = []
        self.running: set[Job] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    # ---- for the routes ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start all processes; an error where that fails. Images may have come before, and wait."""
        for _ in range(self.settings.decoders):
            self.idle.append((await self.fork())[0])
            self.dispatch()

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
        if self.template:
            await self.template.end()
        for decoder in self.decoders:
            decoder.socket.close()

    # ---- jobs -------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Start what may run now. Where a quick image finds only slow ones at work, one makes room."""
        while self.idle and (job := self.queue.take(self.running)):
            self.running.add(job)
            task = asyncio.create_task(self.run(self.idle.pop(), job))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        if not self.idle and (job := self.queue.to_postpone(self.running)):
            job.postponed = True
            self.running.discard(job)
            end(job)

    async def run(self, decoder: Decoder, job: Job) -> None:
        """One decode, and what becomes of its process."""
        job.started = time.monotonic()
        watch, begin, ended = asyncio.create_task(self.watch(decoder, job)), decoder.seconds(), ""
        try:
            async with asyncio.timeout(None) as job.timeout:
                if not job.future.done():  # or its client has gone in the meantime
                    settle(job, await decoder.decode(job.data, self.most))
        except TimeoutError:
            ended = "abandoned" if job.future.done() else "postponed"
        except Ended as error:
            ended = "dead" if error.before else "crashed"
        watch.cancel()
        job.timeout = None
        self.running.discard(job)
        self.queue.ran(job, decoder.seconds() - begin, not ended)
        if ended:
            decoder = await self.replace(decoder, job, ended)
        self.idle.append(decoder)
        self.dispatch()

    async def watch(self, decoder: Decoder, job: Job) -> None:
        """Find out whether a decode is slow: by the processor's time, and on a busy machine by any clock."""
        end, latest = decoder.seconds() + QUICK, time.monotonic() + 4 * QUICK
        while (left := min(end - decoder.seconds(), latest - time.monotonic())) > 0:
            await asyncio.sleep(max(left, 0.005))
        job.slow = job.client.slow = True
        self.dispatch()

    # ---- processes --------------------------------------------------------------------------

    async def replace(self, decoder: Decoder, job: Job, ended: str) -> Decoder:
        """Another decoder for one that has ended or must; and what that means for its image."""
        decoder.socket.close()
        self.decoders.discard(decoder)
        pause = 0.0  # the first try may fail because the template has ended too
        while True:
            try:
                new, code = await self.fork(decoder, ended in ("crashed", "dead"))
                break
            except (OSError, Ended, TimeoutError):
                if pause:
                    self.log("decoders cannot be started: trying again")
                await asyncio.sleep(pause)
                pause = PAUSE
        if ended == "crashed" and code == -signal.SIGPROF:
            ended = "late"
            settle(job, too_slow(self.settings.decode_time))
        elif ended == "crashed" and job.crashes:
            settle(job, crashed())
        elif not job.future.done():
            job.crashes += ended == "crashed"  # one may be the fault of whoever else uses this machine
            self.queue.put(job)
        self.metrics.killed.add(ended)
        return new

    async def fork(self, old: Decoder | None = None, ended: bool = False) -> tuple[Decoder, int]:
        """A new decoder; and the exit code of the old one if it has ended, or 0 and it is killed."""
        async with self.forking, asyncio.timeout(STARTING):
            template = self.template = self.template or Template(self.setup)
            try:
                new, code = await template.fork(old, ended)
            except BaseException:  # one that did not answer may answer the next question with this answer
                self.template = None
                await template.end()
                raise
        self.decoders.add(new)
        return new, code


def end(job: Job, seconds: float = 0.0) -> None:
    """Let a decode that runs have no more than these seconds."""
    if job.timeout and not job.timeout.expired():
        job.timeout.reschedule(asyncio.get_running_loop().time() + seconds)


def settle(job: Job, found: Pixels | Refusal) -> None:
    if not job.future.done():
        job.future.set_result(found)


def too_slow(seconds: float) -> Refusal:
    message = f"The image took more than {seconds:g} seconds to decode; save it again in a simpler form."
    return Refusal(422, "slow_image", message)


def crashed() -> Refusal:
    return Refusal(422, "broken_picture", "The image made the decoder fail; save it again, or use another.")
