"""The server's side of the decoder processes: the template, and decoders that take one image at a time.

A process that ends or sends an invalid reply raises `ProcessEnded`: a hostile image may have taken it over.
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

from vitrail.serve.decode_worker import ERROR, FORKED, LENGTH, PIXELS, REPLACE, REPLY
from vitrail.serve.messages import HTTPError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

COMMAND = [sys.executable, "-P", "-c", "from vitrail.serve.decode_worker import main; main()"]
SECRETS = ("VITRAIL_TOKEN",)  # not passed to processes that decode untrusted images
MAX_ERROR = 4096  # bytes of an error message


class ProcessEnded(Exception):
    """A process has ended, perhaps before it received the image."""

    def __init__(self, before: bool = False) -> None:
        self.before = before


class Template:
    """The process that forks decoders. When it ends, they all end."""

    def __init__(self, setup: dict[str, Any]) -> None:
        public = {name: value for name, value in os.environ.items() if name not in SECRETS}
        path = os.pathsep.join(filter(None, sys.path))
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*COMMAND, json.dumps(setup | {"parent": os.getpid()})],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=public | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                )
        except OSError:
            self.socket.close()
            raise

    async def fork(self, old: DecoderProcess | None, ended: bool) -> tuple[DecoderProcess, int]:
        """A new decoder, and the exit code of the old one, or 0 if it had to be killed."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                # The pid of a decoder of another template may belong to an unrelated process by now.
                pair = (old.pid, ended) if old and old.template is self else (0, False)
                socket.send_fds(self.socket, [REPLACE.pack(*pair)], [theirs.fileno()])
            pid, code = FORKED.unpack(await _receive(self.socket, FORKED.size))
        except BaseException:
            ours.close()
            raise
        return DecoderProcess(pid, ours, self), code

    async def end(self) -> None:
        self.process.kill()
        self.socket.close()
        while self.process.poll() is None:
            await asyncio.sleep(0.005)


class DecoderProcess:
    """A process that decodes, and the socket to it."""

    def __init__(self, pid: int, ours: socket.socket, template: Template) -> None:
        self.pid, self.socket, self.template = pid, ours, template

    async def decode(self, data: memoryview, max_bytes: int) -> Pixels | HTTPError:
        """uint8 pixels (H, W, C) of at most `max_bytes`, or the error."""
        with suppress(BlockingIOError):  # as it should: there is nothing to read
            self.socket.recv(1)
            raise ProcessEnded(before=True)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.socket, LENGTH.pack(len(data)))
            await loop.sock_sendall(self.socket, data)
        except OSError:
            raise ProcessEnded from None
        kind, *shape = REPLY.unpack(await _receive(self.socket, REPLY.size))
        size = math.prod(shape)
        if kind == PIXELS and 0 < size <= max_bytes:
            return np.frombuffer(await _receive(self.socket, size), np.uint8).reshape(shape)
        if kind == ERROR and shape[0] <= MAX_ERROR:
            text = await _receive(self.socket, shape[0])
            with suppress(ValueError, TypeError):
                return HTTPError(**json.loads(text))
        raise ProcessEnded

    def seconds(self) -> float:
        """The CPU time of the process; wall-clock time where the system does not report it."""
        try:  # the clock id that clock_getcpuclockid returns on Linux
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return time.monotonic()


async def _receive(of: socket.socket, size: int) -> bytearray:
    loop, received, data = asyncio.get_running_loop(), 0, bytearray(size)
    while received < size:
        try:
            part = await loop.sock_recv_into(of, memoryview(data)[received:])
        except OSError:
            part = 0
        if not part:
            raise ProcessEnded
        received += part
    return data
