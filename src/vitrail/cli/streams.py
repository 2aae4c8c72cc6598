"""stdin, stdout and stderr when they are closed, full, or no longer read."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from vitrail.base.errors import DeviceWarning, InputError, printable

_MAX_MESSAGE = 2000  # characters


def open_streams() -> None:
    """Make every stream usable, or exit with a message if standard output is closed.

    Python sets a stream that was closed (`>&-`) to None. Its file descriptor is then free: the next file to
    be opened would get it, and with it whatever a C library prints. So /dev/null is opened first.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is this one
    closed = sys.stdout is None
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or sys.stdout  # errors go to the stream that is left
    if closed:
        print_error("standard output is closed, so results cannot be printed; use > FILE or > /dev/null.")
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # characters that the terminal cannot show become "?"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_error(message: str) -> None:
    """Print a message on stderr as one line; it is dropped if stderr is closed, as is all that follows."""
    try:
        print(f"vitrail: {printable(message, _MAX_MESSAGE)}", file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)


def show_device_lines() -> None:
    """Print a DeviceWarning as one line, and other warnings as Python does."""
    other = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, DeviceWarning):
            with suppress(OSError):
                print(printable(message, _MAX_MESSAGE), file=sys.stderr, flush=True)
        else:
            other(message, category, *where, **more)

    warnings.showwarning = show


def discard_output(stream: Any = None) -> None:
    """Redirect stdout to /dev/null; otherwise Python would try to flush it again at exit, and complain."""
    stream = stream or sys.stdout
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def stdin_bytes() -> Any:
    """Standard input as bytes."""
    if sys.stdin is None:
        raise InputError(
            "standard input is closed, so the list of paths (-) cannot be read; pipe one into the command."
        )
    return sys.stdin.buffer


class _Outlasting:
    """A wrapper of a stream that drops what can no longer be written."""

    def __init__(self, stream: Any, log: str) -> None:
        self.stream, self.log = stream, log
        self.closed_early = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            if not self.closed_early:
                action()
        except OSError as error:
            self.closed_early = True
            discard_output()  # the buffer of the wrapped stream still has what could not be written
            reason = printable(error.strerror or error)
            print_error(f"the output is closed ({reason}); the run continues and logs to {self.log}.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def outlasting(log: str) -> Iterator[None]:
    """Let a long run continue after its output is closed (`| head`); what it prints then is dropped.

    Args:
        log: the file that has the complete output, for the message.
    """
    stream = _Outlasting(sys.stdout, log)
    with redirect_stdout(stream):
        yield
        stream.flush()
