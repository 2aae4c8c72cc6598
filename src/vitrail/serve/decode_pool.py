"""The pool of decoder processes: assign images, stop slow decodes, replace processes that ended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from vitrail.images.any_size import NativePreprocess
from vitrail.images.preprocess import Preprocess
from vitrail.serve.decode_process import DecoderProcess, ProcessEnded, Template
from vitrail.serve.decode_queue import QUICK, DecodeJob, DecodeQueue
from vitrail.serve.messages import Client, HTTPError
from vitrail.serve.prometheus import Metrics
from vitrail.serve.server_settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.serve.decode_process import Pixels

START_TIMEOUT = 60.0  # seconds for a process to start
RETRY = 1.0  # seconds before another attempt to start one
GRACE = 0.2  # seconds for a decode to finish after its client has left; most do


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
            "pixels": settings.pixels,
            "side": settings.side,
            "memory": settings.decode_memory,
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

    # ---- for the routes ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start all processes, or raise an error. Images that arrive earlier wait."""
        for _ in range(self.settings.decoders):
            self.idle.append((await self._fork())[0])
            self.dispatch()

    async def decode(self, data: memoryview, client: Client) -> Pixels:
        """uint8 pixels (H, W, C); raises HTTPError. Cancelling dequeues the image or stops it."""
        job = DecodeJob(data, client, asyncio.get_running_loop().create_future())
        self.queue.put(job)
        self.dispatch()
        try:
            result: Pixels | HTTPError = await job.future
        finally:
            self.queue.discard(job)
            if job.future.cancelled():
                _stop(job, GRACE)
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

    # ---- jobs -------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Start what may run now. If all decoders are slow and a quick image waits, postpone a slow one."""
        while self.idle and (job := self.queue.take(self.running)):
            self.running.add(job)
            task = asyncio.create_task(self._run(self.idle.pop(), job))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        if not self.idle and (job := self.queue.to_postpone(self.running)):
            job.postponed = True
            self.running.discard(job)
            _stop(job)

    async def _run(self, decoder: DecoderProcess, job: DecodeJob) -> None:
        """Decode one image, and replace its process if that has ended."""
        job.started = time.monotonic()
        watch, start, ended = asyncio.create_task(self._watch(decoder, job)), decoder.seconds(), ""
        try:
            async with asyncio.timeout(None) as job.timeout:
                if not job.future.done():  # its client may have left in the meantime
                    _settle(job, await decoder.decode(job.data, self.max_bytes))
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
        self.dispatch()

    async def _watch(self, decoder: DecoderProcess, job: DecodeJob) -> None:
        """Mark a decode as slow, by its CPU time or, on a busy machine, by wall-clock time."""
        limit, latest = decoder.seconds() + QUICK, time.monotonic() + 4 * QUICK
        while (left := min(limit - decoder.seconds(), latest - time.monotonic())) > 0:
            await asyncio.sleep(max(left, 0.005))
        job.slow = job.client.slow = True
        self.dispatch()

    # ---- processes --------------------------------------------------------------------------

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
            ended = "late"
            _settle(job, _too_slow(self.settings.decode_time))
        elif ended == "crashed" and job.crashes:
            _settle(job, _crashed())
        elif not job.future.done():
            job.crashes += ended == "crashed"  # the first crash may be due to other load on this machine
            self.queue.put(job)
        self.metrics.killed.add(ended)
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


def _stop(job: DecodeJob, seconds: float = 0.0) -> None:
    """Stop a running decode after this many seconds."""
    if job.timeout and not job.timeout.expired():
        job.timeout.reschedule(asyncio.get_running_loop().time() + seconds)


def _settle(job: DecodeJob, result: Pixels | HTTPError) -> None:
    if not job.future.done():
        job.future.set_result(result)


def _too_slow(seconds: float) -> HTTPError:
    message = f"The image took more than {seconds:g} seconds to decode; save it in a simpler format."
    return HTTPError(422, "slow_image", message)


def _crashed() -> HTTPError:
    return HTTPError(
        422, "broken_image", "The image crashed the decoder; save it again, or send another one."
    )
