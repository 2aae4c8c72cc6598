"""`vitrail convert`: a model from one family to another, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli import facts as options


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
        str, typer.Option(help="vitrail, hf, timm, torchvision, google, or where IN came from.")
    ] = "vitrail",
    classes: Annotated[
        int | None, typer.Option(min=0, help="For so many classes, with a fresh head.")
    ] = None,
    size: options.Size = None,
    channels: Annotated[int | None, typer.Option(min=1, help="For pictures with so many channels.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Take hf:owner/name from the cache.")] = False,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Write a model as a file of another library, and say what was changed and how near the logits are.

    A model with NaN or infinity in its weights is refused. The exit code is 1 where logits come out as such.
    """
    from vitrail.weights.convert import convert as run

    how = options.facts(family, keys, given, size, classes=classes, channels=channels)
    report = run(source, out, to=to, offline=offline, **how)
    lines = {
        "from": report.source,
        "to": f"{report.target}, {out}",
        "same": f"{report.same} tensors",
        "renamed": f"{report.renamed} tensors",
        "transformed": f"{report.transformed} tensors",
        "kept beside": ", ".join(report.extras[:8]) + (" ..." if len(report.extras) > 8 else "") or "none",
        "largest logit difference": "not known" if report.difference is None else f"{report.difference:.2g}",
        "compared with": report.checked_by,
    }
    from vitrail.errors import printable

    for word, value in lines.items():
        print(f"{word:<25} {printable(value)}")
    for note in report.notes:
        print(f"note: {printable(note)}")
    if not report.holds:
        typer.echo("vitrail: The other library's logits hold NaN or infinity; do not use OUT.", err=True)
        raise typer.Exit(1)
