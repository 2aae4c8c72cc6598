"""`vitrail evaluate`: how good a model is on a data set, and how far its scores can be believed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli import facts as options
from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from vitrail.data.sources import Split
    from vitrail.evaluation.calibration import Calibration
    from vitrail.evaluation.metrics import Scores
    from vitrail.evaluation.run import Evaluation
    from vitrail.weights.bundle import Bundle

MOST_CLASSES = 20  # in the table; of more, those with the lowest recall are shown
MOST_MISTAKES = 10
MOST_WORDS = 24  # letters of a name in a table


def evaluate(
    model: Annotated[str, typer.Argument(help="A weight file, a folder with one, or hf:owner/name.")],
    data: Annotated[str, typer.Argument(help="A folder of pictures, a .csv, .jsonl or .npz, or digits.")],
    split: Annotated[
        str | None, typer.Option(help="train, val or test.", show_default="test, or val without it")
    ] = None,
    probe: Annotated[
        str, typer.Option(help="Of knn, linear and fewshot some, with commas: what the features are worth.")
    ] = "",
    layers: Annotated[
        str | None,
        typer.Option(help="Blocks to probe: all, or numbers with commas.", show_default="the last"),
    ] = None,
    real: Annotated[Path | None, typer.Option(help="The file real.json of ImageNet-ReaL.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="A new .safetensors file: the model with its temperature and threshold."),
    ] = None,
    precision: Annotated[float, typer.Option(help="What the threshold for an answer is to give.")] = 0.95,
    json_file: Annotated[Path | None, typer.Option("--json", help="A new file for all the numbers.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="A new file for a page with pictures, to read in a browser.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Pictures at once; the results are the same.")
    ] = 128,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Threads that read pictures.")] = 2,
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Judge a model on pictures with known classes: accuracy, calibration, mistakes, features.

    The exit code is 1 where pictures could not be read: they are named, and count for nothing. With
    --set classes=0 the head is taken off, and --probe judges the features of any model on any data.
    """
    from vitrail.cli.places import check_new, write_new

    for option, path in (("--json", json_file), ("--html", html_file), ("--calibrate", calibrate)):
        if path is not None:
            check_new(option, path)
    check_different({"--json": json_file, "--html": html_file, "--calibrate": calibrate})
    if calibrate is not None and calibrate.suffix != ".safetensors":
        got = printable(calibrate)
        raise InputError("--calibrate must name a file that ends in .safetensors.", got, "Rename it.")
    blocks = read_layers(layers)
    probes = [word.strip() for word in probe.split(",") if word.strip()]
    if probe and not probes:
        raise InputError(f"--probe takes some of knn, linear and fewshot, with commas, not {probe!r}.")
    if layers is not None and not probes:
        raise InputError("--layers says what --probe looks at; add --probe knn, linear or fewshot.")

    from rich.console import Console

    from vitrail.data.sources import open_data
    from vitrail.evaluation.calibration import with_calibration
    from vitrail.evaluation.run import evaluate as run
    from vitrail.weights.load import load

    if html_file is not None:
        from vitrail.report.page import check_extras

        check_extras()
    bundle = load(model, **options.facts(family, keys, given, size))
    pictures = open_data(data)
    with progress() as ahead:
        found = run(
            bundle,
            pictures,
            split=split,
            batch=batch,
            workers=workers,
            real=real,
            probe=probes,
            layers=blocks,
            precision=precision,
            ahead=ahead,
        )
    show(found, printable(model), Console(highlight=False))
    if json_file is not None:
        write_new(json_file, json.dumps({"model": model, **found.as_dict()}, indent=1) + "\n")
    if html_file is not None:
        write_html(html_file, found, bundle, getattr(pictures, found.split), model)
    if calibrate is not None:
        if found.calibration is None:
            must = "A temperature needs a model with a head, and one class for each picture."
            raise InputError(must, printable(data), "Leave out --calibrate.")
        with_calibration(bundle, found.calibration).save(calibrate)
        print(f"Written with temperature {found.calibration.temperature:.4g}: {printable(calibrate)}")
    if found.corrupt:
        raise typer.Exit(1)


def check_different(files: dict[str, Path | None]) -> None:
    """Each option has a file of its own."""
    there = [path for path in files.values() if path is not None]
    if len(set(there)) < len(there):
        got = ", ".join(f"{option} {printable(path)}" for option, path in files.items() if path is not None)
        raise InputError("Each option needs a file of its own.", got, "Name another file.")


def write_html(path: Path, found: Evaluation, bundle: Bundle, split: Split, model: str) -> None:
    from vitrail.report.evaluation import evaluation_page
    from vitrail.report.page import write_page

    command = shlex.join(["vitrail", *sys.argv[1:]])
    write_page(path, evaluation_page(found, bundle, split, model=Path(model).name, command=command))
    print(f"To read in a browser: {printable(path)}")


def read_layers(text: str | None) -> Any:
    if text is None or text == "all":
        return text
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        got = printable(repr(text))
        raise InputError(f"--layers must be all, or block numbers such as 0,5,11, not {got}.")
    return [int(word) for word in words]


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each split that is read, on a terminal alone; it goes away when all is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bars: dict[str, Any] = {}

        def ahead(part: str, done: int, of: int) -> None:
            if part not in bars or bar.tasks[bars[part]].finished:  # train may be read twice
                bars[part] = bar.add_task(part, total=of)
            bar.update(bars[part], completed=done)

        yield ahead


# ---- what is printed ------------------------------------------------------------------------


