"""Whoever is told how a run is going."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from vitrail.training.loop import Progress


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
