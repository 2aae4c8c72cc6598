"""`vitrail check`: exercises that mark themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vitrail.exercises import Mark

STYLES = {"right": "green", "wrong": "bold red", "not yet": "dim", "error": "bold magenta"}


def check(
    file: Annotated[Path, typer.Argument(help="A Python file with your functions.")],
    start: Annotated[bool, typer.Option("--start", help="Write a new file to fill in, and stop.")] = False,
    only: Annotated[str | None, typer.Option(help="Mark this exercise alone.", metavar="NAME")] = None,
    limit: Annotated[float, typer.Option(min=1, max=3600, help="Seconds that your code may take.")] = 60,
) -> None:
    """Write the parts of a ViT yourself, and be told what is right and what is wrong, and why.

    Your file runs in a process of its own; what it prints is not shown. The exit code is 1 while
    something is wrong or not written yet.
    """
    from vitrail.errors import printable
    from vitrail.exercises import NAMES, check_file, start_file

    if start:
        start_file(file)
        name = printable(file)
        print(f"{name} is there: {len(NAMES)} functions to write. Then: vitrail check {name}")
        return
    marks = check_file(file, NAMES if only is None else [only], limit)
    show(marks)
    if any(mark.verdict != "right" for mark in marks):
        raise typer.Exit(1)


def show(marks: list[Mark]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("exercise", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what must hold, and what came", overflow="fold")
    for mark in marks:
        likely = f"\nLikely: {mark.likely}" if mark.likely else ""
        words = Text.assemble(mark.words, (likely, "bold"))
        table.add_row(Text(mark.name), Text(mark.verdict, style=STYLES[mark.verdict]), words)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\n{sum(mark.verdict == 'right' for mark in marks)} of {len(marks)} right.")
