"""`vitrail bench`: how fast a model is in each precision, and how near its answers are to fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.safe_files import write_text
from vitrail.cli.options import GateOptions, ModelOptions, split_names
from vitrail.cli.outputs import check_new_files
from vitrail.cli.streams import print_error

if TYPE_CHECKING:
    import torch

    from vitrail.evaluation.speed import SpeedTable
    from vitrail.weights.bundle.bundle import Bundle

_PRECISIONS = ("fp32", "bf16", "fp8", "int8")
_BATCHES = {"cpu": "1,8", "cuda": "1,8,256"}


def bench(
    model: str | None = Argument(
        None, help="A weight file, a model folder, hf:owner/name, or a size as B/16."
    ),
    data: Path | None = Argument(
        None, help="A folder of images: for agreement with fp32, for top-1, and to calibrate int8."
    ),
    precision: str | None = Option(
        None, metavar="A,B,...", help="Of fp32, bf16, fp8, int8.", show_default="fp32,int8; GPU bf16,fp8"
    ),
    batch: str | None = Option(None, metavar="N,M,...", help="Batch sizes.", show_default="1,8; GPU 1,8,256"),
    json_file: Path | None = Option(None, "--json", help="Save the table to this new JSON file."),
    forget: bool = Option(
        False, "--forget", help="Forget which way was the fastest on this machine, and exit."
    ),
    *,
    gate: GateOptions,
    opening: ModelOptions,
) -> None:
    """Measure speed, memory and accuracy in each precision.

    Agreement is that with the classes of fp32. Of DATA, half of the images calibrate, and answers are
    compared on the others. A size such as B/16 is built with random weights: its speed is that of any model
    of this size. timm's model of the same size is measured beside it if timm is installed.
    """
    if forget:
        from vitrail.fast.choices import forget as forget_choices

        print("Forgotten." if forget_choices() else "Nothing was remembered.")
        return
    if model is None:
        raise InputError("No model given; name a weight file, or a size such as B/16.")
    check_new_files({"--json": json_file})
    if data is not None and not data.is_dir():
        raise InputError(f"DATA must be a folder of images, and {printable(data)} is none.")
    chosen = list(split_names(precision))
    for name in chosen:
        if name not in _PRECISIONS:
            raise InputError(f"Unknown precision {printable(repr(name))}. {suggest(name, _PRECISIONS)}")
    batches = _parse_batches(batch or _BATCHES["cpu"])

    from vitrail.evaluation.speed import measure_speeds

    opening = opening.for_precision("int8" if "int8" in chosen else None)
    bundle = _open(model, opening)
    on = next(bundle.model.parameters()).device
    chosen = chosen or _usual_precisions(on, calibrated=data is not None)
    batches = batches if batch else _parse_batches(_BATCHES.get(on.type, _BATCHES["cpu"]))
    opening.print_device(bundle.model, ", ".join(chosen))
    table = measure_speeds(
        bundle,
        data,
        precisions=chosen,
        batches=batches,
        min_agreement=gate.min_agreement,
        keep=gate.layers,
        progress=lambda what: None if opening.quiet else print_error(f"measuring {what} ..."),
    )
    _show(table, opening.quiet)
    if json_file is not None:
        write_text(json_file, json.dumps({"model": model, **table.as_dict()}, indent=1) + "\n")
        print(f"Saved {printable(json_file)}")
    if any(row.error for row in table.rows if not row.name.startswith("timm")):
        raise typer.Exit(1)


def _usual_precisions(device: torch.device, *, calibrated: bool) -> list[str]:
    """The fastest exact precision; with images to calibrate also the lossy one, where the device has it."""
    import torch

    from vitrail.fast.inference_routes import resolve

    exact = resolve("auto", device)
    if not calibrated:
        return [exact]
    if device.type != "cuda":
        return [exact, "int8"]
    return [exact, "fp8"] if torch.cuda.get_device_capability(device) >= (9, 0) else [exact]


def _open(model: str, opening: ModelOptions) -> Bundle:
    """The file, or a model of this size with random weights."""
    from vitrail.model.device import place
    from vitrail.model.presets import create, preset
    from vitrail.weights.bundle.bundle import Bundle

    try:
        if Path(model).exists() or model.startswith("hf:"):
            raise ValueError
        preset(model)
    except ValueError:
        return opening.load(model, precision=None)  # which explains what is wrong
    built = create(model, **opening.overrides()).eval()
    place(built, opening.device)
    return Bundle(model=built)


def _parse_batches(text: str) -> list[int]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 100_000 for part in sizes):
        raise InputError(
            f"--batch takes numbers from 1 to 100,000, separated by commas, not {printable(text)!r}."
        )
    return [int(part) for part in sizes]


def _show(table: SpeedTable, quiet: bool) -> None:
    print(table.machine)
    print(f"{'':26} {'':5} {'batch':>5} {'images/s':>9} {'p50 ms':>8} {'MB':>6} {'agrees':>7} {'top-1':>6}")
    for row in table.rows:
        if row.error:
            print(f"{row.name:26} {row.error}")
            continue
        size = "" if row.weights_mb is None else f"{row.weights_mb:,.0f}"
        agrees, top1 = ("" if one is None else f"{one:.1%}" for one in (row.agreement, row.top1))
        numbers = (
            f"{row.batch:5} {row.images_per_second:9,.1f} {row.p50_ms:8.2f} {size:>6} {agrees:>7} {top1:>6}"
        )
        print(f"{row.name[:26]:26} {row.precision:5} {numbers}")
    if table.images:
        print(f"agrees: with the class of fp32, on {table.images:,} images that did not calibrate")
    for note in [] if quiet else table.notes:
        print(f"note: {note}")