def show(found: Evaluation, model: str, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for word, value in summary(found, model):
        table.add_row(Text(word, style="bold"), Text(value))
    console.print(table)
    if found.scores is not None:
        show_classes(found.scores, console)
        show_mistakes(found.scores, console)
    show_probes(found, console)
    for name, reason in list(found.corrupt.items())[:MOST_MISTAKES]:
        console.print(Text(f"not read: {name}: {reason}"))
    if len(found.corrupt) > MOST_MISTAKES:
        console.print(f"not read: and {len(found.corrupt) - MOST_MISTAKES:,} more")
    for note in found.notes:
        console.print(Text(f"note: {note}"))


def summary(found: Evaluation, model: str) -> Iterator[tuple[str, str]]:
    """Each number with its word, those that there are."""
    yield "model", model
    yield "data", f"{printable(found.data)}, {found.split}: {found.pictures:,} pictures"
    scores = found.scores
    if scores is not None:
        if scores.count < found.pictures:
            yield "judged", f"{scores.count:,}; {found.pictures - scores.count:,} could not be read"
        if scores.top1 is not None:
            yield "top-1", f"{percent(scores.top1)}, {round(scores.top1 * scores.count):,} right"
        for word, value in (("top-5", scores.top5), ("mean AP", scores.mean_ap), ("all right", scores.exact)):
            if value is not None:
                yield word, percent(value)
        if found.real is not None:
            yield "ReaL", f"{percent(found.real.accuracy)} of {found.real.count:,} pictures with such labels"
        yield "loss", f"{scores.loss:.4f}"
    if found.calibration is not None:
        yield from about_calibration(found.calibration, found.split)
    yield "time", f"{found.seconds:.1f} s"


def about_calibration(found: Calibration, split: str) -> Iterator[tuple[str, str]]:
    yield "ECE", percent(found.before)
    if found.fitted:
        yield "", f"{percent(found.after)} with temperature {found.temperature:.3f}, fitted on {split}"
    if found.threshold is None:
        yield "don't know", f"no threshold makes {found.wanted:.4g} of the answers right"
    else:
        answers = f"{found.threshold.answered:,} answers, {percent(found.threshold.precision)} right"
        yield "don't know", f"below a score of {found.threshold.score:.4f}: {answers}"
    if found.stored is not None:
        yield "as stored", f"ECE {percent(found.stored.ece)} with temperature {found.stored.temperature:.3f}"
        if found.stored.threshold is not None:
            tried = found.stored.threshold
            answers = f"{tried.answered:,} answers, {percent(tried.precision)} right"
            yield "", f"don't know below {tried.score:.4f}: {answers}"


def show_classes(scores: Scores, console: Console) -> None:
    """Precision and recall of each class, or of those that are recalled worst."""
    from rich.text import Text

    rows = scores.per_class
    title = "Classes"
    if len(rows) > MOST_CLASSES:
        known = [row for row in rows if row.recall is not None]
        rows = sorted(known, key=lambda row: row.recall or 0.0)[:MOST_CLASSES]
        title = f"The {len(rows)} of {len(scores.per_class):,} classes with the lowest recall"
    several = scores.mean_ap is not None
    table = framed(title, ["class"], ["pictures", "precision", "recall", *(["AP"] if several else [])])
    for row in rows:
        shares = [row.precision, row.recall, *([row.ap] if several else [])]
        numbers = ["-" if share is None else percent(share) for share in shares]
        table.add_row(Text(short(row.name)), f"{row.count:,}", *numbers)
    console.print(table)


def show_mistakes(scores: Scores, console: Console) -> None:
    from rich.text import Text

    if scores.confusion is not None and (pairs := confused(scores)):
        table = framed("Most often confused", ["class", "taken for"], ["times"])
        for was, said, times in pairs:
            table.add_row(Text(short(was)), Text(short(said)), f"{times:,}")
        console.print(table)
    if scores.mistakes:
        table = framed("Worst mistakes: wrong and sure", ["picture", "said", "was"], ["score"])
        for one in scores.mistakes[:MOST_MISTAKES]:
            cells = [Text(short(text)) for text in (one.name, one.said, one.was)]
            table.add_row(*cells, f"{one.score:.3f}")
        console.print(table)


def confused(scores: Scores, most: int = 5) -> list[tuple[str, str, int]]:
    """Pairs of classes and how often the first was taken for the second, those that happened twice."""
    names = [row.name for row in scores.per_class]
    pairs = [
        (names[was], names[said], times)
        for was, row in enumerate(scores.confusion or [])
        for said, times in enumerate(row)
        if was != said and times > 1
    ]
    return sorted(pairs, key=lambda pair: -pair[2])[:most]


def show_probes(found: Evaluation, console: Console) -> None:
    """A line for each probe, setting and layer; a column for each feature."""
    if not found.probes:
        return
    features = list(dict.fromkeys(row.feature for row in found.probes))
    table = framed("Probes: top-1 in %", ["probe", "with"], ["layer", *features])
    lines: dict[tuple[str, str, int], dict[str, str]] = {}
    for row in found.probes:
        spread = "" if row.spread is None else f" ± {100 * row.spread:.1f}"
        line = lines.setdefault((row.probe, row.setting, row.layer), {})
        line[row.feature] = f"{100 * row.top1:.2f}{spread}"
    for (probe, setting, layer), cells in lines.items():
        table.add_row(probe, setting, str(layer), *(cells[feature] for feature in features))
    console.print(table)


def framed(title: str, words: list[str], numbers: list[str]) -> Any:
    """A table with words on the left and numbers on the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    how: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "show_edge": False}
    table = Table(title=Text(f"\n{title}", style="bold"), **how)
    for word in words:
        table.add_column(word, overflow="fold")
    for word in numbers:
        table.add_column(word, justify="right", no_wrap=True)
    return table


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def short(text: str) -> str:
    return printable(text, MOST_WORDS)
