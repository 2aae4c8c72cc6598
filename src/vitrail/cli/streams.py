"""stdin, stdout and stderr: closed, full, or with nobody who reads."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from vitrail.errors import InputError, printable

LONGEST = 2000  # characters of a message


def open_streams() -> None:
    """Make every stream one that can be used, or end with a sentence where there is nothing to write to.

    Python has None for a stream that was closed (`>&-`). Its number is then free, and the next file that
    anything opens would get it, and with it whatever a C library prints: so it is taken first.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
    closed = sys.stdout is None
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or sys.stdout  # an error is said on what is left
    if closed:
        say("standard output is closed, and a command writes what it finds there; use > FILE or > /dev/null.")
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # a terminal without our letters shows "?", and goes on
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(message: str) -> None:
    """A sentence for the user, a line; where nobody hears it, it is dropped."""
    with suppress(OSError):
        print(f"vitrail: {printable(message, LONGEST)}", file=sys.stderr, flush=True)


def give_up_output() -> None:
    """Whatever is still to be printed goes nowhere, or Python would try again at its end, and complain."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdin_bytes() -> Any:
    """Standard input as bytes."""
    if sys.stdin is None:
        raise InputError(
            "standard input is closed, and the list of paths (-) is read from there; pipe one in."
        )
    return sys.stdin.buffer


class Outlasting:
    """A stream like another one, that outlasts it: what can no longer be written is dropped."""

    def __init__(self, stream: Any, where: str) -> None:
        self.stream, self.where = stream, where
        self.lost = False

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, action: Any) -> None:
        if self.lost:
            return
        try:
            action()
        except OSError as error:
            self.lost = True
            give_up_output()  # of the stream inside: it has what could not be written
            reason = printable(error.strerror or error)
            say(f"the output is closed ({reason}), and the run goes on; everything is in {self.where}.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def outlasting(where: str) -> Iterator[None]:
    """A long run does not end because nobody reads what it prints (`| head`): the rest is dropped.

    Args:
        where: the file that has it all.
    """
    stream = Outlasting(sys.stdout, where)
    with redirect_stdout(stream):
        yield
        stream.flush()
