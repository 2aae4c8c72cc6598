"""Whoever is told how a run is going."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever shows it."""

    step: int
    steps: int
    epoch: int
    loss: float
    accuracy: float
    rate: float
    images_per_second: float


class Listener(Protocol):
    """Hears of decisions, of the plan, of every few steps, and of every epoch."""

    def note(self, text: str) -> None: ...
    def plan(self, facts: Mapping[str, Any]) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def epoch(self, metrics: Mapping[str, Any]) -> None: ...


class Silent:
    """Nobody."""

    def note(self, text: str) -> None:
        pass

    def plan(self, facts: Mapping[str, Any]) -> None:
        pass

    def progress(self, progress: Progress) -> None:
        pass

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        pass


def epoch_line(metrics: Mapping[str, Any]) -> str:
    """An epoch's row of metrics in words."""
    judged = ""
    if "val_accuracy" in metrics:
        judged = f"   held out: loss {metrics['val_loss']:.3f}, right {metrics['val_accuracy']:.2%}"
    learned = f"epoch {metrics['epoch']:>4}   loss {metrics['loss']:.3f}, right {metrics['accuracy']:.2%}"
    return learned + judged
