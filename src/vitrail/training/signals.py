"""SIGTERM and SIGINT: the first one saves and stops, the second one stops at once."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SAME_SIGNAL = 2.0  # seconds


class StopSignal:
    """The signal that asked this process to stop, if one has come."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def handle(self, processes: int = 1) -> Iterator[None]:
        """Handle both signals while the block runs; in other threads than the main one, do nothing.

        torchrun passes on a signal that the terminal has already sent to every process. With several
        processes, a signal that comes right after the first is therefore not a second one.
        """
        received = 0.0
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            nonlocal received
            if self.number is None:
                self.number, received = number, time.monotonic()
            elif processes == 1 or time.monotonic() - received > _SAME_SIGNAL:
                sys.exit(128 + number)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
