"""`vitrail probe`: a classifier from frozen features, without training."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from typer import Option

from vitrail.base.errors import InputError, printable
from vitrail.base.progress import ProgressBars
from vitrail.cli.option_values import parse_workers
from vitrail.cli.options import DATA, MODEL, WORKERS, Batch, ModelOptions
from vitrail.cli.outputs import check_new_files


def probe(
    model: str = MODEL,
    data: str = DATA,
    save: Path | None = Option(
        None, metavar="FILE", help="Save the model with its new head to this new .safetensors file."
    ),
    batch: Batch = 128,
    workers: str = WORKERS,
    *,
    opening: ModelOptions,
) -> None:
    """Make a classifier from frozen features, without training.

    It is a logistic regression on the features of a model. Each image is read once. The result is an ordinary
    file for predict, evaluate, serve, export and train --from. Without a validation set, a part of the
    training images is held out to measure accuracy.
    """
    if save is not None and save.suffix != ".safetensors":
        raise InputError(f"--save must name a .safetensors file, not {printable(save)}; change its ending.")
    check_new_files({"--save": save})

    from vitrail.evaluation.probes import probe_head
    from vitrail.images.formats.sources import open_dataset

    with ProgressBars(enabled=not opening.quiet) as bars:
        rows, files = partial(bars, "reading rows", total=None), partial(bars, "reading files")
        dataset = open_dataset(data, progress=files, on_rows=rows)
        bundle = opening.load(model, channels=dataset.channels)
        result = probe_head(bundle, dataset, batch=batch, workers=parse_workers(workers), progress=bars)
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
    for note in [] if opening.quiet else dataset.notes:
        print(f"note: {printable(note, 500)}")
