"""The processes that decode images for the server: a template that forks, and decoders that can be killed.

Images are untrusted input parsed by C code. In a process of its own a decode can be stopped, its memory is
limited, and a crash costs one response. The template loads NumPy, Pillow and the preprocessing (never torch)
once; a new decoder is a fork of it and takes milliseconds.

The server writes to the template's standard input: first the setup, then, for each new decoder, a socket to
it and the pid of the decoder that it replaces.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from vitrail.images.any_size import build_preprocess
from vitrail.serve.messages import HTTPError
from vitrail.serve.received_images import DecodeTask, decode_pixels

LENGTH = struct.Struct("!Q")  # before the setup, and before the bytes of an image
REPLY = struct.Struct("!BIII")  # before a reply: its kind, then (H, W, C) of pixels or (bytes, 0, 0)
PIXELS, ERROR = range(2)
REPLACE = struct.Struct(
    "!i?"
)  # with a socket: the pid of the decoder to replace, or 0; whether it has ended already
FORKED = struct.Struct("!ii")  # the reply: the pid of the new decoder, and the exit code of the old one
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def main() -> None:
    """The template process: forks a decoder for each request of the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and service managers signal this process too,
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # but requests are still in progress; the server ends it
    server = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # decoders must not inherit it
    setup: dict[str, Any] = json.loads(bytes(_receive(server)))
    _die_with(setup["parent"])
    Image.init()  # load all plugins once, before memory is limited
    limits = [setup[name] for name in ("full_size", "pixels", "side", "memory")]
    task = DecodeTask(build_preprocess(setup["preprocess"]), *limits)
    dying: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, REPLACE.size, 1)
        if not message:
            return
        code = _reap(dying, *REPLACE.unpack(message))
        new, template = socket.socket(fileno=descriptors[0]), os.getpid()
        pid = os.fork()
        if not pid:
            server.close()
            _die_with(template)
            _limit_memory(setup["memory"])
            _decode_loop(new, task, setup["seconds"])
        new.close()
        server.sendall(FORKED.pack(pid, code))


def _reap(dying: list[int], pid: int, ended: bool) -> int:
    """The exit code of a decoder, or minus the signal, as in subprocess. One that still runs is killed."""
    dying[:] = [one for one in dying if not os.waitpid(one, os.WNOHANG)[0]]
    if not pid:
        return 0
    os.kill(pid, signal.SIGKILL)  # no effect if it is dead already
    if ended:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    dying.append(pid)  # freeing its memory may take long: do not wait for that
    return 0


def _decode_loop(server: socket.socket, task: DecodeTask, seconds: float) -> NoReturn:
    """A decoder process: decode one image after the other."""
    while True:
        data = _receive(server)
        # A limit on CPU time, so that good images do not fail on a busy machine. Its signal kills.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        head, body = _reply(data, task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        server.sendall(head)
        server.sendall(body)
        del data, body  # otherwise both would stay in memory until the next image


def _reply(data: memoryview, task: DecodeTask) -> tuple[bytes, memoryview | bytes]:
    try:
        pixels = decode_pixels(data, task)
    except HTTPError as refusal:
        text = json.dumps({"status": refusal.status, **refusal.error}).encode()
        return REPLY.pack(ERROR, len(text), 0, 0), text
    return REPLY.pack(PIXELS, *pixels.shape), np.ascontiguousarray(pixels).data.cast("B")


def _receive(server: socket.socket) -> memoryview:
    """Receive the next message. If the server has closed the socket, this process ends."""
    head = server.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        os._exit(0)
    data, received = memoryview(bytearray(LENGTH.unpack(head)[0])), 0
    while received < len(data):
        part = server.recv_into(data[received:])
        if not part:
            os._exit(0)
        received += part
    return data


def _die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies, even during a decode. On other systems it ends after
    the decode, when its socket is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died already
            os._exit(0)


def _limit_memory(size: int) -> None:
    """Limit memory to `size` bytes beyond what is in use now. On Linux only."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
