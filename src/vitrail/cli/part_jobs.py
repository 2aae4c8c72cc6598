"""Output in parts, for `vitrail predict` and `vitrail embed`: a folder for --out, job arrays, Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.progress import ProgressBars
from vitrail.cli.option_groups import options
from vitrail.cli.option_values import parse_workers
from vitrail.cli.options import ModelOptions, check_classes
from vitrail.cli.streams import print_error

if TYPE_CHECKING:
    from vitrail.predict.parts import PartOptions, PartResult

NOT_FOR_PARTS = "OPTION is not for a folder of parts; use vitrail embed, or a file for --out."
_ENGINES = ("local", "ray")
_MAX_JOBS = 1_000_000
_FILE_SUFFIXES = (".csv", ".jsonl", ".json", ".txt", ".parquet", ".npy", ".safetensors")


@options
class JobOptions:
    """Which parts this process writes, and how."""

    part: str | None = Option(
        None, help="For job arrays, with a folder for --out: 3/16 is the third sixteenth of the images."
    )
    part_size: int | None = Option(
        None, min=1, max=100_000_000, help="Images in a part of a folder.", show_default="10000"
    )
    engine: str = Option("local", help="Who computes the parts: local, this process; ray, a Ray cluster.")

    def folder(self, out: str | None, form: str) -> Path | None:
        """The folder for parts; None if the output is a file or the terminal."""
        if self.engine not in _ENGINES:
            raise InputError(f"unknown engine {self.engine!r}. {suggest(self.engine, _ENGINES)}")
        uses = {
            f"--format {form}": form in ("parquet", "npy"),
            "--part": self.part is not None,
            "--part-size": self.part_size is not None,
            "--engine ray": self.engine == "ray",
        }
        used = next((option for option, is_used in uses.items() if is_used), None)
        is_folder = out is not None and (out.endswith(os.sep) or os.path.isdir(out))
        if not used and not is_folder:
            return None
        if out is None:
            raise InputError(f"{used} writes parts; name a folder for them with --out, such as --out parts/.")
        if not is_folder and Path(out).suffix.lower() in _FILE_SUFFIXES:
            raise InputError(
                f"{used} writes a folder of parts, and --out {printable(out)} looks like a file; name a "
                "folder, such as --out parts/."
            )
        self.numbers()
        return Path(out)

    def numbers(self) -> tuple[int, int]:
        """The number of this job, from 1, and of all jobs."""
        match = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", self.part or "1/1")
        number, of = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= of <= _MAX_JOBS:
            raise InputError(
                "--part must be such as 3/16, counted from 1/16 to 16/16 and written in the digits 0 to 9, "
                f"not {printable(self.part)!r}."
            )
        return number, of


def run_parts(
    folder: Path,
    jobs: JobOptions,
    model: Any,
    inputs: Sequence[str],
    written: PartOptions,
    opening: ModelOptions,
    *,
    batch: int,
    workers: str,
) -> None:
    """Write the parts of this job that are not there yet, and say what is.

    Args:
        model: the name of a model, or a bundle with a head from words.
    """
    from vitrail.predict.part_files import check_format
    from vitrail.predict.parts import ImageList, Parts
    from vitrail.predict.predictor import Predictor

    if "-" in inputs:
        raise InputError("Parts need a fixed list of images, not stdin; name files, folders or shards.")
    if jobs.engine == "ray" and not isinstance(model, str):
        raise InputError("--engine ray needs a model file, and not one with --labels; use --engine local.")
    check_format(written.form, written.content)
    arguments = opening.arguments() if isinstance(model, str) else {}
    open_model = partial(Predictor, model, batch=batch, workers=parse_workers(workers), **arguments)
    with ProgressBars(enabled=not opening.quiet) as bars:
        images = ImageList(inputs, lambda done, total: bars("reading shards", done, total))
        predictor = open_model()
        opening.print_notes(predictor)
        if written.content == "predict":
            check_classes(predictor.bundle)
            if not predictor.config.classes:
                raise InputError("This model has no head and gives only embeddings; use vitrail embed.")
        parts = Parts(folder, images, predictor, written)
        progress = partial(bars, "images")
        if jobs.engine == "ray":
            from vitrail.predict.ray_engine import write_with_ray

            result = write_with_ray(parts, open_model, inputs, jobs.numbers(), progress)
        else:
            result = parts.write_missing(*jobs.numbers(), progress)
    _print_result(folder, result)


def _print_result(folder: Path, result: PartResult) -> None:
    before = f", {result.found:,} of them from before" if result.found else ""
    count = f"{result.parts:,} part{'s' * (result.parts != 1)}{before}"
    print(f"{result.images:,} images in {count}: {printable(folder)}")
    if result.failed:
        print_error(
            f"{result.failed:,} images have no result; the files part-....errors in {printable(folder)} have "
            "the reasons."
        )
        raise typer.Exit(1)
