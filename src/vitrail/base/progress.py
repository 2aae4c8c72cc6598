"""Progress bars of commands and runs: on stderr, only at a terminal, removed at the end."""

from __future__ import annotations

import sys
from typing import Any


class ProgressBars:
    """A bar for each named task: count, total and time left. Silent if stderr is not a terminal.

    with ProgressBars() as bars:
        bars("decoding", 3, 100)

    Args:
        enabled: set to False if the command prints its rows to the same terminal.
        time_left: set to False if the details have it.
    """

    def __init__(self, *, enabled: bool = True, time_left: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.enabled = enabled and console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            *[TimeRemainingColumn()] * time_left,
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # print() then appears above the bars
            disable=not self.enabled,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, name: str, done: int, total: int | None, detail: str = "", title: str = "") -> None:
        """Update the bar of a task; the first call adds one, and so does a count that is lower than before.

        Args:
            total: None if it is not known.
            detail: text after the count.
            title: text before the bar; the name by default.
        """
        if not self.enabled:
            return
        self._progress.start()
        task = self._tasks.get(name)
        if task is None or done < self._progress.tasks[task].completed:  # a task may start again
            for earlier in self._progress.tasks:
                if earlier.total is None:  # nothing else would end it
                    self._progress.update(earlier.id, visible=False)
            task = self._tasks[name] = self._progress.add_task(name, total=total, detail="")
        self._progress.update(task, completed=done, total=total, detail=detail, description=title or name)

    def close(self) -> None:
        """Remove the bars; a later call shows new ones."""
        self._progress.stop()
