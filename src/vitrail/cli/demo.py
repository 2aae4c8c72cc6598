"""`vitrail demo`: train on handwritten digits and show the result."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Option

from vitrail.base.safe_files import run_folder
from vitrail.cli.outputs import check_empty_folder

if TYPE_CHECKING:
    from rich.console import Console

    from vitrail.experiment.digits_demo import DemoPredictions


def demo(
    out: Path | None = Option(
        None, help="The run directory, new or empty.", show_default="runs/demo, or runs/demo-2 and so on"
    ),
    epochs: int = Option(50, min=1, max=10_000, help="Passes over the training set."),
    seed: int = Option(0, min=0, max=2**63 - 1, help="Random seed."),
) -> None:
    """Train a small ViT on handwritten digits, in about a minute.

    The 1,797 digits are part of scikit-learn: nothing is downloaded.
    """
    from vitrail.experiment import digits_demo as steps

    steps.check_extras()
    if out is not None:
        check_empty_folder("--out", out, "name another folder, or omit --out")
        out.mkdir(parents=True, exist_ok=True)  # before training: a path that cannot be used fails at once
    with run_folder(out, "demo") as folder:
        _run_demo(folder, epochs, seed)


def _run_demo(folder: Path, epochs: int, seed: int) -> None:
    """Train, and show and save the result."""
    import torch
    from rich.console import Console

    from vitrail.experiment import digits_demo as steps
    from vitrail.images.formats.sources import open_dataset
    from vitrail.training.console_lines import ConsoleCallback, print_rows
    from vitrail.training.signals import Interrupted
    from vitrail.training.start import train

    torch.set_num_threads(1)  # no slower at this size, and the same result on any number of cores
    console = Console(highlight=False)
    console.print("\n[bold]Training a Vision Transformer to read digits[/]\n")
    digits = open_dataset("digits")
    start = time.monotonic()
    print_rows({"device": "CPU, one thread, fp32"})
    with ConsoleCallback(brief=True) as callback:
        try:
            run = train(
                digits,
                out=folder,
                recipe="digits",
                epochs=epochs,
                seed=seed,
                callback=callback,
                verbose=False,
            )
        except Interrupted as stop:
            callback.close()
            command = f"vitrail train digits --recipe digits --epochs {epochs} --seed {seed} --resume --out"
            resume = f"Saved a checkpoint. Resume with: {command} {shlex.quote(str(folder))}"
            print(resume if stop.saved else stop)
            raise typer.Exit(128 + stop.signal) from None
    predictions = steps.predict_digits(run.bundle, digits.eval_split)
    correct, total = int(predictions.correct.sum()), len(predictions.correct)
    print_rows(
        {
            "training": f"{epochs} epoch{'s' * (epochs > 1)} in {callback.seconds:.0f} s, seed {seed}",
            "accuracy": f"{correct / total:.1%} on {total} held-out digits ({correct} correct, "
            f"{total - correct} wrong)",
            "total time": f"{time.monotonic() - start:.0f} s with evaluation and report",
        }
    )
    _show_digits(predictions, console)
    steps.save_figure(predictions, folder / "demo.png")
    for name in ("best.safetensors", "report.html", "demo.png"):
        console.print(f"Saved {folder / name}", markup=False, soft_wrap=True)


def _show_digits(predictions: DemoPredictions, console: Console) -> None:
    """Show correct and wrong digits, each above the same digit shaded by its attention."""
    from rich.text import Text

    from vitrail.cli.terminal_image import gallery, image
    from vitrail.experiment import digits_demo as steps

    color = console.color_system is not None and console.encoding.startswith("utf")
    titles = ("Correct", "Wrong, most confident first")
    for title, indices in zip(titles, steps.select_examples(predictions), strict=True):
        if not indices:
            console.print(f"\n[bold]{title.split(',')[0]}[/]: none")
            continue
        pixels = [predictions.pixels[index].tolist() for index in indices]
        attention = [steps.attention_brightness(predictions, index).tolist() for index in indices]
        console.print(f"\n[bold]{title}[/]: the digit, and the attention of the model\n")
        rows = [
            [image(digit, color=color) for digit in pixels],
            [Text("") for _ in indices],
            [image(digit, light, color=color) for digit, light in zip(pixels, attention, strict=True)],
            [Text(steps.caption(predictions, index)) for index in indices],
        ]
        gallery(rows, console)
    console.print()
