"""Run a server: listen, warm up, serve, and on a signal finish the open requests and stop.

run_server({"pets": vt.Predictor("pets.safetensors")}, ServeConfig(port=8000))
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import InputError, printable
from vitrail.serve.app import App
from vitrail.serve.connection import GRACE, connection_protocol
from vitrail.serve.messages import internal_error
from vitrail.serve.server_settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.examples import Example

STOPS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 128  # connections that the kernel queues
MAX_LOG_LINES = 10_000  # waiting to be written
SO_ATTACH_FILTER = 26  # on Linux; Python has no name for it
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def run_server(
    predictors: Mapping[str, Predictor],
    settings: ServeConfig,
    *,
    listener: socket.socket | None = None,
    examples: Sequence[Example] = (),
    started: Callable[[str], None] = lambda address: None,
    ended: Callable[[int], None] = lambda code: None,
) -> int:
    """Serve until a signal arrives; return the exit code: 0, or 1 if a request was cut off.

    Args:
        predictors: the models by name; the first is that of the page and of /v1/predict.
        started: called with the address, before the first client is accepted.
        ended: called with the exit code when all clients have left. The model may still be computing for a
            client that did not wait; a program may exit here without waiting for it.
    """
    log = Log()

    def finish(code: int) -> None:
        log.close()
        ended(code)

    try:
        app = App(predictors, settings, examples=examples, log=log)
        server = Server(app, listener or bind(settings), finish)
        with _signal_socket() as signals:  # before the address is known
            started(server.listen())
            return server.run(signals)
    finally:
        log.close()


def bind(settings: ServeConfig) -> socket.socket:
    """A socket bound to the address that does not listen yet: the model is loaded first."""
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _address_error(settings, error) from error
    listener.setblocking(False)
    return listener


def _address_error(settings: ServeConfig, error: OSError) -> InputError:
    address, reason = f"{settings.host}:{settings.port}", error.strerror or "no such address"
    return InputError(
        f"Cannot listen on {printable(address)}: {printable(reason)}; choose another --port or --host "
        "(--port 0 chooses a free port)."
    )


def _stop_new_connections(listener: socket.socket) -> None:
    """Have the kernel drop new connections; those already queued can still be accepted.

    Without this, a client that connects between the last `accept` and the `close` would be reset with its
    request sent. Linux only, by a socket filter of one instruction that drops everything.
    """
    if sys.platform == "linux":
        instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(instruction))
        with suppress(OSError):  # not allowed in every container
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


@contextmanager
def _signal_socket() -> Iterator[socket.socket | None]:
    """A socket that receives SIGTERM and SIGINT at once, each as a byte; a Python handler would wait for the
    forward pass to end. None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        handlers = {one: signal.signal(one, lambda *_: None) for one in STOPS}
        try:
            yield receiver
        finally:
            for one, handler in handlers.items():
                signal.signal(one, handler or signal.SIG_DFL)  # None if it was not set from Python
            signal.set_wakeup_fd(previous)


