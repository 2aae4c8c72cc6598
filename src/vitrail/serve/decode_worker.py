"""The processes that decode images for the server: a template that forks, and decoders that can be killed.

Images are untrusted input parsed by C code. In a process of its own a decode can be stopped, its memory is
limited, and a crash costs one response. The template loads NumPy, Pillow and the preprocessing (never torch)
once; a new decoder is a fork of it and takes milliseconds.

The template's argument is the setup as JSON. The server writes to its standard input, for each new decoder, a
socket to it and the pid of the decoder that it replaces.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from PIL import Image

from vitrail.base.errors import InputError
from vitrail.images.any_size import build_preprocess
from vitrail.images.decode import decode_image, suppress_warnings
from vitrail.images.limits import BrokenImage, DecodeLimits, ImageTooLarge, NotAnImage
from vitrail.images.pixels import to_uint8
from vitrail.images.preprocess import Preprocess
from vitrail.serve.messages import HTTPError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTH = struct.Struct("!Q")  # before the bytes of an image
REPLY = struct.Struct("!BIII")  # before a reply: its kind, then (H, W, C) of pixels or (bytes, 0, 0)
PIXELS, ERROR = range(2)
REPLACE = struct.Struct("!i?")  # with a socket: the pid to replace, or 0; whether it has ended already
FORKED = struct.Struct("!ii")  # the reply: the pid of the new decoder, and the exit code of the old one
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def main() -> None:
    """The template process: forks a decoder for each request of the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and service managers signal this process too,
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # but requests are still in progress; the server ends it
    server = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # decoders must not inherit it
    setup = json.loads(sys.argv[1])
    _die_with(setup["parent"])
    Image.init()  # load all plugins once, before memory is limited
    task = DecodeTask(
        build_preprocess(setup["preprocess"]), setup["full_size"], DecodeLimits(**setup["limits"])
    )
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
            _limit_memory(setup["limits"]["memory"])
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


# ---- a decoder ------------------------------------------------------------------------------------


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


def _receive(server: socket.socket) -> memoryview:
    """Receive the next image. If the server has closed the socket, this process ends."""
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


def _reply(data: memoryview, task: DecodeTask) -> tuple[bytes, memoryview | bytes]:
    try:
        pixels = decode_pixels(data, task)
    except HTTPError as refusal:
        text = json.dumps({"status": refusal.status, **refusal.error}).encode()
        return REPLY.pack(ERROR, len(text), 0, 0), text
    return REPLY.pack(PIXELS, *pixels.shape), np.ascontiguousarray(pixels).data.cast("B")


@dataclass(frozen=True)
class DecodeTask:
    """The preprocessing of every image, and the limits on its size."""

    preprocess: Preprocess
    full_size: bool
    """Whether to keep the image's own size, because an ONNX graph or torch resizes it later."""
    limits: DecodeLimits


def decode_pixels(data: memoryview, task: DecodeTask) -> NDArray[np.uint8]:
    """uint8 pixels (H, W, C). Raises only HTTPError; each kind of failure has its own status."""
    preprocess, limits = task.preprocess, task.limits
    try:
        with suppress_warnings():
            image = decode_image(io.BytesIO(data), "The file", limits=limits, preprocess=preprocess)
            # A narrow strip, resized by its shorter side, may become larger than it was.
            strip = max(image.size) / min(image.size) if preprocess.resize == "shortest" else 1
            if strip * math.prod(preprocess.before_crop) > limits.pixels:
                most = f"{limits.pixels:,} pixels"
                raise ImageTooLarge(f"The image has more than {most} after resizing; make it less elongated.")
            if not task.full_size:
                return preprocess.pixels(image)
            pixels = to_uint8(image, preprocess.channels)
            return pixels.reshape(*pixels.shape[:2], -1)  # grayscale images have no third axis
    except ImageTooLarge as error:
        raise HTTPError(413, "image_too_large", str(error)) from error
    except NotAnImage as error:
        raise HTTPError(415, "no_image", str(error)) from error
    except (InputError, OSError, ValueError, MemoryError) as error:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            message = "The image takes more memory to decode than this server allows; make it smaller."
            raise HTTPError(413, "too_much_memory", message) from None
        if isinstance(error, BrokenImage):
            raise HTTPError(422, "broken_image", "The image is corrupt; send another copy.") from error
        raise unfit_image() from error


def unfit_image() -> HTTPError:
    return HTTPError(
        422, "unfit_image", "The image does not fit the model; send one of another shape or mode."
    )
