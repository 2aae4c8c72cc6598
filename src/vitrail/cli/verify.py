"""`vitrail verify`: check that a file's golden inputs still give the stored logits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(file: Annotated[Path, typer.Argument(help="A vitrail file.")]) -> None:
    """Run a file's golden inputs through its model on this machine, and compare with the stored logits.

    The exit code is 0 if the logits agree, and 1 if they differ or are NaN or infinity.
    """
    from vitrail import __version__
    from vitrail.errors import printable
    from vitrail.weights.verify import verify as verify_file

    result = verify_file(file)  # imports torch only once the file is known to be a vitrail file

    import torch

    versions = ", ".join(f"{printable(n)} {printable(v)}" for n, v in result.written_by.items())
    print(f"written by   {versions or 'unknown versions'}")
    print(f"read by      vitrail {__version__}, torch {torch.__version__}")
    print(f"same class   {result.same_class} of {result.inputs} golden inputs")
    print(f"difference   {result.difference:.2g}, at most {result.limit:.2g}")
    if result.not_finite:
        shown = ", ".join(result.not_finite[:8]) + (" ..." if len(result.not_finite) > 8 else "")
        print(f"not finite   NaN or infinity in {shown}")
    print("The logits agree." if result.holds else "The logits do not agree.")
    if not result.holds:
        raise typer.Exit(1)
