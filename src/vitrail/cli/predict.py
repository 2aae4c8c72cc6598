"""`vitrail predict`: classify files, folders and lists of images."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from vitrail.base.errors import InputError, printable, require_extra
from vitrail.base.progress import ProgressBars
from vitrail.base.safe_files import naming_file
from vitrail.cli import overrides as options
from vitrail.cli.model_arguments import check_classes, open_zero_shot, print_predictor_notes
from vitrail.cli.outputs import check_distinct, check_empty_folder, check_new_files, saving_gate_report
from vitrail.cli.part_options import EngineOption, Part, PartSize, check_alone, parse_parts, run_parts
from vitrail.cli.streams import print_error, stdin_bytes

if TYPE_CHECKING:
    from vitrail.predict import Prediction, Predictor

_MAX_PATH = 1 << 16  # bytes of one path in a list; no system has longer ones


def predict(
    model: Annotated[
        str, typer.Argument(help="A weight file, a model folder, hf:owner/name, or an .onnx file.")
    ],
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Images, folders of images, or - to read paths from stdin."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Classes to list per image.", show_default="1"),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="Output format: table, csv or jsonl; of a folder also parquet or npy.",
            show_default="table; of a folder csv",
        ),
    ] = "",
    out: Annotated[
        str | None,
        typer.Option(
            help="Save the rows to this new file; or in parts to a folder, with a / at its end.",
            show_default="stdout",
        ),
    ] = None,
    part: Part = None,
    part_size: PartSize = None,
    engine: EngineOption = "local",
    labels: options.Labels = None,
    prompts: options.Prompts = None,
    templates: options.Templates = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            help="Save the embeddings to this new .npy file, one row per image; NaN after an error."
        ),
    ] = None,
    explain: Annotated[
        Path | None,
        typer.Option(help="Save an attention overlay of each image to this folder, new or empty."),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, help="Images per forward pass; results differ by rounding only."),
    ] = 32,
    native: Annotated[
        bool | None,
        typer.Option(
            "--native/--no-native",
            help="Keep the aspect ratio of each image, or resize all to one shape.",
            show_default="as the model was trained",
        ),
    ] = None,
    workers: options.WorkersOption = "auto",
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Read paths from stdin, one per line; the same as -.")
    ] = False,
    null: Annotated[
        bool,
        typer.Option("--null", "-0", help="Paths on stdin end with a zero byte, as from find -print0."),
    ] = False,
    precision: options.Precision = None,
    calibration: options.Calibration = None,
    min_agreement: options.MinAgreement = 0.99,
    keep: options.Keep = None,
    device: options.Device = "auto",
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    settings: options.Set = None,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
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
    inputs = [*(paths or []), *(["-"] if stdin and "-" not in (paths or []) else [])]
    if not inputs:
        raise InputError("No images given; name files or folders, or - to read paths from stdin.")
    if "-" in inputs:
        stdin_bytes()  # fails before the model is loaded if stdin is closed
    request = parse_parts(out, form, part, part_size, engine)
    if request is None:
        _check_outputs(Path(out) if out else None, embeddings, explain)

    from vitrail.predict import Predictor
    from vitrail.predict.embeddings import writing_rows
    from vitrail.predict.image_sources import EMPTY_FOLDER
    from vitrail.predict.output_rows import format_rows

    form = form or ("table" if request is None else "csv")
    if request is None:
        format_rows(form, 1, 1)  # fails before the model is loaded if the format is unknown
    overrides = options.load_arguments(family, keys, settings, size, device=device, offline=offline or None)
    speedup = options.parse_speedup(precision, calibration, min_agreement, keep)
    if precision == "int8":  # which GPUs do not compute
        overrides = {"device": "cpu", **overrides}
    opened = open_zero_shot(model, labels, prompts, templates, overrides, quiet=quiet)
    given = {} if opened else overrides  # they have loaded the model already
    if request is not None:
        from vitrail.predict.parts import PART_SIZE, PartOptions

        check_alone({"--embeddings": embeddings, "--explain": explain, "--native": native})
        kind = PartOptions("predict", form, top or 1, part_size or PART_SIZE)
        how = {"batch": batch, "workers": options.parse_workers(workers), **given}
        if precision is not None:
            raise InputError(
                "--precision is not for a folder of parts; export the model with vitrail export --precision, "
                "and use the .onnx file."
            )
        run_parts(request, opened or model, inputs, kind, how, quiet=quiet)
        return
    how = {"batch": batch, "workers": options.parse_workers(workers), "native": native}
    options.expect_files(inputs, how["workers"])
    with saving_gate_report(Path(out) if out else None):
        predictor = Predictor(opened or model, **how, **given, **speedup)
    print_predictor_notes(predictor, overrides, quiet=quiet)
    config = predictor.config
    if embeddings is None or top is not None:
        check_classes(predictor.bundle)
    classes = 0 if predictor.needs_words else config.classes
    if not classes:
        _check_headless(top, embeddings)
    has_statistics = predictor.engine.statistics is not None
    header, format_row = format_rows(form, top or 1, classes, has_statistics)
    if explain is not None:
        predictor.require_bundle()  # fails before the folder is created
        explain.mkdir(exist_ok=True)
    count = failed = 0
    empty = []
    with ExitStack() as stack:
        write = stack.enter_context(_open_rows(Path(out) if out else None))
        add = stack.enter_context(writing_rows(embeddings, config.pooled_width)) if embeddings else None
        shows_rows = out is None and sys.stdout.isatty()
        bars = stack.enter_context(ProgressBars(enabled=not quiet and not shows_rows))
        total = _count_images(inputs) if bars.enabled else None
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
    for folder in empty:
        print_error(f"{printable(folder)} contains no images; name image files, or a folder with some.")
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


def _check_headless(top: int | None, embeddings: Path | None) -> None:
    """A model without a head has no classes, only embeddings."""
    if top is not None:
        raise InputError("--top needs a model with classes, and this one has no head; use --embeddings.")
    if embeddings is None:
        raise InputError("This model has no head and gives only embeddings; save them with --embeddings.")


# ---- paths ----------------------------------------------------------------------------------


def _count_images(inputs: list[str]) -> int | None:
    """The number of images; None if some paths are read from stdin."""
    from vitrail.predict.image_sources import expand_paths

    return None if "-" in inputs else sum(1 for _ in expand_paths(inputs))


def _list_paths(inputs: Iterable[str], separator: bytes) -> Iterator[str]:
    """The paths, with those on stdin in place of -, as they arrive."""
    for path in inputs:
        if path == "-":
            yield from _read_paths(stdin_bytes(), separator)
        else:
            yield path


def _read_paths(stream: BinaryIO, separator: bytes) -> Iterator[str]:
    """Paths that end with a separator. Lines may end as on Windows; empty ones are skipped."""
    rest = b""
    while chunk := stream.read1(_MAX_PATH):  # type: ignore[attr-defined]
        *complete, rest = (rest + chunk).split(separator)
        yield from map(os.fsdecode, filter(None, (_strip_return(name, separator) for name in complete)))
        if len(rest) > _MAX_PATH:
            raise InputError(
                f"stdin is not a list of paths: {len(rest):,} bytes without a line end; write one path per "
                "line, or end each with a zero byte and use -0."
            )
    if last := _strip_return(rest, separator):
        yield os.fsdecode(last)


def _strip_return(name: bytes, separator: bytes) -> bytes:
    return name.removesuffix(b"\r") if separator == b"\n" else name


# ---- output ---------------------------------------------------------------------------------


@contextmanager
def _open_rows(out: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a row at once, so that a run that is killed leaves only complete rows."""
    if out is not None:
        with out.open("xb", buffering=0) as file:
            yield lambda text: _write_all(file, out, text.encode())
        return

    def write(text: str) -> None:
        with naming_file("standard output"):
            sys.stdout.write(text)
            sys.stdout.flush()

    yield write


def _write_all(file: Any, path: Path, data: bytes) -> None:
    """Write to an unbuffered file, which may accept only a part at a time."""
    with naming_file(path):
        while data:
            data = data[file.write(data) :]


def _save_overlay(predictor: Predictor, prediction: Prediction, folder: Path, number: int) -> None:
    """Save the overlay of row `number`, from 1; file names may repeat or contain any character."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(prediction.name).stem)[:60]
    figure = predictor.explain(prediction.name)
    figure.savefig(folder / f"{number:06}-{stem}.png", metadata={"Software": None})
