"""`vitrail demo`: train on digits, show what came out."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from vitrail.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from vitrail.demo import Digits, Looked
    from vitrail.model import ViT


def demo(
    out: Annotated[
        Path | None, typer.Option(help="A new or empty folder for the picture.", show_default="runs/demo")
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

    story.check_extras()
    folder = claim(out)

    torch.set_num_threads(1)  # no slower at this size, and the same result on any number of cores
    console = Console(highlight=False)
    console.print("\n[bold]A Vision Transformer learns to read digits[/]\n")
    learn, held_out = story.load()
    model = story.build(seed)
    introduce(model, learn, held_out, console)
    seconds = train(model, learn, epochs, seed, console)
    looked = story.look(model, held_out)
    right, total = int(looked.right.sum()), len(looked.right)
    line(
        console,
        "result",
        f"[bold]{looked.accuracy:.1%}[/] of {total} held-out digits: {right} right, {total - right} wrong",
    )
    line(console, "time", f"{seconds:.0f} s of training, seed {seed}")
    show(looked, console)
    story.draw(looked, folder / "demo.png")
    line(console, "picture", escape(str(folder / "demo.png")))
    console.print()


def claim(out: Path | None) -> Path:
    """The folder to write to, made now: a folder that cannot be used is no news for the end."""
    if out is None:
        names = (Path("runs") / (f"demo-{n}" if n > 1 else "demo") for n in count(1))
        out = next(folder for folder in names if not folder.exists() or is_empty(folder))
    if out.exists() and not is_empty(out):
        raise InputError(
            "--out must be a new or an empty folder: nothing of yours is overwritten.",
            f"{out}, which {'has files in it' if out.is_dir() else 'is a file'}",
            "Name another folder, or leave --out away.",
        )
    out.mkdir(parents=True, exist_ok=True)
    return out


def is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def line(console: Console, what: str, text: str) -> None:
    console.print(f"  [bold cyan]{what:9}[/] {text}", soft_wrap=True)


def introduce(model: ViT, learn: Digits, held_out: Digits, console: Console) -> None:
    c = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shape = f"width {c.width}, depth {c.depth}, {c.heads} heads, {c.patches} patches of 2×2"
    split = f"{len(learn.labels):,} digits of 8×8 pixels to learn from, {len(held_out.labels)} held out"
    line(console, "data", split)
    line(console, "model", f"{shape}: {parameters:,} parameters")
    line(console, "device", "cpu, one thread, fp32: a model this small gains nothing from more")


def train(model: ViT, learn: Digits, epochs: int, seed: int, console: Console) -> float:
    """Train with a bar; returns the seconds it took."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vitrail import demo as story

    begin = time.monotonic()
    columns = (
        TextColumn("  [bold cyan]training [/]"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=epochs, news="")
        for loss, accuracy in story.train(model, learn, epochs=epochs, seed=seed):
            bar.update(task, advance=1, news=f"loss {loss:.2f}, accuracy {accuracy:.1%}")
    return time.monotonic() - begin


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
        inks = [looked.digits.images[index, 0].tolist() for index in shown]
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
