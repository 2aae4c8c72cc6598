"""Clients for bench.serve: as many as wanted in one thread, over connections that stay."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = tuple[bytes, str]  # and its content type


@dataclass
class Seen:
    """What clients saw."""

    seconds: list[float] = field(default_factory=list)
    """Of every answer with status 200."""
    refused: list[float] = field(default_factory=list)
    """Seconds until each 503."""
    other: dict[int, int] = field(default_factory=dict)
    wrong: int = 0
    """Answers that were not this image's."""
    lost: int = 0
    """Requests that were sent whole and got no answer."""

    def add(self, other: Seen) -> None:
        self.seconds += other.seconds
        self.refused += other.refused
        self.wrong += other.wrong
        self.lost += other.lost
        for status, count in other.other.items():
            self.other[status] = self.other.get(status, 0) + count

    def latency(self, share: float) -> float:
        """A quantile, in milliseconds."""
        ordered = sorted(self.seconds)
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


class Client:
    """One connection, opened anew where it was closed."""

    def __init__(self, port: int, path: str) -> None:
        self.port, self.path = port, path
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: Body) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        data, kind = body
        writer.write(
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise
        lines = head.decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), answer

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


async def ask(client: Client, body: Body, seen: Seen, right: Callable[[Any], bool] | None = None) -> None:
    start = time.perf_counter()
    status, answer = await client.post(body)
    seconds = time.perf_counter() - start
    if status == 200:
        seen.seconds.append(seconds)
        seen.wrong += right is not None and not right(json.loads(answer))
    elif status == 503:
        seen.refused.append(seconds)
    else:
        seen.other[status] = seen.other.get(status, 0) + 1


async def closed(port: int, path: str, bodies: list[Body], clients: int, until: float) -> Seen:
    """Each client asks again when it has its answer, for so many seconds."""
    seen, end = Seen(), time.perf_counter() + until

    async def one(number: int) -> None:
        client = Client(port, path)
        n = number
        while time.perf_counter() < end:
            await ask(client, bodies[n % len(bodies)], seen)
            n += clients
        client.close()

    await asyncio.gather(*map(one, range(clients)))
    return seen


async def open_loop(port: int, path: str, bodies: list[Body], rate: float, until: float) -> Seen:
    """Requests come at random moments, so many a second on average, whether or not others are answered."""
    seen, chance, free, waiting = Seen(), random.Random(0), list[Client](), set[asyncio.Task[None]]()

    async def one(body: Body) -> None:
        client = free.pop() if free else Client(port, path)
        try:
            await ask(client, body, seen)
        except (OSError, asyncio.IncompleteReadError):
            seen.lost += 1
        free.append(client)

    start = moment = time.perf_counter()
    n = 0
    while moment < start + until:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        task = asyncio.create_task(one(bodies[n % len(bodies)]))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        moment += chance.expovariate(rate)
        n += 1
    await asyncio.gather(*waiting)
    for client in free:
        client.close()
    return seen


async def until_gone(port: int, path: str, bodies: list[Body], clients: int, count: list[int]) -> Seen:
    """Ask until the server takes no more connections; whoever was let in must be answered."""
    seen = Seen()

    async def one(number: int) -> None:
        client = Client(port, path)
        n = number
        while True:
            fresh = client.streams is None
            try:
                await ask(client, bodies[n % len(bodies)], seen)
            except (OSError, asyncio.IncompleteReadError) as error:
                # Refused at the door, or found closed a connection that had been idle: nobody was let in.
                if not (fresh and isinstance(error, ConnectionRefusedError)):
                    seen.lost += 1
                return
            count[0] += 1
            n += clients

    await asyncio.gather(*map(one, range(clients)))
    return seen
