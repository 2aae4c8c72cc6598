"""The queue of images to decode, and its order.

Two rules make a client with slow images wait itself instead of delaying the others. Images are taken in the
order of arrival, but each second of decoding that a connection or an address has used delays its next image
by ten seconds (both are counted because clients behind a proxy share an address). And a decode that takes
longer than QUICK is slow: while others wait, one decoder is reserved for quick ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from vitrail.serve.messages import Client

NEW_CLIENT_DELAY = 5.0  # seconds by which the first image of a connection is delayed
QUICK = 0.05  # CPU seconds that suffice for most images, such as a JPEG of 6 megapixels
DELAY_FACTOR = 10  # seconds by which a second of decoding delays the next image


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


class RecentUsage:
    """The decoding time that clients have used recently."""

    def __init__(self) -> None:
        self.until: dict[Hashable, float] = {}  # when the usage of a client has decayed to zero

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
        self.addresses, self.connections = RecentUsage(), RecentUsage()

    def put(self, job: DecodeJob) -> None:
        self.jobs.append(job)

    def discard(self, job: DecodeJob) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def take(self, running: Collection[DecodeJob]) -> DecodeJob | None:
        """Remove and return the next job that may run beside the running ones."""
        full, now = sum(job.slow for job in running) >= self.max_slow, time.monotonic()

        def order(job: DecodeJob) -> float:
            client = job.client
            used = self.addresses.of(client.address, now) + self.connections.of(client, now)
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
        now = time.monotonic()
        self.addresses.add(job.client.address, seconds, now)
        self.connections.add(job.client, seconds, now)
        if finished or seconds > QUICK:
            job.client.slow = seconds > QUICK
