"""`vitrail inspect`: figures of a model's weights and of its attention to images."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.progress import ProgressBars
from vitrail.cli import overrides as options
from vitrail.cli.completion import FIGURES, figure_names
from vitrail.cli.model_arguments import load_model
from vitrail.cli.outputs import check_empty_folder

if TYPE_CHECKING:
    from vitrail.weights.bundle.bundle import Bundle

_FIGURES = f"{', '.join(FIGURES[:2])}; with images also {', '.join(FIGURES[2:])}"


def inspect(
    model: Annotated[str, typer.Argument(help="A weight file, a model folder, or hf:owner/name.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Images, or folders of images.")] = None,
    out: Annotated[Path, typer.Option(help="The output folder, new or empty.")] = Path("inspection"),
    only: Annotated[
        str | None,
        typer.Option(
            help=f"Figures to draw, separated by commas: {_FIGURES}.",
            show_default="all that are quick",
            autocompletion=figure_names,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Draw figures that take long, too; others are named with their time."),
    ] = False,
    layer: Annotated[
        int | None, typer.Option(help="The block whose attention is drawn, from 0.", show_default="the last")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="The attention head to draw, from 0.", show_default="all")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The class to explain, by name or number.", show_default="each image's predicted class"
        ),
    ] = None,
    max_images: Annotated[
        int, typer.Option(min=1, max=64, help="Images to draw; statistics use all of them.")
    ] = 8,
    device: options.Device = "auto",
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    settings: options.Set = None,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw figures of a model: filters, attention, attribution and more, on one HTML page.

    The output folder gets index.html, a self-contained page, and every figure as PNG, SVG and CSV.
    Without images, only the figures of the weights are drawn. Images that cannot be read are listed and
    skipped; the exit code is then 1.
    """
    from vitrail.images.formats.folders import expand_folders
    from vitrail.views.figure import InspectionRequest
    from vitrail.views.inspection_page import write_inspection

    check_empty_folder("--out", out)
    paths = expand_folders(images or [])
    arguments = options.load_arguments(family, keys, settings, size, device=device, offline=offline or None)
    bundle = load_model(model, arguments, quiet=quiet)
    figures = [name.strip() for name in only.split(",")] if only else []
    class_index = None if target is None else _find_class(target, bundle)
    with ProgressBars(enabled=not quiet) as bars:
        request = InspectionRequest(
            bundle, paths, max_images=max_images, layer=layer, head=head, target=class_index, progress=bars
        )
        if trained := request.trained_on():
            print(trained)
        command = shlex.join(["vitrail", *sys.argv[1:]])
        missing = write_inspection(request, out, only=figures, every=every, command=command)
    for name, reason in ({} if quiet else missing).items():
        print(f"No figure {name}: {reason}")
    for file, reason in request.corrupt.reasons.items():
        print(f"{file} could not be read: {reason}")
    print(f"Saved {printable(out / 'index.html')}, and every figure as .png, .svg and .csv")
    if request.corrupt.reasons:
        raise typer.Exit(1)


def _find_class(target: str, bundle: Bundle) -> int:
    """The index of a class, given its name or its index."""
    labels, count = list(bundle.labels or []), bundle.model.config.classes
    if target in labels:
        return labels.index(target)
    if target.isdecimal() and len(target) < 10 and int(target) < count:
        return int(target)
    hint = suggest(target, labels) if labels else f"Use a number from 0 to {count - 1}."
    raise InputError(f"The model has no class {printable(repr(target))} for --target. {hint}")
