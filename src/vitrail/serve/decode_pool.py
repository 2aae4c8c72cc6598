"""The pool of decoder processes: whose image is next, which decode must stop, and what replaces a process.

Two rules make a client with slow images wait itself instead of delaying the others. Images are taken in the
order of arrival, but each second of decoding that a connection or an address has used delays its next image
by ten seconds (both are counted because clients behind a proxy share an address). And a decode that takes
longer than QUICK is slow: while others wait, one decoder is reserved for quick ones.

This file has the order, decode_process.py the sockets, decode_worker.py what runs at their other end.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vitrail.images.any_size import NativePreprocess
from vitrail.images.preprocess import Preprocess
from vitrail.serve.decode_process import DecoderProcess, ProcessEnded, Template
from vitrail.serve.messages import Client, HTTPError
from vitrail.serve.prometheus import Metrics
from vitrail.serve.server_settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.serve.decode_process import Pixels

NEW_CLIENT_DELAY = 5.0  # seconds by which the first image of a connection is delayed
QUICK = 0.05  # CPU seconds that suffice for most images, such as a JPEG of 6 megapixels
DELAY_FACTOR = 10  # seconds by which a second of decoding delays the next image
START_TIMEOUT = 60.0  # seconds for a process to start
RETRY = 1.0  # seconds before another attempt to start one
GRACE = 0.2  # seconds for a decode to finish after its client has left; most do


# ---- order --------------------------------------------------------------------------------------


@dataclass(eq=False)
class DecodeJob:
    """An image to decode."""

    data: memoryview
    client: Client
    future: asyncio.Future[Any]
    slow: bool = False
    postponed: bool = False
    """Whether it was slow and has been stopped for others once; this happens only once."""
    crashes: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    timeout: asyncio.Timeout | None = field(default=None, repr=False)
    """Set while it runs; rescheduling it stops the decode."""

    def is_suspect(self) -> bool:
        """Whether it is slow, or its client's last image was."""
        return self.slow or bool(self.client.slow)

    def stop(self, seconds: float = 0.0) -> None:
        """Stop it after this many seconds if it runs."""
        if self.timeout and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time() + seconds)

    def settle(self, result: Pixels | HTTPError) -> None:
        if not self.future.done():
            self.future.set_result(result)


class RecentUsage:
    """The decoding time that connections and addresses have used recently."""

    def __init__(self) -> None:
        self.until: dict[Hashable, float] = {}  # when the usage of each has decayed to zero

    def of(self, client: Hashable, now: float) -> float:
        return max(0.0, self.until.get(client, 0.0) - now)

    def add(self, client: Hashable, seconds: float, now: float) -> None:
        self.until[client] = now + self.of(client, now) + DELAY_FACTOR * seconds
        self.until = {one: until for one, until in self.until.items() if until > now}


class DecodeQueue:
    """The waiting jobs."""

    def __init__(self, decoders: int) -> None:
        self.max_slow = max(1, decoders - 1)
        self.jobs: list[DecodeJob] = []
        self.usage = RecentUsage()

    def take(self, running: Collection[DecodeJob]) -> DecodeJob | None:
        """Remove and return the next job that may run beside the running ones."""
        full, now = sum(job.slow for job in running) >= self.max_slow, time.monotonic()

        def order(job: DecodeJob) -> float:
            client = job.client
            used = self.usage.of(client.address, now) + self.usage.of(client, now)
            return job.arrived + used + (NEW_CLIENT_DELAY if client.slow is None else 0)

        chosen = min((job for job in self.jobs if not (full and job.is_suspect())), key=order, default=None)
        if chosen:
            chosen.slow = chosen.is_suspect()
            self.jobs.remove(chosen)
        return chosen

    def to_postpone(self, running: Collection[DecodeJob]) -> DecodeJob | None:
        """The slow job to stop for a quick one that waits: the last started that was not postponed before."""
        slow = [job for job in running if job.slow]
        if len(slow) <= self.max_slow or all(job.is_suspect() for job in self.jobs):
            return None
        candidates = (job for job in slow if job.timeout and not job.postponed)
        return max(candidates, key=lambda job: job.started, default=None)

    def record(self, job: DecodeJob, seconds: float, finished: bool = True) -> None:
        """Record the time of a decode, and whether its client is slow."""
        for user in (job.client.address, job.client):
            self.usage.add(user, seconds, time.monotonic())
        if finished or seconds > QUICK:
            job.client.slow = seconds > QUICK


# ---- processes ----------------------------------------------------------------------------------


