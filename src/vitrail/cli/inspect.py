"""`vitrail inspect`: the figures that look inside a model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli import facts as options
from vitrail.cli.places import check_out
from vitrail.errors import InputError, printable

NAMES = (
    "filters, positions; and of pictures attention, rollout, attribution, scoring, lens, distance, "
    "features, similarity, ablation"
)


def inspect(
    model: Annotated[str, typer.Argument(help="A weight file, a folder with one, or hf:owner/name.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Pictures, or folders of pictures.")] = None,
    out: Annotated[Path, typer.Option(help="A new or empty folder.")] = Path("inspection"),
    only: Annotated[
        str | None, typer.Option(help=f"Some figures, with commas: {NAMES}.", show_default="all that fit")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="The block whose attention is drawn.", show_default="the last")
    ] = None,
    head: Annotated[int | None, typer.Option(help="One head of it.", show_default="all")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The class to explain, by name or number.", show_default="each picture's answer"),
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=64, help="Pictures that are drawn; all are counted.")] = 8,
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Look inside a model: the paper's figures, attention and attribution on your pictures, one page.

    The folder gets index.html, which needs no network and no other file, and every figure as PNG, SVG and
    CSV. Without pictures, the figures are those of the weights. The exit code is 1 where pictures could
    not be read: they are named, and left out.
    """
    from vitrail.report.inspection import Asked, write_inspection
    from vitrail.weights.load import load

    check_out(out)
    paths = expand(images or [])
    bundle = load(model, **options.facts(family, keys, given, size))
    with Bar() as bar:
        ask = Asked(
            bundle, paths, most=most, layer=layer, head=head, target=number_of(target, bundle), ahead=bar
        )
        wanted = [name.strip() for name in only.split(",")] if only else []
        missing = write_inspection(ask, out, only=wanted, command=shlex.join(["vitrail", *sys.argv[1:]]))
    for name, why in missing.items():
        print(f"No {name}: {why}")
    for file, why in ask.corrupt.names.items():
        print(f"{file} could not be read: {why}")
    print(f"Written: {printable(out)}, with index.html and every figure as .png, .svg and .csv.")
    if ask.corrupt.names:
        raise typer.Exit(1)


def expand(given: list[Path]) -> list[Path]:
    """Files as they are named, and every picture below a folder."""
    from vitrail.data.folders import pictures

    found: list[Path] = []
    for path in given:
        inside = pictures(path) if path.is_dir() else [path]
        if not inside:
            raise InputError("A folder must hold pictures.", f"{printable(path)} with none", "Name another.")
        if not path.exists():
            raise InputError(
                "A picture must be there.", f"{printable(path)}, which is not", "Check the path."
            )
        found += inside
    return found


def number_of(target: str | None, bundle: Any) -> int | None:
    """A class by its name, or by its number."""
    from vitrail.errors import suggest

    if target is None:
        return None
    labels, count = list(bundle.labels or []), bundle.model.config.classes
    if target in labels:
        return labels.index(target)
    if target.isdecimal() and len(target) < 10 and int(target) < count:
        return int(target)
    do = suggest(target, labels) if labels else f"A number from 0 to {count - 1}."
    raise InputError("--target must be one of the model's classes.", printable(target), do)


class Bar:
    """A bar at a terminal while figures are made."""

    def __enter__(self) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True)
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.tasks: dict[str, Any] = {}
        self.bar.start()
        return self

    def __call__(self, name: str, done: int, of: int) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=of)
        self.bar.update(self.tasks[name], completed=done)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
