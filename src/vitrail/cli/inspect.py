"""`vitrail inspect`: figures of a model's weights and of its attention to images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.progress import ProgressBars
from vitrail.cli.options import MODEL, ModelOptions
from vitrail.cli.outputs import check_empty_folder, this_command

if TYPE_CHECKING:
    from vitrail.weights.bundle.bundle import Bundle

OF_WEIGHTS = ("filters", "positions")
OF_IMAGES = (
    *("attribution", "rollout", "attention", "features", "lens", "scoring"),
    *("distance", "similarity", "ablation"),
)


def complete_figure(incomplete: str) -> list[str]:
    """Names separated by commas: the last one is completed."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in (*OF_WEIGHTS, *OF_IMAGES) if name.startswith(last)]


def inspect(
    model: str = MODEL,
    images: list[Path] | None = Argument(None, help="Images, or folders of images."),
    out: Path = Option(Path("inspection"), help="The output folder, new or empty."),
    only: str | None = Option(
        None,
        help=f"Figures to draw, separated by commas: {', '.join(OF_WEIGHTS)}; with images also "
        f"{', '.join(OF_IMAGES)}.",
        show_default="all that are quick",
        autocompletion=complete_figure,
    ),
    every: bool = Option(
        False, "--all", help="Draw figures that take long, too; others are named with their time."
    ),
    layer: int | None = Option(
        None, help="The block whose attention is drawn, from 0.", show_default="the last"
    ),
    head: int | None = Option(None, help="The attention head to draw, from 0.", show_default="all"),
    target: str | None = Option(
        None, help="The class to explain, by name or number.", show_default="each image's predicted class"
    ),
    max_images: int = Option(8, min=1, max=64, help="Images to draw; statistics use all of them."),
    *,
    opening: ModelOptions,
) -> None:
    """Draw figures of a model and its attention, on one HTML page.

    The output folder gets index.html, a self-contained page, and every figure as PNG, SVG and CSV.
    Without images, only the figures of the weights are drawn. Images that cannot be read are listed and
    skipped; the exit code is then 1.
    """
    from vitrail.images.formats.folders import expand_folders
    from vitrail.views.figure import InspectionRequest
    from vitrail.views.inspection_page import write_inspection

    check_empty_folder("--out", out)
    paths = expand_folders(images or [])
    bundle = opening.load(model)
    figures = [name.strip() for name in only.split(",")] if only else []
    class_index = None if target is None else _find_class(target, bundle)
    with ProgressBars(enabled=not opening.quiet) as bars:
        request = InspectionRequest(
            bundle, paths, max_images=max_images, layer=layer, head=head, target=class_index, progress=bars
        )
        if trained := request.trained_on():
            print(trained)
        missing = write_inspection(request, out, only=figures, every=every, command=this_command())
    for name, reason in ({} if opening.quiet else missing).items():
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
