"""A process that decodes images for the server, one at a time, and can be killed at any moment.

Images are the one thing here that strangers wrote and C code reads. In a process of its own a decode can
be ended, its memory has a limit, and a crash costs one answer. The server is at the other end of the
socket that is this process's standard input. Only NumPy, Pillow and the preprocessing are loaded.
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
from typing import Any

import numpy as np
from PIL import Image

from vitrail.preprocess import Preprocess
from vitrail.serve.images import Task, pixels_of
from vitrail.serve.messages import Refusal

LENGTH = struct.Struct("!Q")  # before the bytes of an image
ANSWER = struct.Struct("!BIII")  # before an answer: its kind, then (H, W, C) of pixels or (bytes, 0, 0)
READY, PIXELS, REFUSED = range(3)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and a service manager reach us too, but whoever
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # is inside still wants an answer: the server ends us
    server = socket.socket(fileno=os.dup(0))
    setup: dict[str, Any] = json.loads(bytes(receive(server)))
    die_with(setup["parent"])
    Image.init()  # every plugin is loaded before memory is limited
    preprocess = Preprocess(**setup["preprocess"])
    task = Task(preprocess, setup["whole"], setup["pixels"], setup["side"])
    limit_memory(setup["memory"])
    server.sendall(ANSWER.pack(READY, 0, 0, 0))
    while True:
        data = receive(server)
        # Processor time, so that a busy machine fails no honest image. Its signal kills.
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
        head, body = answer(data, task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        server.sendall(head)
        server.sendall(body)
        del data, body  # or both would stay in memory until the next image has come


def answer(data: memoryview, task: Task) -> tuple[bytes, memoryview | bytes]:
    try:
        pixels = pixels_of(data, task)
    except Refusal as refusal:
        text = json.dumps({"status": refusal.status, **refusal.error}).encode()
        return ANSWER.pack(REFUSED, len(text), 0, 0), text
    return ANSWER.pack(PIXELS, *pixels.shape), np.ascontiguousarray(pixels).data.cast("B")


def receive(server: socket.socket) -> memoryview:
    """The next message. Where the server has closed the socket, this process ends."""
    head = server.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        sys.exit()
    data, found = memoryview(bytearray(LENGTH.unpack(head)[0])), 0
    while found < len(data):
        part = server.recv_into(data[found:])
        if not part:
            sys.exit()
        found += part
    return data


def die_with(parent: int) -> None:
    """Have Linux kill this process when the server dies, even in the middle of a decode. Elsewhere it
    ends with the decode, when it finds its socket closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was dead already
            sys.exit()


def limit_memory(size: int) -> None:
    """At most so many bytes beyond what is in use now. Where a system does not say how much that is, or
    enforces no such limit, there is none."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
