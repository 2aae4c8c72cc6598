"""What waits for the model, and the one thread that the model runs in.

Whatever waits goes through the model together, at most `batch` at once; nobody waits for company. What has
lost its client or its time while it waited is not run at all.
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
from typing import TYPE_CHECKING, Any

from vitrail.serve.messages import busy
from vitrail.serve.metrics import Metrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.predict import Prediction, Predictor


class Expired(Exception):
    """There is no time left."""


@dataclass(eq=False)
class Job:
    """Levels that the model is to judge, or a function that is to be called in its thread."""

    work: NDArray[np.uint8] | Callable[[], Any]
    due: float
    """By time.monotonic, which is the event loop's clock too."""
    future: Future[Any] = field(default_factory=Future)

    @property
    def alone(self) -> bool:
        return callable(self.work)


class Batcher:
    """Places for pictures, a queue, and the model's thread."""

    def __init__(self, predictor: Predictor, *, places: int, batch: int, metrics: Metrics) -> None:
        self.predictor, self.places, self.batch, self.metrics = predictor, places, batch, metrics
        self.taken = 0  # places; only the event loop changes this
        self.jobs: deque[Job] = deque()
        self.arrived = threading.Condition()
        self.closed = False

    # ---- for the event loop -----------------------------------------------------------------

    def close(self) -> None:
        """Nothing will come any more: let the model's thread go."""
        with self.arrived:
            self.closed = True
            self.arrived.notify()

    def check_room(self, count: int = 1) -> None:
        if self.taken + count > self.places:
            self.metrics.rejected.add()
            raise busy(f"At most {self.places} pictures may be inside at once.", "more")

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """So many places, from before pictures are decoded until they are answered."""
        self.check_room(count)
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    def submit(self, levels: NDArray[np.uint8], due: float) -> asyncio.Future[Prediction]:
        """The model's answer. Cancelled while it waits, it leaves the queue."""
        return self.enter(Job(levels, due))

    def call(self, function: Callable[[], Any], due: float) -> asyncio.Future[Any]:
        """Something else that needs the model to itself: hooks are not for two threads."""
        return self.enter(Job(function, due))

    def enter(self, job: Job) -> asyncio.Future[Any]:
        with self.arrived:
            self.jobs.append(job)
            self.arrived.notify()
        return asyncio.wrap_future(job.future)

    # ---- for the model's thread -------------------------------------------------------------

    def run(self, died: Callable[[BaseException], object]) -> None:
        """Let this thread be the model's until `close`; should it end before, `died` is told why."""
        jobs: list[Job] = []
        try:
            while jobs := self.take():
                self.work([job for job in jobs if self.wanted(job)])
        except BaseException as error:  # whatever ends this thread ends the server
            died(error)
            for job in [*jobs, *self.jobs]:
                if not job.future.done():
                    job.future.set_exception(RuntimeError(type(error).__name__))

    def take(self) -> list[Job]:
        """What is next: one job that wants to be alone, or pictures up to the next of those; or the end."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.jobs or self.closed)
            if self.closed:
                return []
            some = [self.jobs.popleft()]
            while self.jobs and len(some) < self.batch and not (some[0].alone or self.jobs[0].alone):
                some.append(self.jobs.popleft())
        return some

    def wanted(self, job: Job) -> bool:
        """Whether somebody waits for it who has time to; from here on it cannot be cancelled."""
        waited_for = job.future.set_running_or_notify_cancel()
        if waited_for and job.due >= time.monotonic():
            return True
        if waited_for:
            job.future.set_exception(Expired())
        self.metrics.dropped.add()
        return False

    def work(self, jobs: list[Job]) -> None:
        """Where a batch fails, each of its pictures gets another try by itself: only the bad ones fail."""
        start = time.perf_counter()
        try:
            if not jobs:
                return
            answers = [jobs[0].work()] if jobs[0].alone else self.judge(jobs)  # type: ignore[operator]
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
            else:
                for job in jobs:
                    self.work([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(answer)
        if not jobs[0].alone:
            self.metrics.thinking.add(time.perf_counter() - start)
            self.metrics.batches.add(len(jobs))

    def judge(self, jobs: list[Job]) -> list[Prediction]:
        return list(self.predictor.answer([("", job.work) for job in jobs]))  # type: ignore[misc]
