"""`vitrail train`: from labelled pictures to a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.facts import parsed, sides
from vitrail.cli.streams import outlasting
from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from vitrail.training.listen import Progress


def show_recipes(wanted: bool) -> None:
    """The recipes there are, each with the first line of what it says of itself."""
    if not wanted:
        return
    from vitrail.recipes import recipes

    found = recipes()
    longest = max(map(len, found))
    for name, made in found.items():
        print(f"{name:{longest}}  {(made.__doc__ or '').strip().splitlines()[0]}")
    raise typer.Exit


def train(
    data: Annotated[str, typer.Argument(help="A folder of pictures, a table, an array file, or: digits.")],
    out: Annotated[Path, typer.Option(help="The run's folder, new or empty.")] = Path("runs/new"),
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="Where the settings come from; --recipes lists them.")
    ] = "small",
    recipes: Annotated[
        bool, typer.Option("--recipes", is_eager=True, callback=show_recipes, help="List the recipes.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE/PATCH[@PIXELS]",
            help="A new model of a published size, such as Ti/16 or S/16@128; all else is the recipe's.",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="Start from the weights in a file, of any family."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="PIXELS|HxW", help="The pictures' size; the positions of --from are resampled."),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="full|llrd|lora|head|bias",
            help="What learns: everything; earlier blocks more slowly; low-rank updates and the head; "
            "the head alone (linear probe); biases and the head.",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Learn from this model too (--set distill=hard or soft, distill_weight=0.5)."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="How often every picture is seen.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=10**12, help="Pictures in one step.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Where all chance comes from.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Any setting: model.depth=4, augment.flip=0.5, ema=0.99."
        ),
    ] = None,
) -> None:
    """Train a Vision Transformer on labelled pictures, from scratch or from a weight file.

    A folder of pictures holds a folder for each class. The run's folder gets config.json,
    metrics.jsonl, log.txt, checkpoints/, last.safetensors, best.safetensors and report.html, a page to
    read. Stopped by Ctrl-C or SIGTERM, it saves first; --resume goes on as if nothing had happened. It does
    not stop because nobody reads what it prints.
    """
    options = {"epochs": epochs, "batch": batch, "lr": lr, "seed": seed, "tune": tune}
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if model is not None:
        changes["model"] = {"name": model}
    for text in given or []:
        put(changes, text)
    how: dict[str, Any] = {"recipe": recipe, "start": start, "teacher": teacher, "resume": resume}
    how["size"] = None if size is None else sides(size)

    with outlasting(printable(out / "log.txt")):
        run(data, out, how, changes)


def run(data: str, out: Path, how: dict[str, Any], changes: dict[str, Any]) -> None:
    """Train, and tell of it where this is the process that prints."""
    from vitrail.recipes.start import train as start
    from vitrail.training.listen import Silent
    from vitrail.training.loop import Stopped
    from vitrail.training.parallel import join, leave

    first = join().first
    listener = Teller() if first else Silent()
    try:
        done = start(data, out=out, listener=listener, **how, **changes)
    except Stopped as stop:
        if isinstance(listener, Teller):
            listener.close()
        sys.stdout.flush()
        raise typer.Exit(128 + stop.signal) from None
    finally:
        if isinstance(listener, Teller):
            listener.close()
        leave()
    if first:
        last = done.metrics[-1]
        print(f"Right: {last['val_accuracy']:.2%} of {last['val_seen']:,} held-out pictures.")
        print(f"Written: {printable(done.out)}, with best.safetensors and last.safetensors.")
        if (done.out / "report.html").exists():
            print(f"To read in a browser: {printable(done.out / 'report.html')}")


def put(changes: dict[str, Any], text: str) -> None:
    """PATH=VALUE: a field of the training, or model.FIELD, augment.FIELD, mixing.FIELD."""
    path, equals, value = text.partition("=")
    part, dot, name = path.rpartition(".")
    whole = path in ("model", "augment", "mixing")
    if not equals or not name or whole or part not in ("", "model", "augment", "mixing"):
        raise InputError(
            "--set takes PATH=VALUE.", repr(text), "Such as model.depth=4, augment.flip=0.5 or ema=0.99."
        )
    place = changes.setdefault(part, {}) if dot else changes
    place[name] = tuple(map(parsed, value.split(","))) if name == "betas" else as_said(part, name, value)


def as_said(part: str, name: str, value: str) -> Any:
    """A word where the field has it among its words (some have `none`); else what it reads as."""
    from vitrail.config import ViTConfig
    from vitrail.data.augment import Augment
    from vitrail.data.mixing import Mixing
    from vitrail.fields import literal_words, type_hints
    from vitrail.training.settings import TrainConfig

    kind = {"": TrainConfig, "model": ViTConfig, "augment": Augment, "mixing": Mixing}[part]
    return value if value in literal_words(type_hints(kind).get(name)) else parsed(value)


class Teller:
    """Tells a person at a terminal how the run is going: a bar that moves, and a line for each epoch."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False)
        self.bar: Bar | None = None
        self.task: Any = None

    def note(self, text: str) -> None:
        self.console.print(printable(text, 400), markup=False)

    def plan(self, facts: Mapping[str, Any]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        for word, value in facts.items():
            table.add_row(Text(word, style="bold"), Text(printable(value, 400)))
        self.console.print(table)

    def progress(self, progress: Progress) -> None:
        if not self.console.is_terminal:
            return
        if self.bar is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(bar_width=None),
                TextColumn(
                    "loss {task.fields[loss]:.3f} {task.fields[right]:.1%} {task.fields[speed]:,.0f}/s"
                ),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=progress.steps, epoch=0, loss=0.0, right=0.0, speed=0.0)
        self.bar.update(
            self.task,
            completed=progress.step,
            epoch=progress.epoch + 1,
            loss=progress.loss,
            right=progress.accuracy,
            speed=progress.images_per_second,
        )

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        from vitrail.training.listen import epoch_line

        self.console.print(epoch_line(metrics), markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
