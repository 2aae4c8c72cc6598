"""The queue in front of the model, and the loop of the thread that runs it.

All waiting images of a model form the next batch, at most `batch` of them; no image waits for a batch to fill
up. Jobs whose client has left or whose deadline has passed are dropped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vitrail.serve.messages import busy
from vitrail.serve.prometheus import Metrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.predict import Prediction, Predictor


class DeadlineExceeded(Exception):
    """The deadline of a request has passed."""


@dataclass(eq=False)
class ModelJob:
    """Pixels to predict, or a function to call in the model's thread."""

    work: NDArray[np.uint8] | Callable[[], Any]
    deadline: float
    """The deadline by time.monotonic, which is the event loop's clock too."""
    predictor: Predictor | None = None
    """The model to predict pixels with."""
    batch: int = 1
    """The most images of this model in a batch."""
    future: Future[Any] = field(default_factory=Future)

    @property
    def is_call(self) -> bool:
        return callable(self.work)


class Batcher:
    """The queue of the models, with a limited number of images in progress."""

    def __init__(self, capacity: int, metrics: Metrics) -> None:
        self.capacity, self.metrics = capacity, metrics
        self.in_progress = 0  # images; changed only by the event loop
        self.jobs: deque[ModelJob] = deque()
        self.arrived = threading.Condition()
        self.closed = False

    # ---- for the event loop -----------------------------------------------------------------

    def close(self) -> None:
        """End the loop in the model's thread."""
        with self.arrived:
            self.closed = True
            self.arrived.notify()

    def check_capacity(self, count: int = 1) -> None:
        """Raise an error if there is no room for so many images."""
        if self.in_progress + count > self.capacity:
            self.metrics.rejected.inc()
            raise busy(f"The server processes at most {self.capacity} images at once")

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve capacity, from before the images are decoded until their response."""
        self.check_capacity(count)
        self.in_progress += count
        try:
            yield
        finally:
            self.in_progress -= count

    def submit(
        self, pixels: NDArray[np.uint8], deadline: float, predictor: Predictor, batch: int
    ) -> asyncio.Future[Prediction]:
        """The prediction for an image. A job that is cancelled while it waits is dropped."""
        return self._enqueue(ModelJob(pixels, deadline, predictor, batch))

    def call(self, function: Callable[[], Any], deadline: float) -> asyncio.Future[Any]:
        """Call a function in the model's thread, on its own: hooks are not thread-safe."""
        return self._enqueue(ModelJob(function, deadline))

    def _enqueue(self, job: ModelJob) -> asyncio.Future[Any]:
        with self.arrived:
            self.jobs.append(job)
            self.arrived.notify()
        return asyncio.wrap_future(job.future)

    # ---- for the model's thread -------------------------------------------------------------

    def run(self, on_crash: Callable[[BaseException], object]) -> None:
        """Run the model in this thread until `close`; call `on_crash` if an error ends it earlier."""
        jobs: list[ModelJob] = []
        try:
            while jobs := self._take():
                if started := [job for job in jobs if self._start(job)]:
                    self._work(started)
        except BaseException as error:  # whatever ends this thread ends the server
            on_crash(error)
            for job in [*jobs, *self.jobs]:
                if not job.future.done():
                    job.future.set_exception(RuntimeError(type(error).__name__))

    def _take(self) -> list[ModelJob]:
        """Wait for the next batch: one call, or images of one model; empty when closed.

        The job that waits longest is in it. Images of its model may overtake those of other models, which
        would otherwise cut batches short, but no call.
        """
        with self.arrived:
            self.arrived.wait_for(lambda: self.jobs or self.closed)
            if self.closed:
                return []
            first = self.jobs[0]
            waiting = [first] if first.is_call else list(takewhile(lambda job: not job.is_call, self.jobs))
            batch = [job for job in waiting if job.predictor is first.predictor][: first.batch]
            taken = set(map(id, batch))
            self.jobs = deque(job for job in self.jobs if id(job) not in taken)
        return batch

    def _start(self, job: ModelJob) -> bool:
        """Whether a client still waits within its deadline; from here on the job cannot be cancelled."""
        active = job.future.set_running_or_notify_cancel()
        if active and job.deadline >= time.monotonic():
            return True
        if active:
            job.future.set_exception(DeadlineExceeded())
        self.metrics.dropped.inc()
        return False

    def _work(self, jobs: list[ModelJob]) -> None:
        """Run a batch. If it fails, each image is tried again on its own, so that only the bad ones fail."""
        start = time.perf_counter()
        try:
            results = _run(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
            else:
                for job in jobs:
                    self._work([job])
            return
        if not jobs[0].is_call:  # before the answers: who has one finds it counted
            self.metrics.forward.observe(time.perf_counter() - start)
            self.metrics.batches.observe(len(jobs))
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)


def _run(jobs: list[ModelJob]) -> list[Any]:
    first = jobs[0]
    if callable(first.work):
        return [first.work()]
    assert first.predictor is not None
    return list(first.predictor.predict_batch([("", job.work) for job in jobs]))  # type: ignore[misc]
