"""Training on the console: messages, the plan, one line per epoch, and the progress.

Progress is a bar at a terminal, and a line every half minute in a file, a pipe or a notebook cell.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from vitrail.cli.progress import ProgressBars
from vitrail.errors import printable

if TYPE_CHECKING:
    from vitrail.training.callbacks import Callback, Progress

_LINE_SECONDS = 30  # between lines of progress
_BRIEF_PLAN = ("data", "images", "parameters")


class ConsoleCallback:
    """A callback that prints the events of a run.

    Args:
        brief: print the data, the images and the number of parameters, and nothing else but the bar.
    """

    def __init__(self, *, brief: bool = False) -> None:
        self.brief = brief
        self.seconds = 0.0  # from the plan to the end of the last epoch
        self._bars = ProgressBars(time_left=False)  # the run's own estimate counts evaluations, too
        self._due: Callable[[], bool] | None = None  # when the next line of progress is
        self._start = 0.0

    def __enter__(self) -> ConsoleCallback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on_message(self, text: str) -> None:
        if not self.brief:
            print(printable(text, 400), flush=True)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        print_rows({name: plan[name] for name in _BRIEF_PLAN} if self.brief else plan)
        from vitrail.training.clock import Interval

        self._start, self._due = time.monotonic(), Interval(_LINE_SECONDS)

    def on_progress(self, progress: Progress) -> None:
        from vitrail.training.callbacks import format_rate, progress_line
        from vitrail.training.clock import format_seconds

        if self._bars.enabled:
            left = f", {format_seconds(progress.seconds_left)} left" if progress.seconds_left else ""
            detail = f"loss {progress.loss:.3f}, {progress.accuracy:.1%}, {format_rate(progress)}{left}"
            self._bars("training", progress.step, progress.steps, detail, f"epoch {progress.epoch + 1}")
        elif not self.brief and self._due is not None and self._due():
            print(progress_line(progress), flush=True)

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        from vitrail.training.callbacks import epoch_line

        self.seconds = time.monotonic() - self._start
        if not self.brief:
            print(epoch_line(metrics), flush=True)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bars.close()


@contextmanager
def training_process(*, quiet: bool = False) -> Iterator[tuple[Callback, bool]]:
    """The callback of this process, and whether it is the main one, which alone prints.

    A signal that stops a run becomes the exit code.

    Args:
        quiet: print nothing about the run; its log.txt has it.
    """
    from vitrail.training.callbacks import NullCallback
    from vitrail.training.parallel import destroy_process_group, init_process_group
    from vitrail.training.trainer import Interrupted

    is_main = init_process_group().is_main
    try:
        with ConsoleCallback() as console:
            yield (console if is_main and not quiet else NullCallback()), is_main
    except Interrupted as stop:
        sys.stdout.flush()
        raise typer.Exit(128 + stop.signal) from None
    finally:
        destroy_process_group()


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
