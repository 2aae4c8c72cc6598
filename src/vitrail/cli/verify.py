"""`vitrail verify`: do the golden inputs still give the golden logits?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(file: Annotated[Path, typer.Argument(help="A vitrail file.")]) -> None:
    """Run a file's golden inputs through its model, here and now, and compare with what it gave then.

    The exit code is 0 where the logits agree, and 1 where they do not or are not numbers (NaN, infinity).
    """
    from vitrail import __version__
    from vitrail.errors import printable
    from vitrail.weights.verify import verify as check

    verdict = check(file)  # torch is loaded only once the file is known to be one of ours

    import torch

    then = ", ".join(f"{printable(n)} {printable(v)}" for n, v in verdict.written_by.items())
    print(f"written by   {then or 'unknown versions'}")
    print(f"read by      vitrail {__version__}, torch {torch.__version__}")
    print(f"same class   {verdict.same_class} of {verdict.inputs} golden inputs")
    print(f"difference   {verdict.difference:.2g}, of at most {verdict.limit:.2g}")
    if verdict.not_finite:
        shown = ", ".join(verdict.not_finite[:8]) + (" ..." if len(verdict.not_finite) > 8 else "")
        print(f"not finite   NaN or infinity in {shown}")
    print("It holds." if verdict.holds else "It does not hold.")
    if not verdict.holds:
        raise typer.Exit(1)
