"""`vitrail embed`: the embeddings of images, as an index to search in."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option

from vitrail.base.errors import InputError, printable
from vitrail.base.progress import ProgressBars
from vitrail.cli.option_values import refuse_given
from vitrail.cli.options import (
    MODEL_OR_ONNX,
    NATIVE,
    WORKERS,
    Batch,
    ModelOptions,
    SpeedOptions,
    start_workers,
)
from vitrail.cli.outputs import check_new_files
from vitrail.cli.part_jobs import NOT_FOR_PARTS, JobOptions, run_parts
from vitrail.cli.streams import print_error

_SHOWN = 5  # images that could not be read


def embed(
    model: str = MODEL_OR_ONNX,
    images: list[str] = Argument(..., help="Images, or folders of images."),
    out: str = Option(
        "index.safetensors",
        "--out",
        "-o",
        help="The new index: a .safetensors file, or a .npy file with a .json of the names beside it; or "
        "a folder for parts, with a / at its end.",
    ),
    form: str | None = Option(
        None, "--format", help="Format of the parts: npy or parquet.", show_default="npy"
    ),
    batch: Batch = 32,
    native: bool | None = NATIVE,
    workers: str = WORKERS,
    *,
    jobs: JobOptions,
    opening: ModelOptions,
) -> None:
    """Save the embeddings of images as an index for vitrail search.

    Embeddings have length 1. Those of a CLIP or SigLIP file can be compared with words. Images that cannot
    be read are listed and have no row; the exit code is then 1.

    With a folder for --out, embeddings are written in parts, and the same command resumes after any
    interruption: see docs/scale.md. An image that cannot be read has a row of NaN then.
    """
    folder = jobs.folder(out, form or "")
    if folder is not None:
        from vitrail.predict.parts import PART_SIZE, PartOptions

        refuse_given({"--native": native}, NOT_FOR_PARTS)
        written = PartOptions("embed", form or "npy", 1, jobs.part_size or PART_SIZE)
        run_parts(folder, jobs, model, images, written, opening, batch=batch, workers=workers)
        return
    file = Path(out)
    if file.suffix not in (".safetensors", ".npy"):
        raise InputError(
            f"--out must name a .safetensors or .npy file, or a folder for parts with a / at its end, not "
            f"{printable(out)}."
        )
    beside = file.with_suffix(".json") if file.suffix == ".npy" else None
    check_new_files({"--out": file, "the names beside it": beside})

    from vitrail.predict.image_sources import expand_paths
    from vitrail.predict.index import build_index
    from vitrail.weights.bundle.own_shape import check_native

    start_workers(images, workers)
    predictor = opening.predictor(model, SpeedOptions(), batch=batch, workers=workers, native=native)
    if native:
        check_native(predictor.bundle)
    with ProgressBars(enabled=not opening.quiet) as bars:
        total = sum(1 for _ in expand_paths(images)) if bars.enabled else None
        index = build_index(
            predictor,
            images,
            model=model,
            arguments=opening.overrides(),
            progress=lambda done: bars("images", done, total),
        )
    for name, reason in list(index.errors.items())[:_SHOWN]:
        shown, why = printable(name), printable(reason)
        print_error(why if shown in why else f"{shown}: {why}")
    if not index.names:
        raise InputError("None of the images could be read, so there is no index; check the paths.")
    index.save(file)
    rows, width = index.embeddings.shape
    print(f"{_count(rows)}, embeddings of {width}: {printable(out)}")
    if index.errors:
        verb = "is" if len(index.errors) == 1 else "are"
        print_error(f"{_count(len(index.errors))} could not be read and {verb} not in the index.")
        raise typer.Exit(1)


def _count(images: int) -> str:
    return f"{images:,} image{'s' * (images != 1)}"
