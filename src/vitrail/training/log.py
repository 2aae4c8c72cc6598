"""log.txt of a run: messages, plan, epochs and, every few minutes, the progress; each with its UTC time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from os import SEEK_END
from pathlib import Path
from typing import Any

from vitrail.base.errors import FileError, option, printable
from vitrail.training.callbacks import Callback, Progress, epoch_line, progress_line
from vitrail.training.clock import Interval

_MAX_LINE = 1000  # characters
_PROGRESS_SECONDS = 300  # between lines about the progress within an epoch


class LogFile:
    """A callback that appends events to a file and passes them on to another callback.

    A run reports messages before its folder exists: lines are buffered until `open` is called. A resumed run
    appends to the log it has. A log that cannot be written to ends the run, as any other file would.

    Args:
        inner: the callback that events are passed on to.
        enabled: whether this process writes the file.
    """

    def __init__(self, inner: Callback, path: Path, enabled: bool = True) -> None:
        self.inner, self.path, self.enabled = inner, path, enabled
        self._buffer: list[str] | None = []
        self._due = Interval(_PROGRESS_SECONDS)

    def open(self) -> None:
        """Write the buffered lines; from now on, each line is written at once. The folder must exist."""
        lines, self._buffer = self._buffer or [], None
        self._append("".join(lines))

    def on_message(self, text: str) -> None:
        self.inner.on_message(text)
        self._write(text)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        self.inner.on_plan(plan)
        for name, value in plan.items():
            self._write(f"{name}: {value}")

    def on_progress(self, progress: Progress) -> None:
        self.inner.on_progress(progress)
        if self._due():
            self._write(progress_line(progress))

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        self.inner.on_epoch(metrics)
        self._write(epoch_line(metrics))

    def _write(self, text: object) -> None:
        line = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {printable(text, _MAX_LINE)}\n"
        if self._buffer is None:
            self._append(line)
        else:
            self._buffer.append(line)

    def _append(self, text: str) -> None:
        if not self.enabled:
            return
        try:
            with self.path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, SEEK_END)
                    text = text if file.read(1) == b"\n" else "\n" + text  # a full disk had cut a line off
                file.write(text.encode())
        except OSError as error:
            raise FileError(
                f"the log {printable(self.path)} could not be written: {printable(error.strerror or error)}. "
                "Free some disk space or check the permissions, then resume with "
                f"{option('resume', True)}."
            ) from error
