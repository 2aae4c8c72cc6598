"""`vitrail convert`: convert a model to another family, with a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer
from typer import Argument, Option

from vitrail.cli.option_values import refuse_given
from vitrail.cli.options import ModelOptions, WordOptions, usual_precision


def convert(
    source: str = Argument(..., metavar="IN", help="A weight file, a folder with one, or hf:owner/name."),
    out: Path = Argument(
        ..., help="A new .safetensors or .npz file; a name without an ending is a folder with settings."
    ),
    to: str | None = Option(
        None,
        help="vitrail, hf, timm, torchvision, google, lucidrains, or the family of IN.",
        show_default="vitrail",
    ),
    classes: int | None = Option(None, min=0, help="Replace the head by a new one for this many classes."),
    channels: int | None = Option(None, min=1, help="Change the model to this many input channels."),
    toward: str | None = Option(
        None,
        metavar="MODEL",
        help="Interpolate the weights of IN and of this model, fine-tuned from it (WiSE-FT).",
    ),
    at: float | None = Option(
        None,
        "--interpolate",
        metavar="T",
        help="With --toward: 0 is IN, 1 is the other model.",
        show_default="0.5",
    ),
    data: str | None = Option(
        None, help="With --toward: labeled images, to print the accuracy of the way between."
    ),
    *,
    words: WordOptions,
    opening: ModelOptions,
) -> None:
    """Write a model as a file of another library, with a report.

    The report says what was changed and how close the logits are.

    With --labels or --prompts, a CLIP or SigLIP file becomes a classifier: the words of the classes are
    written into its head, and OUT is an ordinary file that evaluate, serve, export and train take.

    A model with NaN or infinity in its weights is refused. The exit code is 1 if the other library's logits
    are NaN or infinity.
    """
    from vitrail.base.errors import printable

    if toward is not None:
        changes: dict[str, object] = {
            "--to": to,
            "--classes": classes,
            "--channels": channels,
            "--labels": words.labels,
        }
        changes |= {"--prompts": words.prompts or None, "--templates": words.templates, **opening.named()}
        refuse_given(
            changes,
            "OPTION is not for --toward, which takes both models as they are and writes a vitrail file; "
            "leave it out, and convert IN, MODEL or OUT by itself with OPTION.",
        )
        at = 0.5 if at is None else at
        _interpolate(source, toward, out, at, data, opening)
        return
    of_two = "OPTION is for the way between two models; add --toward, or leave it out."
    refuse_given({"--data": data, "--interpolate": at}, of_two)
    from vitrail.weights.conversion import convert as convert_file

    arguments = {"classes": classes, "channels": channels, "prompts": words.read(), **opening.overrides()}
    report = convert_file(source, out, to=to or "vitrail", offline=opening.offline, **arguments)
    lines = {
        "from": report.source,
        "to": f"{report.target}, {out}",
        "same": f"{report.same} tensors",
        "renamed": f"{report.renamed} tensors",
        "transformed": f"{report.transformed} tensors",
        "extra tensors": ", ".join(report.extras[:8]) + (" ..." if len(report.extras) > 8 else "") or "none",
        "largest logit difference": "unknown" if report.difference is None else f"{report.difference:.2g}",
        "compared with": report.checked_by,
    }
    for name, value in lines.items():
        print(f"{name:<25} {printable(value)}")
    for note in [] if opening.quiet else report.notes:
        print(f"note: {printable(note, 500)}")
    if not report.holds:
        typer.echo("vitrail: the other library's logits are NaN or infinity; do not use OUT.", err=True)
        raise typer.Exit(1)


def _interpolate(
    source: str,
    toward: str,
    out: Path,
    at: float,
    data: str | None,
    opening: ModelOptions,
) -> None:
    """Write the weights between two models; with data, print the accuracy of the way between."""
    from vitrail.base.errors import printable
    from vitrail.cli.outputs import check_new_files
    from vitrail.weights.bundle.bundle import check_suffix
    from vitrail.weights.conversion import interpolate

    check_suffix(out)
    check_new_files({"OUT": out})
    on_cpu = replace(opening, device="cpu")
    first, second = (on_cpu.load(one) for one in (source, toward))
    mixed = interpolate(first, second, at)
    if data is not None:
        from vitrail.evaluation.evaluate_model import evaluate
        from vitrail.model.device import place

        print("    t  accuracy")
        for t in sorted({*(step / 10 for step in range(11)), at}):
            between = interpolate(first, second, t)
            place(between.model, opening.device)
            if t == 0:
                precision = usual_precision(between)
                opening.print_device(between.model, precision)
            metrics = evaluate(between, data).metrics
            accuracy = None if metrics is None else metrics.top1
            mark = "  written" if t == at else ""
            print(f"{t:5.3g}  {'unknown' if accuracy is None else f'{accuracy:8.2%}'}{mark}", flush=True)
    mixed.save(out)
    print(f"written: {printable(out)}")
    if not opening.quiet:
        print(f"note: {printable(mixed.notes[-1])}")
