"""`vitrail check`: exercises that check themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vitrail_course.exercises import ExerciseResult

_STYLES = {"correct": "green", "wrong": "bold red", "not yet": "dim", "error": "bold magenta"}


def check(
    file: Annotated[Path, typer.Argument(help="A Python file with your functions.")],
    start: Annotated[
        bool, typer.Option("--start", help="Write FILE with empty functions to fill in, and exit.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Check only this exercise.", metavar="NAME")] = None,
    limit: Annotated[float, typer.Option(min=1, max=3600, help="Time limit for your code in seconds.")] = 60,
) -> None:
    """Check your own implementation of a ViT, function by function.

    Each function is compared with the reference, and likely mistakes are named. The exit code is 1 until
    all functions are correct.

    The file runs with your rights, in a separate process that is no sandbox: check only files that you trust,
    or do it in a container. What the file prints is not shown.
    """
    from vitrail.base.errors import printable
    from vitrail_course.exercises import NAMES, check_file, start_file

    if start:
        start_file(file)
        name = printable(file)
        print(f"Saved {name} with {len(NAMES)} functions to write. Check them with: vitrail check {name}")
        return
    marks = check_file(file, NAMES if only is None else [only], limit)
    _show_marks(marks)
    if any(mark.verdict != "correct" for mark in marks):
        raise typer.Exit(1)


def _show_marks(marks: list[ExerciseResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("exercise", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("task, and what is wrong", overflow="fold")
    for mark in marks:
        likely = f"\nLikely mistake: {mark.hint}" if mark.hint else ""
        text = Text.assemble(mark.message, (likely, "bold"))
        table.add_row(Text(mark.name), Text(mark.verdict, style=_STYLES[mark.verdict]), text)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\n{sum(mark.verdict == 'correct' for mark in marks)} of {len(marks)} correct.")
