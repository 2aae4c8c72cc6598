"""`vitrail predict`: what a model says of files, folders and lists of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from vitrail.cli import facts as options
from vitrail.cli.streams import stdin_bytes
from vitrail.errors import InputError, needs, printable

if TYPE_CHECKING:
    from vitrail.predict import Prediction, Predictor

LONGEST = 1 << 16  # bytes of one path in a list; no system has longer ones


def predict(
    model: Annotated[
        str, typer.Argument(help="A weight file, a folder with one, hf:owner/name, or an .onnx file.")
    ],
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATHS]...", help="Pictures, folders of them, or - for a list on stdin."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="So many classes for each picture.", show_default="1"),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="table, csv or jsonl.")] = "table",
    out: Annotated[Path | None, typer.Option(help="A new file for the rows, instead of stdout.")] = None,
    embeddings: Annotated[
        Path | None, typer.Option(help="A new .npy file, a row for each; NaN where nothing could be read.")
    ] = None,
    explain: Annotated[
        Path | None, typer.Option(help="A new or empty folder: for each picture where the model looked.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Pictures at once; the results are the same.")
    ] = 32,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Threads that read pictures.")] = 2,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read paths from stdin, a line each.")] = False,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="These end with a zero byte, as find -print0 has it.")
    ] = False,
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Label pictures: a row for each, in order, as soon as it is known.

    A picture that cannot be read gets a row with the reason; the exit code is then 1. With a temperature and
    a threshold in the file (vitrail evaluate --calibrate), scores are calibrated, and "don't know" is an
    answer.
    """
    wanted = [*(paths or []), *(["-"] if stdin and "-" not in (paths or []) else [])]
    if not wanted:
        raise InputError("There must be pictures.", "no path", "Name files or folders, or - for stdin.")
    if "-" in wanted:
        stdin_bytes()  # one that is closed is said before the model is loaded
    check_files(out, embeddings, explain)

    from vitrail.predict import Predictor
    from vitrail.predict.embeddings import writing_rows
    from vitrail.predict.rows import lines

    lines(form, 1, 1)  # a wrong word is said before the model is loaded
    predictor = Predictor(model, batch=batch, workers=workers, **options.facts(family, keys, given, size))
    config = predictor.config
    if not config.classes:
        check_headless(top, embeddings)
    heading, line = lines(form, top or 1, config.classes)
    if explain is not None:
        predictor.parts()  # what cannot be explained is said before there is a folder for it
        explain.mkdir(exist_ok=True)
    count = bad = 0
    with ExitStack() as stack:
        write = stack.enter_context(writing_lines(out))
        add = stack.enter_context(writing_rows(embeddings, config.pooled_width)) if embeddings else None
        advance = stack.enter_context(progress(wanted, shown=out is not None or not sys.stdout.isatty()))
        write(heading)
        for found in predictor.stream(listed(wanted, b"\0" if null else b"\n")):
            count, bad = count + 1, bad + (found.error is not None)
            if add is not None:
                add(found.embedding)
            if explain is not None and found.error is None:
                draw(predictor, found, explain, count)
            write(line(found))
            advance()
    if bad:
        print(f"vitrail: {bad:,} of {count:,} have no answer; their rows say why.", file=sys.stderr)
        raise typer.Exit(1)


def check_files(out: Path | None, embeddings: Path | None, explain: Path | None) -> None:
    """Before anything is computed: nothing of the user's is overwritten, and everything can be written."""
    from vitrail.cli.evaluate import check_different
    from vitrail.cli.places import check_new

    if embeddings is not None and embeddings.suffix != ".npy":
        got = printable(embeddings)
        raise InputError("--embeddings must name a file that ends in .npy.", got, "Rename it.")
    for option, path in (("--out", out), ("--embeddings", embeddings)):
        if path is not None:
            check_new(option, path)
    check_different({"--out": out, "--embeddings": embeddings, "--explain": explain})
    if explain is not None:
        with needs("inspect"):
            import matplotlib  # noqa: F401  # found out here, not at the first picture
        if os.path.lexists(explain) and not (explain.is_dir() and not any(explain.iterdir())):
            must = "--explain must name a new or an empty folder: nothing of yours is overwritten."
            raise InputError(must, f"{printable(explain)}, which is neither", "Name another.")


def check_headless(top: int | None, embeddings: Path | None) -> None:
    """Without a head there are no classes, and nothing to see but embeddings."""
    if top is not None:
        do = "Leave it out, and use --embeddings."
        raise InputError("--top needs a model that knows classes.", "one without a head", do)
    if embeddings is None:
        do = "Name a file with --embeddings."
        raise InputError("A model without a head gives embeddings alone.", "no --embeddings", do)


# ---- paths ----------------------------------------------------------------------------------


def listed(wanted: Iterable[str], end: bytes) -> Iterator[str]:
    """The paths, and for - those that stand on stdin, as they come."""
    for path in wanted:
        if path == "-":
            yield from names_in(stdin_bytes(), end)
        else:
            yield path


def names_in(stream: BinaryIO, end: bytes) -> Iterator[str]:
    """Paths that end with a byte; a line may end as on Windows, and an empty one is none."""
    rest = b""
    while chunk := stream.read1(LONGEST):  # type: ignore[attr-defined]
        *whole, rest = (rest + chunk).split(end)
        yield from map(os.fsdecode, filter(None, (trimmed(name, end) for name in whole)))
        if len(rest) > LONGEST:
            do = "A line each, or with -0 a zero byte after each."
            raise InputError("A list must hold paths.", f"{len(rest):,} bytes without an end", do)
    if last := trimmed(rest, end):
        yield os.fsdecode(last)


def trimmed(name: bytes, end: bytes) -> bytes:
    return name.removesuffix(b"\r") if end == b"\n" else name


# ---- what is written ------------------------------------------------------------------------


@contextmanager
def writing_lines(out: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a row, all of it at once: a run that is killed leaves whole ones."""
    if out is not None:
        with out.open("xb", buffering=0) as file:
            yield lambda text: write_all(file, text.encode())
        return

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    yield write


def write_all(file: Any, data: bytes) -> None:
    """A file without a buffer may take less than it was given."""
    while data:
        data = data[file.write(data) :]


def draw(predictor: Predictor, found: Prediction, folder: Path, number: int) -> None:
    """The overlay of row `number`, from 1; names of pictures may repeat and hold anything."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(found.name).stem)[:60]
    figure = predictor.explain(found.name)
    figure.savefig(folder / f"{number:06}-{stem}.png", metadata={"Software": None})


@contextmanager
def progress(wanted: list[str], *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, unless the rows themselves go there; without an end where stdin has the list."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield lambda: None
        return

    from vitrail.predict.sources import expand

    total = None if "-" in wanted else sum(1 for _ in expand(wanted))
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("pictures", total=total)
        yield lambda: bar.advance(task)
