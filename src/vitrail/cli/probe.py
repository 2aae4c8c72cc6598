"""`vitrail probe`: a classifier from frozen features, without training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vitrail.base.errors import InputError, printable
from vitrail.base.progress import ProgressBars
from vitrail.cli import overrides as options
from vitrail.cli.model_arguments import load_model
from vitrail.cli.outputs import check_new_files


def probe(
    model: Annotated[str, typer.Argument(help="A weight file, a model folder, or hf:owner/name.")],
    data: Annotated[
        str,
        typer.Argument(
            help="A folder with one folder of images per class, a .csv, .jsonl, .npz or packed file, or "
            '"digits".'
        ),
    ],
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the model with its new head to this new .safetensors file."),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, help="Images per forward pass; results differ by rounding only."),
    ] = 128,
    workers: options.WorkersOption = "auto",
    device: options.Device = "auto",
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    settings: options.Set = None,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a classifier for DATA without training: logistic regression on the frozen features of a model.

    Each image is read once. The result is an ordinary file for predict, evaluate, serve, export and
    train --from. Without a validation set, a part of the training images is held out to measure accuracy.
    """
    if save is not None and save.suffix != ".safetensors":
        raise InputError(f"--save must name a .safetensors file, not {printable(save)}; change its ending.")
    check_new_files({"--save": save})

    from vitrail.evaluation.probes import probe_head
    from vitrail.images.formats.sources import open_dataset

    arguments = options.load_arguments(family, keys, settings, size, device=device, offline=offline or None)
    with ProgressBars(enabled=not quiet) as bars:
        rows, files = partial(bars, "reading rows", total=None), partial(bars, "reading files")
        dataset = open_dataset(data, progress=files, on_rows=rows)
        bundle = load_model(model, {"channels": dataset.channels, **arguments}, quiet=quiet)
        result = probe_head(
            bundle, dataset, batch=batch, workers=options.parse_workers(workers), progress=bars
        )
    lines = {
        "training images": f"{result.images:,}, {len(dataset.classes):,} classes",
        "L2": f"{result.l2:g}, selected on a fifth of them",
    }
    if result.accuracy is not None:
        lines["accuracy"] = f"{result.accuracy:.2%} of {result.evaluated:,} images that were not used"
    if save is not None:
        result.bundle.save(save)
        lines["saved"] = printable(save)
    for name, value in lines.items():
        print(f"{name:<16} {value}")
    for note in [] if quiet else dataset.notes:
        print(f"note: {printable(note, 500)}")
