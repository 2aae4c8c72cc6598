"""`vitrail demo`: train on digits, show what came out."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vitrail.cli.places import check_out, is_empty

if TYPE_CHECKING:
    from rich.console import Console

    from vitrail.demo import Looked
    from vitrail.training.listen import Progress


def demo(
    out: Annotated[
        Path | None, typer.Option(help="A new or empty folder for the run.", show_default="runs/demo")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, max=10_000, help="How often to go through the digits.")] = 50,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Draws the first weights and the order.")
    ] = 0,
) -> None:
    """Train a small ViT on real digits and see where it looks, in about a minute.

    The 1,797 handwritten digits come with scikit-learn: nothing is downloaded.
    """
    import torch
    from rich.console import Console

    from vitrail import demo as story
    from vitrail.training.loop import Stopped

    story.check_extras()
    folder = claim(out)

    torch.set_num_threads(1)  # no slower at this size, and the same result on any number of cores
    console = Console(highlight=False)
    console.print("\n[bold]A Vision Transformer learns to read digits[/]\n")
    digits = story.load()
    begin = time.monotonic()
    with Teller(console, epochs) as teller:
        try:
            run = story.train(digits, folder, epochs=epochs, seed=seed, listener=teller)
        except Stopped as stop:
            again = f"vitrail train digits --recipe digits --epochs {epochs} --seed {seed} --resume --out"
            teller.close()
            line(console, "saved", escape(f"go on with: {again} {shlex.quote(str(folder))}"))
            raise typer.Exit(128 + stop.signal) from None
        seconds = teller.seconds
    looked = story.look(run.bundle, digits.held_out)
    right, total = int(looked.right.sum()), len(looked.right)
    line(
        console,
        "result",
        f"[bold]{right / total:.1%}[/] of {total} held-out digits: {right} right, {total - right} wrong",
    )
    whole = time.monotonic() - begin
    line(console, "time", f"{seconds:.0f} s of training, {whole:.0f} s with the report, seed {seed}")
    show(looked, console)
    story.draw(looked, folder / "demo.png")
    line(console, "picture", escape(str(folder / "demo.png")))
    line(console, "report", escape(str(folder / "report.html")))
    line(console, "model", escape(str(folder / "best.safetensors")))
    console.print()


def claim(out: Path | None) -> Path:
    """The folder to write to, made now: a folder that cannot be used is no news for the end."""
    if out is None:
        names = (Path("runs") / (f"demo-{n}" if n > 1 else "demo") for n in count(1))
        out = next(folder for folder in names if not folder.exists() or is_empty(folder))
    check_out(out, "Name another folder, or leave --out away.")
    out.mkdir(parents=True, exist_ok=True)
    return out


def line(console: Console, what: str, text: str) -> None:
    console.print(f"  [bold cyan]{what:10}[/] {text}", soft_wrap=True)


class Teller:
    """Tells how the run is going: what is to be learned, then a bar; and how long the learning took."""

    def __init__(self, console: Console, epochs: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("  [bold cyan]training  [/]"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
        )
        self.console, self.epochs = console, epochs
        self.bar = Progress(*columns, console=console)
        self.task: Any = None
        self.begin = self.seconds = 0.0

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        pass  # device and report are the recipe's; the folder's log.txt has every word

    def plan(self, facts: Mapping[str, Any]) -> None:
        for word in ("data", "pictures", "parameters"):
            line(self.console, word, escape(str(facts[word])))
        line(self.console, "device", "cpu, one thread, fp32: a model this small gains nothing from more")
        self.begin = time.monotonic()
        self.task = self.bar.add_task("", total=self.epochs, news="")
        self.bar.start()

    def progress(self, progress: Progress) -> None:
        news = f"loss {progress.loss:.2f}, accuracy {progress.accuracy:.1%}"
        self.bar.update(self.task, completed=progress.step * self.epochs // progress.steps, news=news)

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        self.seconds = time.monotonic() - self.begin


def show(looked: Looked, console: Console) -> None:
    """Right and wrong digits in the terminal, each above the same digit lit by its attention."""
    from rich.text import Text

    from vitrail import demo as story
    from vitrail.cli.picture import gallery, picture

    colour = console.color_system is not None and console.encoding.startswith("utf")
    for title, shown in zip(("Right", "Wrong, the surest first"), story.choose(looked), strict=True):
        if not shown:
            console.print(f"\n  [bold]{title.split(',')[0]}[/]: none")
            continue
        inks = [looked.ink[index].tolist() for index in shown]
        lights = [story.light(looked, index).tolist() for index in shown]
        console.print(f"\n  [bold]{title}[/]: the digit, and where the model looked\n")
        rows = [
            [picture(ink, colour=colour) for ink in inks],
            [Text("") for _ in shown],
            [picture(ink, lit, colour=colour) for ink, lit in zip(inks, lights, strict=True)],
            [Text(story.caption(looked, index)) for index in shown],
        ]
        gallery(rows, console)
    console.print()