class DecodePool:
    """The decoder processes. Everything here runs on the event loop.

    Args:
        full_size: whether images keep their own size.
        log: called with a line about processes that could not be started.
    """

    def __init__(
        self,
        preprocess: Preprocess,
        settings: ServeConfig,
        metrics: Metrics,
        *,
        full_size: bool,
        log: Callable[[str], None],
    ) -> None:
        self.settings, self.metrics, self.log = settings, metrics, log
        values, kind = asdict(preprocess), NativePreprocess if preprocess.keeps_shape else Preprocess
        self.setup = {
            "preprocess": {field.name: values[field.name] for field in fields(kind)},
            "full_size": full_size,
            "limits": {"pixels": settings.pixels, "side": settings.side, "memory": settings.decode_memory},
            "seconds": settings.decode_time,
        }
        self.max_bytes = settings.pixels * preprocess.channels  # of a result
        self.queue = DecodeQueue(settings.decoders)
        self.template: Template | None = None
        self.forking = asyncio.Lock()
        self.decoders: set[DecoderProcess] = set()
        self.idle: list[DecoderProcess] = []
        self.running: set[DecodeJob] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start all processes, or raise an error. Images that arrive earlier wait."""
        for _ in range(self.settings.decoders):
            self.idle.append((await self._fork())[0])
            self._dispatch()

    async def decode(self, data: memoryview, client: Client) -> Pixels:
        """uint8 pixels (H, W, C); raises HTTPError. Cancelling dequeues the image or stops it."""
        job = DecodeJob(data, client, asyncio.get_running_loop().create_future())
        self.queue.jobs.append(job)
        self._dispatch()
        try:
            result: Pixels | HTTPError = await job.future
        finally:
            if job in self.queue.jobs:
                self.queue.jobs.remove(job)
            if job.future.cancelled():
                job.stop(GRACE)
        if isinstance(result, HTTPError):
            raise result
        return result

    async def close(self) -> None:
        """End all processes. No request is waiting any more."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.template:
            await self.template.end()
        for decoder in self.decoders:
            decoder.socket.close()

    def _dispatch(self) -> None:
        """Start what may run now. If all decoders are slow and a quick image waits, postpone a slow one."""
        while self.idle and (job := self.queue.take(self.running)):
            self.running.add(job)
            task = asyncio.create_task(self._run(self.idle.pop(), job))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        if not self.idle and (job := self.queue.to_postpone(self.running)):
            job.postponed = True
            self.running.discard(job)
            job.stop()

    async def _run(self, decoder: DecoderProcess, job: DecodeJob) -> None:
        """Decode one image, and replace its process if that has ended."""
        job.started = time.monotonic()
        watch, start, ended = asyncio.create_task(self._watch(decoder, job)), decoder.seconds(), ""
        try:
            async with asyncio.timeout(None) as job.timeout:
                if not job.future.done():  # its client may have left in the meantime
                    job.settle(await decoder.decode(job.data, self.max_bytes))
        except TimeoutError:
            ended = "abandoned" if job.future.done() else "postponed"
        except ProcessEnded as error:
            ended = "dead" if error.before else "crashed"
        watch.cancel()
        job.timeout = None
        self.running.discard(job)
        self.queue.record(job, decoder.seconds() - start, not ended)
        if ended:
            decoder = await self._replace(decoder, job, ended)
        self.idle.append(decoder)
        self._dispatch()

    async def _watch(self, decoder: DecoderProcess, job: DecodeJob) -> None:
        """Mark a decode as slow, by its CPU time or, on a busy machine, by wall-clock time."""
        limit, latest = decoder.seconds() + QUICK, time.monotonic() + 4 * QUICK
        while (left := min(limit - decoder.seconds(), latest - time.monotonic())) > 0:
            await asyncio.sleep(max(left, 0.005))
        job.slow = job.client.slow = True
        self._dispatch()

    async def _replace(self, decoder: DecoderProcess, job: DecodeJob, ended: str) -> DecoderProcess:
        """Replace a decoder that has ended or must end, and fail or requeue its image."""
        decoder.socket.close()
        self.decoders.discard(decoder)
        pause = 0.0  # the first attempt may fail because the template has ended too
        while True:
            try:
                new, code = await self._fork(decoder, ended in ("crashed", "dead"))
                break
            except (OSError, ProcessEnded, TimeoutError):
                if pause:
                    self.log("cannot start decoder processes; retrying")
                await asyncio.sleep(pause)
                pause = RETRY
        if ended == "crashed" and code == -signal.SIGPROF:
            ended, limit = "late", f"{self.settings.decode_time:g} seconds"
            message = f"The image took more than {limit} to decode; save it in a simpler format."
            job.settle(HTTPError(422, "slow_image", message))
        elif ended == "crashed" and job.crashes:
            message = "The image crashed the decoder; save it again, or send another one."
            job.settle(HTTPError(422, "broken_image", message))
        elif not job.future.done():
            job.crashes += ended == "crashed"  # the first crash may be due to other load on this machine
            self.queue.jobs.append(job)
        self.metrics.killed.labels(ended).inc()
        return new

    async def _fork(
        self, old: DecoderProcess | None = None, ended: bool = False
    ) -> tuple[DecoderProcess, int]:
        """A new decoder, and the exit code of the old one, or 0 if it had to be killed."""
        async with self.forking, asyncio.timeout(START_TIMEOUT):
            template = self.template = self.template or Template(self.setup)
            try:
                new, code = await template.fork(old, ended)
            except BaseException:  # a late reply would be taken for the reply to the next request
                self.template = None
                await template.end()
                raise
        self.decoders.add(new)
        return new, code
