"""`vitrail doctor`: what is wrong with my data?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vitrail.data.doctor import Findings

MOST = 10  # lines of each kind; all of them are in the JSON


def doctor(
    data: Annotated[str, typer.Argument(help="A folder of pictures, a table, an array file, or: digits.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Threads that decode files.")] = 2,
) -> None:
    """Decode every picture and say what is wrong: corrupt files, pictures in two splits, small classes.

    No file is changed. The exit code is 1 where files cannot be read, or the same picture is in two
    splits or under two labels.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vitrail.data.doctor import examine
    from vitrail.data.sources import open_data

    pictures = open_data(data)
    splits = (pictures.train, pictures.val, pictures.test)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=sum(len(split) for split in splits if split is not None))
        found = examine(pictures, workers, lambda done: bar.update(task, completed=done))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(found)
    if found.ill:
        raise typer.Exit(1)


def show(found: Findings) -> None:
    counts = ", ".join(f"{count:,} in {name}" for name, count in found.pictures.items())
    print(f"pictures: {counts}")
    print(f"modes: {', '.join(f'{mode} {count:,}' for mode, count in found.modes.items()) or 'none'}")
    section("cannot be read", [f"{name}: {why}" for name, why in found.corrupt.items()])
    section("the same picture in two splits", [" = ".join(names) for names in found.leaked])
    section("the same picture under two labels", [" = ".join(names) for names in found.disputed])
    section("the same picture twice", [" = ".join(names) for names in found.twice])
    section("few pictures to learn from", [f"{name}: {count}" for name, count in found.few.items()])
    section("very small pictures", found.small)
    print("Something must be repaired." if found.ill else "Nothing must be repaired.")


def section(title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        print(f"\n{title} ({len(lines):,}):")
        for line in lines[:MOST]:
            print(f"  {line}")
        if len(lines) > MOST:
            print(f"  and {len(lines) - MOST:,} more; --json has them all")
