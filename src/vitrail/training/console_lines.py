"""What a run shows: messages, the plan, one line per epoch, and the progress.

Progress is a bar at a terminal, a live table in a notebook, and a line every half minute elsewhere.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vitrail.base.errors import InputError, printable
from vitrail.base.fields import short_repr
from vitrail.base.progress import ProgressBars
from vitrail.training.callbacks import (
    Callback,
    Callbacks,
    Progress,
    epoch_line,
    format_rate,
    progress_line,
)
from vitrail.training.clock import Interval, format_seconds
from vitrail.training.notebook import NotebookCallback, in_notebook

_LINE_SECONDS = 30  # between lines of progress
_BRIEF_PLAN = ("data", "images", "parameters")


class ConsoleCallback(Callback):
    """A callback that prints the events of a run.

    Args:
        brief: print the data, the images and the number of parameters, and nothing else but the bar.
    """

    def __init__(self, *, brief: bool = False) -> None:
        self.brief = brief
        self.seconds = 0.0  # from the plan to the end of the last epoch
        self._bars = ProgressBars(time_left=False)  # the run's own estimate counts evaluations, too
        self._due: Interval | None = None  # when the next line of progress is
        self._start = 0.0

    @property
    def shows_bars(self) -> bool:
        """Whether a bar is shown before the run, too: while rows and files are read."""
        return self._bars.enabled

    def __enter__(self) -> ConsoleCallback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on_message(self, text: str) -> None:
        if not self.brief:
            print(fit_terminal(printable(text, 400)), flush=True)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        print_rows({name: plan[name] for name in _BRIEF_PLAN} if self.brief else plan)
        self._start, self._due = time.monotonic(), Interval(_LINE_SECONDS)

    def on_progress(self, progress: Progress) -> None:
        if self._bars.enabled:
            left = f", {format_seconds(progress.seconds_left)} left" if progress.seconds_left else ""
            detail = f"loss {progress.loss:.3f}, {progress.accuracy:.1%}, {format_rate(progress)}{left}"
            self._bars("training", progress.step, progress.steps, detail, f"epoch {progress.epoch + 1}")
        elif not self.brief and self._due is not None and self._due():
            print(progress_line(progress), flush=True)

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        self.seconds = time.monotonic() - self._start
        if not self.brief:
            print(epoch_line(metrics), flush=True)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bars.close()


def fit_terminal(text: str) -> str:
    """A message in lines as wide as the terminal, broken between words; as it is in a file or a pipe.

    A command at its end stays in one line, to be copied.
    """
    if not sys.stdout.isatty():
        return text
    sentence, colon, command = text.partition(": vitrail ")
    lines = textwrap.wrap(
        sentence + colon[:1],
        shutil.get_terminal_size().columns,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([*lines, *[f"vitrail {command}"] * bool(colon)])


def print_rows(rows: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=10)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold cyan"), Text(printable(value, 400), overflow="fold"))
    Console(highlight=False).print(table)


# ---- in Python: a notebook or a console -----------------------------------------------------


@contextmanager
def show_run(callback: Callback | None, verbose: bool) -> Iterator[Callback]:
    """A callback that shows the run while the block runs, and passes everything on to the user's.

    Args:
        verbose: whether anything is shown; of several processes, the main one shows it.
    """
    from vitrail.training.parallel import (
        init_process_group,  # it imports torch, which `vitrail plan` does not
    )

    events = [name for name in vars(Callback) if name.startswith("on_")]
    if callback is not None and (missing := [name for name in events if not hasattr(callback, name)]):
        raise InputError(
            f"callback must have the methods of vitrail.training.callbacks.Callback, and "
            f"{short_repr(callback)} lacks {', '.join(missing)}; derive a class from it and pass an object."
        )
    if not verbose or not init_process_group().is_main:
        yield Callbacks(callback)
        return
    with NotebookCallback() if in_notebook() else ConsoleCallback() as display:
        yield Callbacks(display, callback)
