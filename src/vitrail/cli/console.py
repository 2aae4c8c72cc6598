"""Training on the console: messages, the plan, a progress bar and one line per epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitrail.cli.progress import ProgressBars
from vitrail.errors import printable

if TYPE_CHECKING:
    from vitrail.training.callbacks import Progress

_BRIEF_PLAN = ("data", "images", "parameters")


class ConsoleCallback:
    """A callback that prints the events of a run.

    Args:
        brief: print the data, the images and the number of parameters, and nothing else but the bar.
    """

    def __init__(self, *, brief: bool = False) -> None:
        self.brief = brief
        self.seconds = 0.0  # from the plan to the end of the last epoch
        self._bars = ProgressBars()
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
        self._start = time.monotonic()

    def on_progress(self, progress: Progress) -> None:
        detail = (
            f"loss {progress.loss:.3f}, accuracy {progress.accuracy:.1%}, "
            f"{progress.images_per_second:,.0f} images/s"
        )
        title = f"epoch {progress.epoch + 1}"
        self._bars("training", progress.step, progress.steps, detail, title)

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        from vitrail.training.callbacks import epoch_line

        self.seconds = time.monotonic() - self._start
        if not self.brief:
            print(epoch_line(metrics), flush=True)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bars.close()


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
