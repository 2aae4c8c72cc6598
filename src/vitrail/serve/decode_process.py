"""The server's side of the decoder processes: the template, and a decoder that is asked one image at a time.

Where a process ends, or says what it should not, that is `Ended`: it may have been taken over by an image.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.serve.decode_worker import ANSWER, FORKED, LENGTH, PIXELS, REFUSED, REPLACED
from vitrail.serve.messages import Refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

COMMAND = [sys.executable, "-P", "-c", "from vitrail.serve.decode_worker import main; main()"]
SECRETS = ("VITRAIL_TOKEN",)  # what decodes the images of strangers need not know
LONGEST_REFUSAL = 4096  # bytes


class Ended(Exception):
    """A process has ended; perhaps before it was asked."""

    def __init__(self, before: bool = False) -> None:
        self.before = before


class Template:
    """The process that forks decoders. Its end is the end of all of them."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = json.dumps(setup | {"parent": os.getpid()}).encode()
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

    async def fork(self, old: Decoder | None, ended: bool) -> tuple[Decoder, int]:
        """A new decoder; and the exit code of the old one if it has ended, or 0 and it is killed."""
        if self.setup:
            await send(self.socket, self.setup)
            self.setup = b""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                # The number of another template's decoder may be that of somebody else by now.
                pair = (old.pid, ended) if old and old.template is self else (0, False)
                socket.send_fds(self.socket, [REPLACED.pack(*pair)], [theirs.fileno()])
            pid, code = FORKED.unpack(await receive(self.socket, FORKED.size))
        except BaseException:
            ours.close()
            raise
        return Decoder(pid, ours, self), code

    async def end(self) -> None:
        self.process.kill()
        self.socket.close()
        while self.process.poll() is None:
            await asyncio.sleep(0.005)


class Decoder:
    """A process that decodes, and the socket to it."""

    def __init__(self, pid: int, ours: socket.socket, template: Template) -> None:
        self.pid, self.socket, self.template = pid, ours, template

    async def decode(self, data: memoryview | bytes, most: int) -> Pixels | Refusal:
        """uint8 pixels (H, W, C), at most so many bytes; or why there are none."""
        with suppress(BlockingIOError):  # it has said nothing, as it should
            self.socket.recv(1)
            raise Ended(before=True)
        await send(self.socket, data)
        kind, *shape = ANSWER.unpack(await receive(self.socket, ANSWER.size))
        size = math.prod(shape)
        if kind == PIXELS and 0 < size <= most:
            return np.frombuffer(await receive(self.socket, size), np.uint8).reshape(shape)
        if kind == REFUSED and shape[0] <= LONGEST_REFUSAL:
            text = await receive(self.socket, shape[0])
            with suppress(ValueError, TypeError):
                return Refusal(**json.loads(text))
        raise Ended

    def seconds(self) -> float:
        """A clock that goes while the process computes; where the system has none, one that always goes."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid makes it on Linux
        except OSError:
            return time.monotonic()


async def send(to: socket.socket, data: memoryview | bytes) -> None:
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(to, LENGTH.pack(len(data)))
        await loop.sock_sendall(to, data)
    except OSError:
        raise Ended from None


async def receive(of: socket.socket, size: int) -> bytearray:
    loop, found, data = asyncio.get_running_loop(), 0, bytearray(size)
    while found < size:
        try:
            part = await loop.sock_recv_into(of, memoryview(data)[found:])
        except OSError:
            part = 0
        if not part:
            raise Ended
        found += part
    return data


def environment() -> dict[str, str]:
    """That of this process, with its import path, one thread, and no secrets."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    path = os.pathsep.join(filter(None, sys.path))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
