"""The life of a server: listen, warm up, serve; told to stop, answer whoever is inside, and leave.

run(vt.Predictor("pets.safetensors"), ServeConfig(port=8000))
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import InputError, printable
from vitrail.serve.app import App
from vitrail.serve.http import Connection
from vitrail.serve.settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.examples import Example

PAGE = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
STOPS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 128  # clients that the system keeps for us until we have time
LINES = 10_000  # of the log that may wait for whoever reads it
SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def run(
    predictor: Predictor,
    settings: ServeConfig,
    *,
    listener: socket.socket | None = None,
    name: str = "",
    examples: Sequence[Example] = (),
    started: Callable[[str], None] = lambda address: None,
    ended: Callable[[int], None] = lambda code: None,
) -> int:
    """Serve until a signal comes. The exit code: 0, or 1 where somebody who was inside got no answer.

    Args:
        started: is told the address, before the first client is let in.
        ended: is told the exit code when everybody has left. The model may still be at work for somebody
            who did not wait; a program that ends here need not wait either.
    """
    log = Log()
    app = App(predictor, settings, name=name, page=page_files(), examples=examples, log=log)

    def finish(code: int) -> None:
        log.close()
        ended(code)

    try:
        server = Server(app, listener or bind(settings), finish)
        with bell() as heard:  # before anybody knows the address, and with it whom to stop
            started(server.listen())
            return server.run(heard)
    finally:
        log.close()


def bind(settings: ServeConfig) -> socket.socket:
    """A socket that has the address, and does not listen yet: first let there be a model."""
    found = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((settings.host, settings.port))
    except OSError as error:
        found.close()
        raise taken(settings, error) from error
    found.setblocking(False)
    return found


def taken(settings: ServeConfig, error: OSError) -> InputError:
    got = f"{settings.host}:{settings.port} ({error.strerror or 'no such address'})"
    do = "Name another --port or --host; --port 0 takes a free one."
    return InputError("The address must be this machine's, and free.", printable(got), do)


def turn_away(listener: socket.socket) -> None:
    """Have the system ignore whoever knocks from now on; whoever has come in before can still be accepted.

    Without this, a client that comes between the last `accept` and the `close` would be thrown out again
    with its request in hand. Only Linux can, by a filter of one instruction: let nothing pass.
    """
    if sys.platform == "linux":
        instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(instruction))
        with suppress(OSError):  # not every container lets us
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


@contextmanager
def bell() -> Iterator[socket.socket | None]:
    """A socket on which SIGTERM and SIGINT arrive, each as a byte, at once: a handler in Python would have to
    wait until the model is done. None in a thread that may not ask for them."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    heard, rung = socket.socketpair()
    with heard, rung:
        heard.setblocking(False)
        rung.setblocking(False)
        wakened = signal.set_wakeup_fd(rung.fileno(), warn_on_full_buffer=False)
        kept = {one: signal.signal(one, lambda *_: None) for one in STOPS}
        try:
            yield heard
        finally:
            for one, handler in kept.items():
                signal.signal(one, handler or signal.SIG_DFL)  # None where it was not Python that had set it
            signal.set_wakeup_fd(wakened)


def page_files() -> dict[str, tuple[str, bytes]]:
    """The page, read once: (kind, bytes) by path. Nothing but these is ever served from a disk."""
    files = {path: (KINDS[path.suffix], path.read_bytes()) for path in PAGE.iterdir() if path.suffix in KINDS}
    return {"/" + path.name.replace("index.html", ""): file for path, file in sorted(files.items())}


