"""`vitrail lab` and `vitrail notes`: the claims of the lecture notes, run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.places import check_out
from vitrail.cli.streams import outlasting
from vitrail.errors import InputError, printable


def lab(
    name: Annotated[str | None, typer.Argument(help="Which; without one, they are listed.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="MNIST's files, a text, sounds: what the lab takes.", show_default="what is built in"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new or empty folder.", show_default="lab-NAME")] = None,
    small: Annotated[bool, typer.Option("--small", help="Fewer and smaller: in seconds.")] = False,
) -> None:
    """Run a claim of the lecture notes: an experiment with a number, a picture and a verdict.

    The folder gets NAME.json, with all numbers, and NAME.png and NAME.svg.
    """
    from vitrail.labs.lab import LABS, find, joined, number_in_words, perform

    if name is None:
        longest = max(map(len, LABS))
        for one in LABS:
            print(f"{one:{longest}}  {find(one).CLAIM}")
        return
    find(name)
    place = Path(f"lab-{name}") if out is None else out
    check_out(place)
    found = perform(name, place, "small" if small else "full", data)
    print(f"note:    {found['note']}")
    print(f"claim:   {found['claim']}")
    print(f"number:  {number_in_words(found)}")
    print(f"verdict: {joined(found['verdict'], found['condition'])}")
    print(found["sentence"])
    print(f"Written: {printable(place)}, with {name}.json, {name}.png and {name}.svg.")


def notes(
    run: Annotated[bool, typer.Option("--run", help="Run all labs first: an hour on two cores.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --run, a new or empty folder.", show_default="notes")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="With --run, fewer and smaller.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="The published results that the notes print, ours beside them.")
    ] = False,
) -> None:
    """Print what the lecture notes claim, and what came of it when it was run: number and verdict.

    The table is of our own run; with --run it is of yours, whose numbers and pictures are then in --out.
    """
    from vitrail.labs import lab as labs

    if (small or out is not None) and not run:
        option = "--small" if small else "--out"
        raise InputError(f"{option} is for --run.", f"{option} alone", "Add --run, or leave it out.")
    if table:
        if run:
            raise InputError("Published results are not run.", "--table --run", "Leave one of them out.")
        show_published(markdown)
        return
    place = Path("notes") if out is None else out
    with outlasting(printable(place / "results.json")) if run else nullcontext():
        results = run_all(place, small) if run else labs.known()
        if markdown:
            print(labs.markdown(results), end="")
        else:
            show(results)
        if run:
            print(f"Written: {printable(place)}, with results.json, and every lab's numbers and picture.")


def show_published(markdown: bool) -> None:
    from vitrail.labs import table

    if markdown:
        print(table.markdown(), end="")
    else:
        table.show()


def run_all(out: Path, small: bool) -> list[dict[str, Any]]:
    from vitrail.labs.collect import collect, write

    def tell(result: dict[str, Any]) -> None:
        print(f"{result['name']}: {result['verdict']} ({result['seconds']} s)", flush=True)

    check_out(out)
    results = collect(out, "small" if small else "full", tell)
    write(results, out / "results.json")
    return results


def show(results: Sequence[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from vitrail.labs.lab import COLUMNS, row

    table = Table(box=SIMPLE_HEAD, show_lines=True, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for result in results:
        table.add_row(*row(result))
    Console(highlight=False, markup=False).print(table)
