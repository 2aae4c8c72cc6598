"""The processes that decode images for the server: one that forks, and decoders that can be killed.

Images are the one thing here that strangers wrote and C code reads. In a process of its own a decode can
be ended, its memory has a limit, and a crash costs one answer. The first process, the template, loads NumPy,
Pillow and the preprocessing (never torch), once; a new decoder is a fork of it and takes milliseconds.

The server writes to the template's standard input: first the setup, then, for each decoder it wants, a
socket to it and the number of the one that it replaces.
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

from vitrail.preprocess import Preprocess
from vitrail.serve.images import Task, pixels_of
from vitrail.serve.messages import Refusal

LENGTH = struct.Struct("!Q")  # before the setup, and before the bytes of an image
ANSWER = struct.Struct("!BIII")  # before an answer: its kind, then (H, W, C) of pixels or (bytes, 0, 0)
PIXELS, REFUSED = range(2)
REPLACED = struct.Struct("!i?")  # with a socket: the decoder to end, or 0; and whether it has ended already
FORKED = struct.Struct("!ii")  # the answer to that: the new decoder, and how the other one had ended
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def main() -> None:
    """The template: forks a decoder whenever the server asks for one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and a service manager reach us too, but whoever
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # is inside still wants an answer: the server ends us
    server = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # decoders must not have it
    setup: dict[str, Any] = json.loads(bytes(receive(server)))
    die_with(setup["parent"])
    Image.init()  # every plugin is loaded once, and before memory is limited
    task = Task(Preprocess(**setup["preprocess"]), setup["whole"], setup["pixels"], setup["side"])
    dying: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, REPLACED.size, 1)
        if not message:
            return
        code = bury(dying, *REPLACED.unpack(message))
        new, template = socket.socket(fileno=descriptors[0]), os.getpid()
        pid = os.fork()
        if not pid:
            server.close()
            die_with(template)
            limit_memory(setup["memory"])
            decode_for(new, task, setup["seconds"])
        new.close()
        server.sendall(FORKED.pack(pid, code))


def bury(dying: list[int], pid: int, ended: bool) -> int:
    """How a decoder has ended: minus the signal, as subprocess has it. One that has not is killed."""
    dying[:] = [one for one in dying if not os.waitpid(one, os.WNOHANG)[0]]
    if not pid:
        return 0
    os.kill(pid, signal.SIGKILL)  # of one that is dead already this changes nothing
    if ended:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    dying.append(pid)  # to free its memory may take long: nobody waits for that
    return 0


def decode_for(server: socket.socket, task: Task, seconds: float) -> NoReturn:
    """A decoder: one image after the other."""
    while True:
        data = receive(server)
        # Of processor time, so that a busy machine fails no good image. At its end, its signal kills.
        signal.setitimer(signal.ITIMER_PROF, seconds)
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
        os._exit(0)
    data, found = memoryview(bytearray(LENGTH.unpack(head)[0])), 0
    while found < len(data):
        part = server.recv_into(data[found:])
        if not part:
            os._exit(0)
        found += part
    return data


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies, even in the middle of a decode. Elsewhere it ends
    with the decode, when it finds its socket closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was dead already
            os._exit(0)


def limit_memory(size: int) -> None:
    """At most so many bytes beyond what is in use now. Where a system does not say how much that is, or
    enforces no such limit, there is none."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
