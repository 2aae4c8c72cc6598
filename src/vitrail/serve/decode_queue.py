"""Images that wait to be decoded, and whose turn it is.

Two rules see to it that a client whose images are slow to decode waits itself, and the others do not wait
for it. The next image is that of the client that has used the least decoding time lately, first by address
and then by connection: behind a proxy all have one address. And a decode that takes longer than QUICK is
slow: one decoder is kept from slow ones while others wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vitrail.serve.messages import Client

QUICK = 0.25  # seconds that suffice for most images: a photograph of 12 megapixels takes 0.15
MEMORY = 10  # seconds for which a second of decoding is remembered


@dataclass(eq=False)
class Job:
    """An image to decode."""

    data: memoryview
    client: Client
    future: asyncio.Future[Any]
    slow: bool = False
    postponed: bool = False
    """It was slow, and has made room for others once. It does not have to again."""
    crashes: int = 0
    started: float = 0.0
    timeout: asyncio.Timeout | None = field(default=None, repr=False)
    """While it runs; to reschedule this is to end it."""


class Usage:
    """Decoding time that clients have used lately."""

    def __init__(self) -> None:
        self.until: dict[Hashable, float] = {}  # when all that a client has used is forgotten

    def of(self, client: Hashable) -> float:
        return max(0.0, self.until.get(client, 0.0) - time.monotonic())

    def add(self, client: Hashable, seconds: float) -> None:
        now = time.monotonic()
        self.until[client] = now + self.of(client) + MEMORY * seconds
        self.until = {one: until for one, until in self.until.items() if until > now}


class DecodeQueue:
    """Jobs that wait, for so many decoders."""

    def __init__(self, decoders: int) -> None:
        self.most_slow = max(1, decoders - 1)
        self.jobs: list[Job] = []
        self.addresses, self.connections = Usage(), Usage()

    def put(self, job: Job) -> None:
        """A client whose last image was slow may well send another: this one counts as slow at once."""
        job.slow = job.slow or job.client.slow
        self.jobs.append(job)

    def discard(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def take(self, running: Iterable[Job]) -> Job | None:
        """The next job that may run beside these."""
        full = sum(job.slow for job in running) >= self.most_slow
        found = min((job for job in self.jobs if not (job.slow and full)), key=self.order, default=None)
        self.jobs = [job for job in self.jobs if job is not found]
        return found

    def order(self, job: Job) -> tuple[float, float]:
        return self.addresses.of(job.client.address), self.connections.of(job.client)

    def to_postpone(self, running: Iterable[Job]) -> Job | None:
        """The slow job that must make room for a quick one that waits: of those that have not before, the
        last to begin."""
        slow = [job for job in running if job.slow]
        if len(slow) <= self.most_slow or all(job.slow for job in self.jobs):
            return None
        able = (job for job in slow if job.timeout and not job.postponed)
        return max(able, key=lambda job: job.started, default=None)

    def ran(self, job: Job, seconds: float) -> None:
        """Count what a decode has used, however it ended."""
        self.addresses.add(job.client.address, seconds)
        self.connections.add(job.client, seconds)
        job.client.slow = seconds > QUICK