class Server:
    """An app on a socket: the model in the thread that runs it, clients in another.

    It is that way round because PyTorch on a CPU was seen to be faster in a process's first thread than in
    any other (docs/serve.md).
    """

    def __init__(
        self, app: App, listener: socket.socket, ended: Callable[[int], object] = lambda code: None
    ) -> None:
        self.app, self.listener, self.ended = app, listener, ended
        self.told = asyncio.Event()
        self.arrivals: set[asyncio.Task[Any]] = set()
        self.signals = self.code = 0

    def listen(self) -> str:
        """Let the system collect clients for us. The address they are given."""
        try:
            self.listener.listen(BACKLOG)
        except OSError as error:  # another has had the address in the meantime, and was first to listen
            raise taken(self.app.settings, error) from error
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, heard: socket.socket | None = None) -> int:
        """Serve until told to stop. The exit code.

        Args:
            heard: a socket on which signals arrive, as from `bell`.
        """
        clients = threading.Thread(target=self.serve_clients, args=[heard], name="clients")
        clients.start()
        self.app.batcher.run(self.model_died)
        clients.join()
        return self.code

    def serve_clients(self, heard: socket.socket | None) -> None:
        """In a thread of its own. However it ends, the model's thread must not wait for ever."""
        try:
            asyncio.run(self.attend(heard))
        except BaseException as error:
            self.app.failed(error)
            self.code = 1
        self.app.batcher.close()
        self.ended(self.code)

    def model_died(self, error: BaseException) -> None:
        self.app.failed(error)
        with suppress(RuntimeError):  # the last client has left already
            self.loop.call_soon_threadsafe(self.stop, 1)

    async def attend(self, heard: socket.socket | None) -> None:
        """What clients see of a server, from the first to the last."""
        self.loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.trouble)
        if heard:
            loop.add_reader(heard, self.on_signals, heard)
        loop.add_reader(self.listener, self.accept)
        warming = loop.create_task(self.warm_up())
        try:
            await self.told.wait()
            warming.cancel()
            await self.drain()
        finally:
            await self.app.decoders.close()

    def on_signals(self, heard: socket.socket) -> None:
        """The first asks us to leave; the second means it."""
        for number in heard.recv(100):
            if number not in STOPS:
                continue  # others that the program listens to come this way too
            self.signals += 1
            if self.signals > 1:
                os._exit(128 + number)
            self.stop()

    def stop(self, code: int = 0) -> None:
        self.code = max(self.code, code)
        self.app.stopping = True
        self.told.set()

    def trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """What asyncio would print with a stack trace."""
        error = context.get("exception")
        self.app.failed(error if isinstance(error, Exception) else RuntimeError())

    # ---- its parts --------------------------------------------------------------------------

    def accept(self) -> bool:
        """Let in one client, if one is there; whether another may be."""
        loop = asyncio.get_running_loop()
        try:
            found, _ = self.listener.accept()
        except ConnectionAbortedError:
            return True  # this one has gone; others may be there
        except OSError as error:
            if error.errno in EXHAUSTED:  # to look again at once would help nobody
                self.app.log("no more file descriptors: clients have to wait")
                loop.remove_reader(self.listener)
                loop.call_later(1, self.look_again)
            return False
        arrival = loop.create_task(loop.connect_accepted_socket(lambda: Connection(self.app), found))
        self.arrivals.add(arrival)
        arrival.add_done_callback(self.arrivals.discard)
        return True

    def look_again(self) -> None:
        if not self.app.stopping:
            asyncio.get_running_loop().add_reader(self.listener, self.accept)

    async def warm_up(self) -> None:
        """The first answers take longer than all others: nobody should wait for them."""
        preprocess = self.app.predictor.preprocess
        blank = np.zeros((*preprocess.target, preprocess.channels), np.uint8)

        def answer() -> None:
            for count in (1, self.app.settings.batch):
                list(self.app.predictor.answer([("", blank)] * count))

        try:
            model = self.app.batcher.call(answer, float("inf"))
            await asyncio.gather(self.app.decoders.start(), model)
            self.app.ready = True
        except Exception as error:
            self.app.failed(error)
            self.stop(1)

    async def drain(self) -> None:
        """Take in who is at the door, close it, and wait until everybody has an answer."""
        turn_away(self.listener)
        while self.accept():
            pass
        asyncio.get_running_loop().remove_reader(self.listener)
        self.listener.close()
        await asyncio.gather(*self.arrivals, return_exceptions=True)
        for connection in self.app.connections.copy():
            connection.hurry()
        tasks = [connection.task for connection in self.app.connections if connection.task]
        _, late = await asyncio.wait(tasks, timeout=self.app.settings.drain) if tasks else ((), ())
        if late:
            self.app.log(f"clients cut off after {self.app.settings.drain:g} seconds: {len(late)}")
            self.code = 1


class Log:
    """Lines on stderr, from a thread of their own: who reads them slowly must not hold up the server."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue(LINES)
        self.thread = threading.Thread(target=self.write, name="log", daemon=True)
        self.thread.start()

    def __call__(self, line: str) -> None:
        with suppress(queue.Full):
            self.lines.put_nowait(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}")

    def write(self) -> None:
        with suppress(OSError):  # nobody reads any more
            while (line := self.lines.get()) is not None:
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(queue.Full):
            self.lines.put(None, timeout=1)
        self.thread.join(1)
