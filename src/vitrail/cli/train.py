"""`vitrail train`: from labelled pictures to a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.facts import parsed
from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from vitrail.training.loop import Progress


def train(
    data: Annotated[str, typer.Argument(help="A folder of pictures, a table, an array file, or: digits.")],
    out: Annotated[Path, typer.Option(help="The run's folder, new or empty.")] = Path("runs/new"),
    recipe: Annotated[str, typer.Option(help="Where the settings come from.")] = "small",
    start: Annotated[str | None, typer.Option("--from", help="A weight file to start from.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="How often every picture is seen.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Pictures in one step.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Where all chance comes from.")] = None,
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
    metrics.jsonl, checkpoints/, last.safetensors and best.safetensors. Stopped by Ctrl-C or SIGTERM,
    it saves first; --resume goes on as if nothing had happened.
    """
    changes: dict[str, Any] = {"epochs": epochs, "batch": batch, "lr": lr, "seed": seed}
    changes = {name: value for name, value in changes.items() if value is not None}
    for text in given or []:
        put(changes, text)

    from vitrail.recipes.start import train as run
    from vitrail.training.listen import Silent
    from vitrail.training.loop import Stopped
    from vitrail.training.parallel import join, leave

    first = join().first
    listener = Teller() if first else Silent()
    try:
        done = run(data, out=out, recipe=recipe, start=start, resume=resume, listener=listener, **changes)
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
    place[name] = tuple(map(parsed, value.split(","))) if name == "betas" else parsed(value)


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
        judged = ""
        if "val_accuracy" in metrics:
            judged = f"   held out: loss {metrics['val_loss']:.3f}, right {metrics['val_accuracy']:.2%}"
        learned = f"epoch {metrics['epoch']:>4}   loss {metrics['loss']:.3f}, right {metrics['accuracy']:.2%}"
        self.console.print(learned + judged, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
