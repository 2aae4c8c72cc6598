"""What a run shows in Python: a live table in a notebook, a progress bar at a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vitrail.base.errors import InputError
from vitrail.base.fields import short_repr
from vitrail.training.callbacks import Callback, NullCallback, Progress
from vitrail.training.console_lines import ConsoleCallback
from vitrail.training.notebook import NotebookCallback, in_notebook
from vitrail.training.parallel import init_process_group


@contextmanager
def show_run(callback: Callback | None, verbose: bool) -> Iterator[Callback]:
    """A callback that shows the run while the block runs, and passes everything on to the user's.

    Args:
        verbose: whether anything is shown; of several processes, the main one shows it.
    """
    own = callback or NullCallback()
    if missing := [name for name in vars(NullCallback) if name.startswith("on_") and not hasattr(own, name)]:
        raise InputError(
            f"callback must have the methods of vitrail.training.callbacks.NullCallback, and "
            f"{short_repr(callback)} lacks {', '.join(missing)}; derive a class from it and pass an object."
        )
    if not verbose or not init_process_group().is_main:
        yield own
        return
    with NotebookCallback() if in_notebook() else ConsoleCallback() as display:
        yield display if callback is None else _Both(display, own)


class _Both:
    """The display and the user's callback, in this order: the user's may end the run."""

    def __init__(self, display: Callback, own: Callback) -> None:
        self.callbacks = (display, own)
        self.shows_bars = getattr(display, "shows_bars", False)

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
