"""`vitrail verify`: check that a file's golden inputs still give the stored logits."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument

from vitrail.cli.options import DEVICE


def verify(
    file: Path = Argument(..., help="A vitrail file."),
    device: str = DEVICE,
) -> None:
    """Check that a model still gives the logits stored in its file.

    The file's golden inputs are run through its model on this machine. The model is computed in fp32, also on
    a GPU, and the tolerance is the same everywhere. The exit code is 0 if the logits agree, and 1 if they
    differ or are NaN or infinity.
    """
    from vitrail.base.errors import printable
    from vitrail.base.version import __version__
    from vitrail.weights.bundle.golden import verify as verify_file

    result = verify_file(file, device)  # imports torch only once the file is known to be a vitrail file

    import torch

    versions = ", ".join(f"{printable(n)} {printable(v)}" for n, v in result.written_by.items())
    print(f"written by   {versions or 'unknown versions'}")
    where = "the CPU" if result.device == "cpu" else result.device
    if result.device.startswith("cuda"):
        where = torch.cuda.get_device_name(result.device)
    print(f"read by      vitrail {__version__}, torch {torch.__version__}")
    print(f"computed     on {where}, in fp32")
    print(f"same class   {result.same_class} of {result.inputs} golden inputs")
    print(f"difference   {result.difference:.2g}, at most {result.limit:.2g}")
    if result.not_finite:
        shown = ", ".join(result.not_finite[:8]) + (" ..." if len(result.not_finite) > 8 else "")
        print(f"not finite   NaN or infinity in {shown}")
    print("The logits agree." if result.holds else "The logits do not agree.")
    if not result.holds:
        raise typer.Exit(1)
