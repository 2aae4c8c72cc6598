"""Callbacks: how a run reports its messages, plan, progress and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vitrail.training.clock import format_seconds


@dataclass(frozen=True)
class Progress:
    """The state of a run at some step."""

    step: int
    steps: int
    """The total number of steps."""
    epoch: int
    """From 0."""
    loss: float
    """The mean training loss of the epoch so far."""
    accuracy: float
    """The training accuracy of the epoch so far."""
    lr: float
    images_per_second: float
    """While it trains, by the last steps."""
    seconds_left: float | None = None
    """The time that the rest of the run will take, by what has been measured so far."""


class Callback(Protocol):
    """Receives the events of a run. Exceptions raised here end the run."""

    def on_message(self, text: str) -> None:
        """A decision, a warning, or what happened: one sentence."""

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        """Data, parameters, steps, memory and time, before the first step."""

    def on_progress(self, progress: Progress) -> None:
        """Every few steps."""

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        """The epoch's row of metrics.jsonl, after it has been evaluated."""


class NullCallback:
    """Ignores every event; a base class for callbacks that need only some of them."""

    def on_message(self, text: str) -> None:
        pass

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        pass

    def on_progress(self, progress: Progress) -> None:
        pass

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        pass


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
