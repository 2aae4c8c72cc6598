"""Callbacks: how a run reports its messages, plan, progress and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from os import SEEK_END
from pathlib import Path
from typing import Any

from vitrail.base.errors import FileError, option, printable
from vitrail.training.clock import Interval, format_seconds


@dataclass(frozen=True)
class Progress:
    """The state of a run at some step, with the loss, accuracy and speed of the epoch so far."""

    step: int
    steps: int
    epoch: int
    """Zero-based."""
    loss: float
    accuracy: float
    lr: float
    images_per_second: float
    seconds_left: float | None = None


class Callback:
    """Receives the events of a run: derive from it, and define those you need. Exceptions end the run."""

    def on_message(self, text: str) -> None:
        """A decision, a warning, or what happened: one sentence."""

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        """Data, parameters, steps, memory and time, before the first step."""

    def on_progress(self, progress: Progress) -> None:
        """Every few steps."""

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        """The epoch's row of metrics.jsonl, after it has been evaluated."""


NullCallback = Callback  # its name in 0.2


class Callbacks(Callback):
    """Passes events on to several callbacks, in their order: a later one may end the run."""

    def __init__(self, *callbacks: Callback | None) -> None:
        self.callbacks: list[Callback] = []
        for callback in callbacks:
            if isinstance(callback, Callbacks):
                self.callbacks += callback.callbacks
            elif callback is not None:
                self.callbacks.append(callback)
        self.shows_bars = any(getattr(one, "shows_bars", False) for one in self.callbacks)

    def on_message(self, text: str) -> None:
        for callback in self.callbacks:
            callback.on_message(text)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_plan(plan)

    def on_progress(self, progress: Progress) -> None:
        for callback in self.callbacks:
            callback.on_progress(progress)

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_epoch(metrics)


def epoch_line(metrics: Mapping[str, Any]) -> str:
    """Format an epoch's metrics as one line of text."""
    line = f"epoch {metrics['epoch']:>3}  loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.2%}"
    if "val_accuracy" in metrics:
        line += f"  held out {metrics['val_loss']:.3f}, {metrics['val_accuracy']:.2%}"
    if "seconds" in metrics:
        line += f"  {format_seconds(metrics['seconds'])}"
    return line + (f", {format_seconds(left)} left" if (left := metrics.get("seconds_left")) else "")


def progress_line(progress: Progress) -> str:
    """Format progress as one line of text."""
    line = (
        f"step {progress.step:,} of {progress.steps:,}, epoch {progress.epoch + 1}: "
        f"loss {progress.loss:.3f}, accuracy {progress.accuracy:.1%}, {format_rate(progress)}"
    )
    return line + (f", {format_seconds(progress.seconds_left)} left" if progress.seconds_left else "")


def format_rate(progress: Progress) -> str:
    """1,250 images/s, or 2.5 where it is slow."""
    rate = progress.images_per_second
    return f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.1f} images/s"


# ---- log.txt --------------------------------------------------------------------------------

_MAX_LINE = 1000  # characters
_PROGRESS_SECONDS = 300  # between lines about the progress within an epoch


class LogFile(Callback):
    """A callback that appends events to a file.

    A run reports messages before its folder exists: lines are buffered until `open` is called. A resumed run
    appends to the log it has. A log that cannot be written to ends the run, as any other file would.

    Args:
        enabled: whether this process writes the file.
    """

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self.path, self.enabled = path, enabled
        self._buffer: list[str] | None = []
        self._due = Interval(_PROGRESS_SECONDS)

    def open(self) -> None:
        """Write the buffered lines; from now on, each line is written at once. The folder must exist."""
        lines, self._buffer = self._buffer or [], None
        self._append("".join(lines))

    def on_message(self, text: str) -> None:
        self._write(text)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        for name, value in plan.items():
            self._write(f"{name}: {value}")

    def on_progress(self, progress: Progress) -> None:
        if self._due():
            self._write(progress_line(progress))

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
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
