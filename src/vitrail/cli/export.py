"""`vitrail export`: a model in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli import facts as options
from vitrail.errors import InputError, printable


def export(
    model: Annotated[str, typer.Argument(help="A weight file, a folder with one, or hf:owner/name.")],
    to: Annotated[
        str, typer.Option(help="html: a page that computes the model in a browser. Only html is there.")
    ],
    out: Annotated[Path, typer.Option(help="A new file.")] = Path("classroom.html"),
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Put a small model into one HTML file: draw, and see what every part of it does.

    The file needs no server and no network; it can be mailed, or opened from a USB stick. A model that the
    page cannot compute is refused, with the field that stands in the way.
    """
    if to != "html":
        raise InputError("--to must name a form that is there.", printable(repr(to)), "There is: html.")

    from vitrail.export.html import check_place, write_classroom
    from vitrail.weights.load import load

    check_place(out)
    bundle = load(model, **options.facts(family, keys, given, size))
    notes = write_classroom(bundle, out, name=Path(model).stem)
    for note in notes:
        print(f"note: {note}")
    print(f"Written: {printable(out)}, {out.stat().st_size / 1e6:.1f} MB. Open it in a browser.")
