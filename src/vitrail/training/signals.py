"""SIGTERM and SIGINT: the first one saves and stops, the second one stops at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SAME_SIGNAL = 2.0  # seconds


class Interrupted(Exception):
    """A run was stopped by a signal.

    Args:
        saved: whether steps were taken, and are saved.
        advice: how to go on, if nothing had to be saved.
    """

    def __init__(self, signal: int, *, saved: bool = True, advice: str | None = None) -> None:
        super().__init__(signal)
        self.signal, self.saved, self.advice = signal, saved, advice

    def __str__(self) -> str:
        if self.saved:
            return (
                f"the run was stopped by signal {self.signal} and its checkpoint is saved; resume it with "
                "vt.train(out=..., resume=True)."
            )
        return f"Stopped by {signal.Signals(self.signal).name}: {self.advice or 'start the run again.'}"


class _StopNow(BaseException):
    """Raised by a signal where there is nothing to save; no `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        self.number = number


class StopSignal:
    """The signal that asked this process to stop, if one has come.

    Args:
        has_progress: whether there is something to save. If so, a signal is only remembered, and the run ends
            after its step; before, it raises Interrupted at once, wherever the process is.
    """

    def __init__(self, has_progress: Callable[[], bool] = lambda: False) -> None:
        self.has_progress = has_progress
        self.number: int | None = None

    @contextmanager
    def handle(self, *, several: bool = False) -> Iterator[None]:
        """Handle both signals while the block runs; in other threads than the main one, do nothing.

        Args:
            several: whether this is one of several processes. torchrun passes on a signal that the terminal
                has already sent to all of them, so one that comes right after the first is not a second one.
        """
        received = 0.0
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            nonlocal received
            if self.number is None:
                self.number, received = number, time.monotonic()
                if not self.has_progress():
                    raise _StopNow(number)
            elif not several or time.monotonic() - received > _SAME_SIGNAL:
                sys.exit(128 + number)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except _StopNow as now:
            raise Interrupted(now.number, saved=False) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def stop_early(advice: Callable[[], str]) -> Iterator[None]:
    """Raise Interrupted if a signal comes while nothing is trained: data is read, a step is compiled.

    Args:
        advice: how to go on, for its message.
    """
    try:
        with StopSignal().handle(several="RANK" in os.environ):  # of torchrun
            yield
    except Interrupted as stop:
        if not stop.saved and stop.advice is None:
            stop.advice = advice()
        raise
