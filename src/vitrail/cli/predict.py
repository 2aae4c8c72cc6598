"""`vitrail predict`: classify files, folders and lists of images."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer
from typer import Argument, Option

from vitrail.base.errors import InputError, printable, require_extra
from vitrail.base.progress import ProgressBars
from vitrail.base.safe_files import naming_file
from vitrail.cli.option_values import refuse_given
from vitrail.cli.options import (
    MODEL_OR_ONNX,
    NATIVE,
    WORKERS,
    Batch,
    ModelOptions,
    SpeedOptions,
    WordOptions,
    check_classes,
    start_workers,
)
from vitrail.cli.outputs import check_distinct, check_empty_folder, check_new_files, saving_gate_report
from vitrail.cli.part_jobs import NOT_FOR_PARTS, JobOptions, run_parts
from vitrail.cli.streams import print_error, stdin_bytes

if TYPE_CHECKING:
    from vitrail.predict import Prediction, Predictor

_MAX_PATH = 1 << 16  # bytes of one path in a list; no system has longer ones


def predict(
    model: str = MODEL_OR_ONNX,
    paths: list[str] | None = Argument(
        None, help="Images, folders of images, or - to read paths from stdin."
    ),
    top: int | None = Option(None, min=1, max=1_000_000, help="Classes to list per image.", show_default="1"),
    form: str = Option(
        "",
        "--format",
        help="Output format: table, csv or jsonl; of a folder also parquet or npy.",
        show_default="table; of a folder csv",
    ),
    out: str | None = Option(
        None,
        help="Save the rows to this new file; or in parts to a folder, with a / at its end.",
        show_default="stdout",
    ),
    embeddings: Path | None = Option(
        None, help="Save the embeddings to this new .npy file, one row per image; NaN after an error."
    ),
    explain: Path | None = Option(
        None, help="Save an attention overlay of each image to this folder, new or empty."
    ),
    batch: Batch = 32,
    native: bool | None = NATIVE,
    workers: str = WORKERS,
    null: bool = Option(
        False, "--null", "-0", help="Paths on stdin end with a zero byte, as from find -print0."
    ),
    *,
    jobs: JobOptions,
    words: WordOptions,
    speed: SpeedOptions,
    opening: ModelOptions,
) -> None:
    """Classify images and print one row per image, in order.

    An image that cannot be read gets a row with the reason; the exit code is then 1. If the file has a
    temperature and a threshold (see vitrail evaluate --calibrate), scores are calibrated, and predictions
    below the threshold are "don't know". An image that is unlike those the model was trained on is marked
    as out of distribution, if the file has statistics of their features.

    With a folder for --out, rows are written in parts, and the same command resumes after any interruption:
    see --part and docs/scale.md. DATA may then be tar shards, too.

    With --labels, a CLIP or SigLIP file classifies without training: each class is described by words.
    """
    inputs = paths or []
    if not inputs:
        raise InputError("No images given; name files or folders, or - to read paths from stdin.")
    if "-" in inputs:
        stdin_bytes()  # fails before the model is loaded if stdin is closed
    folder = jobs.folder(out, form)
    if folder is None:
        _check_outputs(Path(out) if out else None, embeddings, explain)

    from vitrail.predict.image_sources import EMPTY_FOLDER, expand_paths
    from vitrail.predict.output_rows import format_rows, writing_rows

    form = form or ("table" if folder is None else "csv")
    if folder is None:
        format_rows(form, 1, 1)  # fails before the model is loaded if the format is unknown
    opening = opening.for_precision(speed.precision)
    with_words = words.open(model, opening)
    if folder is not None:
        from vitrail.predict.parts import PART_SIZE, PartOptions

        of_rows = {"--embeddings": embeddings, "--explain": explain, "--native": native}
        refuse_given(of_rows, NOT_FOR_PARTS)
        refuse_given(
            {"--precision": speed.precision},
            "OPTION is not for a folder of parts; export the model with vitrail export --precision, and use "
            "the .onnx file.",
        )
        written = PartOptions("predict", form, top or 1, jobs.part_size or PART_SIZE)
        run_parts(folder, jobs, with_words or model, inputs, written, opening, batch=batch, workers=workers)
        return
    start_workers(inputs, workers)
    with saving_gate_report(Path(out) if out else None):
        predictor = opening.predictor(with_words or model, speed, batch=batch, workers=workers, native=native)
    config = predictor.config
    if embeddings is None or top is not None:
        check_classes(predictor.bundle)
    classes = 0 if predictor.needs_words else config.classes
    if not classes and top is not None:
        raise InputError("--top needs a model with classes, and this one has no head; use --embeddings.")
    if not classes and embeddings is None:
        raise InputError("This model has no head and gives only embeddings; save them with --embeddings.")
    header, format_row = format_rows(form, top or 1, classes, predictor.engine.statistics is not None)
    if explain is not None:
        predictor.require_bundle()  # fails before the folder is created
        explain.mkdir(exist_ok=True)
    count = failed = 0
    empty = []
    with ExitStack() as stack:
        write = stack.enter_context(_open_rows(Path(out) if out else None))
        add = stack.enter_context(writing_rows(embeddings, config.pooled_width)) if embeddings else None
        shows_rows = out is None and sys.stdout.isatty()
        bars = stack.enter_context(ProgressBars(enabled=not opening.quiet and not shows_rows))
        total = None
        if bars.enabled and "-" not in inputs:
            total = sum(1 for _ in expand_paths(inputs))
        write(header)
        for prediction in predictor.stream(_list_paths(inputs, b"\0" if null else b"\n")):
            count, failed = count + 1, failed + (prediction.error is not None)
            if prediction.error == EMPTY_FOLDER:
                empty.append(prediction.name)
            if add is not None:
                add(prediction.embedding)
            if explain is not None and prediction.error is None:
                _save_overlay(predictor, prediction, explain, count)
            write(format_row(prediction))
            bars("images", count, total)
    for name in empty:
        print_error(f"{printable(name)} contains no images; name image files, or a folder with some.")
    if failed > len(empty):
        images = f"{failed - len(empty):,} of {count - len(empty):,} images"
        print_error(f"{images} could not be classified; their rows have the reason.")
    if failed:
        raise typer.Exit(1)


def _check_outputs(out: Path | None, embeddings: Path | None, explain: Path | None) -> None:
    """Check all output paths before anything is computed."""
    if embeddings is not None and embeddings.suffix != ".npy":
        raise InputError(
            f"--embeddings must name a .npy file, not {printable(embeddings)}; change its ending."
        )
    check_distinct({"--out": out, "--embeddings": embeddings, "--explain": explain})
    check_new_files({"--out": out, "--embeddings": embeddings})
    if explain is not None:
        with require_extra("inspect"):
            import matplotlib  # noqa: F401  # fails here rather than at the first image
        check_empty_folder("--explain", explain)


# ---- paths and rows -------------------------------------------------------------------------


def _list_paths(inputs: Iterable[str], separator: bytes) -> Iterator[str]:
    """The paths, with those on stdin in place of -, as they arrive."""
    for path in inputs:
        if path == "-":
            yield from _read_paths(stdin_bytes(), separator)
        else:
            yield path


def _read_paths(stream: BinaryIO, separator: bytes) -> Iterator[str]:
    """Paths that end with a separator. Lines may end as on Windows; empty ones are skipped."""
    rest, end = b"", b"\r" if separator == b"\n" else b""
    while chunk := stream.read1(_MAX_PATH):  # type: ignore[attr-defined]
        *complete, rest = (rest + chunk).split(separator)
        yield from (os.fsdecode(path) for name in complete if (path := name.removesuffix(end)))
        if len(rest) > _MAX_PATH:
            raise InputError(
                f"stdin is not a list of paths: {len(rest):,} bytes without a line end; write one path per "
                "line, or end each with a zero byte and use -0."
            )
    if last := rest.removesuffix(end):
        yield os.fsdecode(last)


@contextmanager
def _open_rows(out: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a row at once, so that a run that is killed leaves only complete rows."""
    file = nullcontext(sys.stdout) if out is None else out.open("x", encoding="utf-8", newline="\n")
    with naming_file(out or "standard output"), file as stream:

        def write(text: str) -> None:
            stream.write(text)
            stream.flush()

        yield write


def _save_overlay(predictor: Predictor, prediction: Prediction, folder: Path, number: int) -> None:
    """Save the overlay of row `number`, from 1; file names may repeat or contain any character."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(prediction.name).stem)[:60]
    figure = predictor.explain(prediction.name)
    figure.savefig(folder / f"{number:06}-{stem}.png", metadata={"Software": None})
