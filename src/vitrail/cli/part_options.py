"""Output in parts, for `vitrail predict` and `vitrail embed`: a folder for --out, job arrays, Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.progress import ProgressBars
from vitrail.cli.model_arguments import check_classes, print_predictor_notes
from vitrail.cli.streams import print_error

if TYPE_CHECKING:
    from vitrail.predict.parts import PartOptions, PartResult

ENGINES = ("local", "ray")
_MAX_JOBS = 1_000_000
_FILE_SUFFIXES = (".csv", ".jsonl", ".json", ".txt", ".parquet", ".npy", ".safetensors")

Part = Annotated[
    str | None,
    typer.Option(help="For job arrays, with a folder for --out: 3/16 is the third sixteenth of the images."),
]
PartSize = Annotated[
    int | None,
    typer.Option(min=1, max=100_000_000, help="Images in a part of a folder.", show_default="10000"),
]
EngineOption = Annotated[
    str,
    typer.Option("--engine", help="Who computes the parts: local, this process; ray, a Ray cluster."),
]


@dataclass(frozen=True)
class PartRequest:
    """What the options ask for."""

    folder: Path
    part: int
    of: int
    engine: str


def parse_parts(
    out: str | None, form: str, part: str | None, part_size: int | None, engine: str
) -> PartRequest | None:
    """The request for parts; None if the output is a file or the terminal."""
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}. {suggest(engine, ENGINES)}")
    is_folder = out is not None and (out.endswith(os.sep) or os.path.isdir(out))
    used = [
        option
        for option, given in (
            (f"--format {form}", form in ("parquet", "npy")),
            ("--part", part is not None),
            ("--part-size", part_size is not None),
            ("--engine ray", engine == "ray"),
        )
        if given
    ]
    if not used and not is_folder:
        return None
    if out is None:
        raise InputError(f"{used[0]} writes parts; name a folder for them with --out, such as --out parts/.")
    suffix = Path(out).suffix.lower()
    if used and not is_folder and suffix in _FILE_SUFFIXES:
        raise InputError(
            f"{used[0]} writes a folder of parts, and --out {printable(out)} looks like a file; name a "
            "folder, such as --out parts/."
        )
    number, of = _parse_part(part)
    return PartRequest(Path(out), number, of, engine)


def check_alone(others: Mapping[str, object]) -> None:
    """Refuse options that a folder of parts does not have."""
    for option, value in others.items():
        if value is not None:
            raise InputError(
                f"{option} is not for a folder of parts; use vitrail embed, or a file for --out."
            )


def _parse_part(part: str | None) -> tuple[int, int]:
    if part is None:
        return 1, 1
    match = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", part)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= of <= _MAX_JOBS:
        raise InputError(
            "--part must be such as 3/16, counted from 1/16 to 16/16 and written in the digits 0 to 9, not "
            f"{printable(part)!r}."
        )
    return number, of


def run_parts(
    request: PartRequest,
    model: Any,
    inputs: Sequence[str],
    options: PartOptions,
    how: Mapping[str, Any],
    *,
    quiet: bool,
) -> None:
    """Write the parts of this job that are not there yet, and say what is.

    Args:
        model, how: the arguments of `Predictor`.
    """
    from vitrail.predict.image_list import ImageList
    from vitrail.predict.part_files import check_format
    from vitrail.predict.parts import Parts, write_parts
    from vitrail.predict.predictor import Predictor

    if "-" in inputs:
        raise InputError("Parts need a fixed list of images, not stdin; name files, folders or shards.")
    check_format(options.form, options.content)
    with ProgressBars(enabled=not quiet) as bars:
        images = ImageList(inputs, lambda done, total: bars("reading shards", done, total))
        predictor = Predictor(model, **how)
        print_predictor_notes(predictor, how, quiet=quiet)
        if options.content == "predict":
            check_classes(predictor.bundle)
            if not predictor.config.classes:
                raise InputError("This model has no head and gives only embeddings; use vitrail embed.")
        parts = Parts(request.folder, images, predictor, options)

        def progress(done: int, total: int) -> None:
            bars("images", done, total)

        if request.engine == "ray":
            from vitrail.predict.ray_engine import write_with_ray

            result = write_with_ray(parts, model, inputs, how, request.part, request.of, progress)
        else:
            result = write_parts(parts, request.part, request.of, progress)
    _print_result(request, result)


def _print_result(request: PartRequest, result: PartResult) -> None:
    before = f", {result.found:,} of them from before" if result.found else ""
    count = f"{result.parts:,} part{'s' * (result.parts != 1)}{before}"
    print(f"{result.images:,} images in {count}: {printable(request.folder)}")
    if result.failed:
        print_error(
            f"{result.failed:,} images have no result; the files part-....errors in "
            f"{printable(request.folder)} have the reasons."
        )
        raise typer.Exit(1)
