"""Images that wait to be decoded, and whose turn it is.

Two rules see to it that a client whose images are slow to decode waits itself, and the others do not wait
for it. Images are taken as they come, but each second of decoding that a connection has used, or an address,
puts its next image back by ten: behind a proxy all have one address. And a decode that takes longer than
QUICK is slow: one decoder is kept from slow ones while others wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from vitrail.serve.messages import Client

NEWCOMER = 5.0  # seconds that the first image of a connection is put back: nobody knows it yet
QUICK = 0.05  # seconds of a processor that suffice for most images: 6 megapixels of JPEG
WEIGHT = 10  # seconds that a second of decoding puts the next image back, and is remembered


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
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    timeout: asyncio.Timeout | None = field(default=None, repr=False)
    """While it runs; to reschedule this is to end it."""

    def is_suspect(self) -> bool:
        """Whether it is known to be slow, or its client's last image was."""
        return self.slow or bool(self.client.slow)


class Usage:
    """Decoding time that clients have used lately."""

    def __init__(self) -> None:
        self.until: dict[Hashable, float] = {}  # when all that a client has used is forgotten

    def of(self, client: Hashable, now: float) -> float:
        return max(0.0, self.until.get(client, 0.0) - now)

    def add(self, client: Hashable, seconds: float, now: float) -> None:
        self.until[client] = now + self.of(client, now) + WEIGHT * seconds
        self.until = {one: until for one, until in self.until.items() if until > now}


class DecodeQueue:
    """Jobs that wait, for so many decoders."""

    def __init__(self, decoders: int) -> None:
        self.most_slow = max(1, decoders - 1)
        self.jobs: list[Job] = []
        self.addresses, self.connections = Usage(), Usage()

    def put(self, job: Job) -> None:
        self.jobs.append(job)

    def discard(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def take(self, running: Collection[Job]) -> Job | None:
        """The next job that may run beside these."""
        full, now = sum(job.slow for job in running) >= self.most_slow, time.monotonic()

        def order(job: Job) -> float:
            client = job.client
            used = self.addresses.of(client.address, now) + self.connections.of(client, now)
            return job.arrived + used + (NEWCOMER if client.slow is None else 0)

        found = min((job for job in self.jobs if not (full and job.is_suspect())), key=order, default=None)
        if found:
            found.slow = found.is_suspect()
            self.jobs.remove(found)
        return found

    def to_postpone(self, running: Collection[Job]) -> Job | None:
        """The slow job that must make room for a quick one that waits: of those that have not before, the
        last to begin."""
        slow = [job for job in running if job.slow]
        if len(slow) <= self.most_slow or all(job.is_suspect() for job in self.jobs):
            return None
        able = (job for job in slow if job.timeout and not job.postponed)
        return max(able, key=lambda job: job.started, default=None)

    def ran(self, job: Job, seconds: float, finished: bool = True) -> None:
        """Count what a decode has used, and note what that says of its client."""
        now = time.monotonic()
        self.addresses.add(job.client.address, seconds, now)
        self.connections.add(job.client, seconds, now)
        if finished or seconds > QUICK:
            job.client.slow = seconds > QUICK
