"""`vitrail embed`: the embeddings of images, as an index to search in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.base.errors import InputError, printable
from vitrail.base.progress import ProgressBars
from vitrail.cli import overrides as options
from vitrail.cli.model_arguments import check_trained_native, print_predictor_notes
from vitrail.cli.outputs import check_new_files
from vitrail.cli.part_options import EngineOption, Part, PartSize, check_alone, parse_parts, run_parts
from vitrail.cli.streams import print_error

_SHOWN = 5  # images that could not be read
_OF_THIS_MACHINE = ("device", "offline")  # arguments that do not change embeddings


def embed(
    model: Annotated[
        str, typer.Argument(help="A weight file, a model folder, hf:owner/name, or an .onnx file.")
    ],
    images: Annotated[list[str], typer.Argument(help="Images, or folders of images.")],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            help="The new index: a .safetensors file, or a .npy file with a .json of the names beside it; "
            "or a folder for parts, with a / at its end.",
        ),
    ] = "index.safetensors",
    form: Annotated[
        str | None,
        typer.Option("--format", help="Format of the parts: npy or parquet.", show_default="npy"),
    ] = None,
    part: Part = None,
    part_size: PartSize = None,
    engine: EngineOption = "local",
    batch: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, help="Images per forward pass; results differ by rounding only."),
    ] = 32,
    native: options.Native = None,
    workers: options.WorkersOption = "auto",
    device: options.Device = "auto",
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    settings: options.Set = None,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> None:
    """Compute the embedding of each image and save them as an index for vitrail search.

    Embeddings have length 1. Those of a CLIP or SigLIP file can be compared with words. Images that cannot
    be read are listed and have no row; the exit code is then 1.

    With a folder for --out, embeddings are written in parts, and the same command resumes after any
    interruption: see docs/scale.md. An image that cannot be read has a row of NaN then.
    """
    request = parse_parts(out, form or "", part, part_size, engine)
    overrides = options.load_arguments(family, keys, settings, size, device=device, offline=offline or None)
    how = {"batch": batch, "workers": options.parse_workers(workers), **overrides}
    if request is not None:
        check_alone({"--native": native})
        from vitrail.predict.parts import PART_SIZE, PartOptions

        kind = PartOptions("embed", form or "npy", 1, part_size or PART_SIZE)
        run_parts(request, model, images, kind, how, quiet=quiet)
        return
    file = Path(out)
    if file.suffix not in (".safetensors", ".npy"):
        raise InputError(
            f"--out must name a .safetensors or .npy file, or a folder for parts with a / at its end, not "
            f"{printable(out)}."
        )
    beside = file.with_suffix(".json") if file.suffix == ".npy" else None
    check_new_files({"--out": file, "the names beside it": beside})

    from vitrail.predict import Predictor
    from vitrail.predict.image_sources import expand_paths
    from vitrail.predict.index import build_index

    options.expect_files(images, how["workers"])
    predictor = Predictor(model, native=native, **how)
    check_trained_native(predictor, native)
    print_predictor_notes(predictor, overrides, quiet=quiet)
    with ProgressBars(enabled=not quiet) as bars:
        total = sum(1 for _ in expand_paths(images)) if bars.enabled else None
        index = build_index(
            predictor,
            images,
            model=model,
            arguments={name: overrides[name] for name in overrides if name not in _OF_THIS_MACHINE},
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
