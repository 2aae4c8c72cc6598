"""`vitrail convert`: convert a model to another family, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli import overrides as options


def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A weight file, a folder with one, or hf:owner/name.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="A new .safetensors or .npz file; a name without an ending is a folder with settings."
        ),
    ],
    to: Annotated[
        str, typer.Option(help="vitrail, hf, timm, torchvision, google, lucidrains, or the family of IN.")
    ] = "vitrail",
    classes: Annotated[
        int | None, typer.Option(min=0, help="Replace the head by a new one for this many classes.")
    ] = None,
    size: options.Size = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Change the model to this many input channels.")
    ] = None,
    offline: options.Offline = False,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write a model as a file of another library, and report what was changed and how close the logits are.

    A model with NaN or infinity in its weights is refused. The exit code is 1 if the other library's logits
    are NaN or infinity.
    """
    from vitrail.errors import printable
    from vitrail.weights.convert import convert as convert_file

    arguments = options.load_arguments(family, keys, given, size, classes=classes, channels=channels)
    report = convert_file(source, out, to=to, offline=offline, **arguments)
    lines = {
        "from": report.source,
        "to": f"{report.target}, {out}",
        "same": f"{report.same} tensors",
        "renamed": f"{report.renamed} tensors",
        "transformed": f"{report.transformed} tensors",
        "extra tensors": ", ".join(report.extras[:8]) + (" ..." if len(report.extras) > 8 else "") or "none",
        "largest logit difference": "unknown" if report.difference is None else f"{report.difference:.2g}",
        "compared with": report.checked_by,
    }
    for name, value in lines.items():
        print(f"{name:<25} {printable(value)}")
    for note in [] if quiet else report.notes:
        print(f"note: {printable(note)}")
    if not report.holds:
        typer.echo("vitrail: the other library's logits are NaN or infinity; do not use OUT.", err=True)
        raise typer.Exit(1)