class Server:
    """An app on a socket: the model in the calling thread, the connections in another.

    PyTorch on a CPU was measured to be faster in the main thread of a process than in others (docs/serve.md).
    """

    def __init__(
        self, app: App, listener: socket.socket, ended: Callable[[int], object] = lambda code: None
    ) -> None:
        self.app, self.listener, self.ended = app, listener, ended
        self.stop_requested = asyncio.Event()
        self.accepting: set[asyncio.Task[Any]] = set()
        self.signal_count = self.code = 0

    def listen(self) -> str:
        """Start listening; return the address."""
        try:
            self.listener.listen(BACKLOG)
        except OSError as error:  # another process listens there now
            raise _address_error(self.app.settings, error) from error
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, signals: socket.socket | None = None) -> int:
        """Serve until stopped, perhaps by `signals` from `_signal_socket`; return the exit code."""
        self.app.thread = threading.current_thread()
        clients = threading.Thread(target=self.serve_clients, args=[signals], name="clients")
        clients.start()
        self.app.batcher.run(self.on_model_crash)
        clients.join()
        return self.code

    def on_model_crash(self, error: BaseException) -> None:
        internal_error(error, self.app.log)
        with suppress(RuntimeError):  # the event loop has ended already
            self.loop.call_soon_threadsafe(self.stop, 1)

    # ---- the connections' thread ---------------------------------------------------------

    def serve_clients(self, signals: socket.socket | None) -> None:
        """However this thread ends, the model's thread must end too."""
        try:
            asyncio.run(self.serve_until_stopped(signals))
        except BaseException as error:
            internal_error(error, self.app.log)
            self.code = 1
        self.app.batcher.close()
        self.ended(self.code)

    async def serve_until_stopped(self, signals: socket.socket | None) -> None:
        """Accept connections until the server is stopped, then finish the open requests."""
        self.loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.on_asyncio_error)
        if signals:
            loop.add_reader(signals, self.on_signals, signals)
        loop.add_reader(self.listener, self.accept)
        warming = loop.create_task(self.warm_up())
        try:
            await self.stop_requested.wait()
            warming.cancel()
            await self.drain()
        finally:
            await self.app.stop()

    async def warm_up(self) -> None:
        """Run the models once; a server that cannot is stopped."""
        try:
            await self.app.start()
        except Exception as error:
            internal_error(error, self.app.log)
            self.stop(1)

    def on_signals(self, signals: socket.socket) -> None:
        """The first signal stops the server gracefully, the second at once."""
        for number in signals.recv(100):
            if number not in STOPS:
                continue  # signals that the program handles itself arrive here too
            self.signal_count += 1
            if self.signal_count > 1:
                os._exit(128 + number)
            self.stop()

    def stop(self, code: int = 0) -> None:
        self.code = max(self.code, code)
        self.app.stopping = True
        self.stop_requested.set()

    def on_asyncio_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Log an error that asyncio would print with a stack trace."""
        error = context.get("exception")
        internal_error(error if isinstance(error, Exception) else RuntimeError(), self.app.log)

    def accept(self) -> bool:
        """Accept one client if there is one; return whether there may be another."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self.listener.accept()
        except ConnectionAbortedError:
            return True  # this one has disconnected; there may be others
        except OSError as error:
            if error.errno in EXHAUSTED:  # retrying at once would not help
                self.app.log("out of file descriptors; new clients have to wait")
                loop.remove_reader(self.listener)
                loop.call_later(1, lambda: self.app.stopping or loop.add_reader(self.listener, self.accept))
            return False
        task = loop.create_task(
            loop.connect_accepted_socket(lambda: connection_protocol(self.app), connection)
        )
        self.accepting.add(task)
        task.add_done_callback(self.accepting.discard)
        return True

    async def drain(self) -> None:
        """Accept the queued connections, stop listening, and wait until all requests have a response."""
        _stop_new_connections(self.listener)
        while self.accept():
            pass
        asyncio.get_running_loop().remove_reader(self.listener)
        self.listener.close()
        await asyncio.gather(*self.accepting, return_exceptions=True)
        for connection in self.app.connections.copy():
            asyncio.get_running_loop().call_later(GRACE, connection.close_if_idle)
        tasks = [connection.task for connection in self.app.connections]
        _, late = await asyncio.wait(tasks, timeout=self.app.settings.drain) if tasks else ((), ())
        if late:
            self.app.log(f"requests cut off after {self.app.settings.drain:g} seconds: {len(late)}")
            self.code = 1


class Log:
    """A log on stderr, written by its own thread, so that a slow reader cannot block the server."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue(MAX_LOG_LINES)
        self.thread = threading.Thread(target=self.write, name="log", daemon=True)
        self.thread.start()

    def __call__(self, line: str) -> None:
        with suppress(queue.Full):
            self.lines.put_nowait(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}")

    def write(self) -> None:
        with suppress(OSError):  # the reader is gone
            while (line := self.lines.get()) is not None:
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(queue.Full):
            self.lines.put(None, timeout=1)
        self.thread.join(1)
