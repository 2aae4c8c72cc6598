"""`vitrail convert`: convert a model to another family, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli import overrides as options
from vitrail.cli.model_arguments import load_model, print_device, usual_precision


def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A weight file, a folder with one, or hf:owner/name.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="A new .safetensors or .npz file; a name without an ending is a folder with settings."
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="vitrail, hf, timm, torchvision, google, lucidrains, or the family of IN.",
            show_default="vitrail",
        ),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=0, help="Replace the head by a new one for this many classes.")
    ] = None,
    size: options.Size = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Change the model to this many input channels.")
    ] = None,
    labels: options.Labels = None,
    prompts: options.Prompts = None,
    templates: options.Templates = None,
    toward: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Interpolate the weights of IN and of this model, fine-tuned from it (WiSE-FT).",
        ),
    ] = None,
    at: Annotated[
        float | None,
        typer.Option(
            "--interpolate",
            metavar="T",
            help="With --toward: 0 is IN, 1 is the other model.",
            show_default="0.5",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="With --toward: labeled images, to print the accuracy of the way between."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda|cuda:1|mps", help="Where --data is evaluated; the rest is on the CPU."
        ),
    ] = "auto",
    offline: options.Offline = False,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write a model as a file of another library, and report what was changed and how close the logits are.

    With --labels or --prompts, a CLIP or SigLIP file becomes a classifier: the words of the classes are
    written into its head, and OUT is an ordinary file that evaluate, serve, export and train take.

    A model with NaN or infinity in its weights is refused. The exit code is 1 if the other library's logits
    are NaN or infinity.
    """
    from vitrail.base.errors import InputError, printable

    if toward is not None:
        heads = {"--classes": classes, "--labels": labels, "--prompts": prompts, "--templates": templates}
        loading = {"--size": size, "--channels": channels, "--family": family, "--keys": keys, "--set": given}
        _check_as_they_are({"--to": to, **heads, **loading})
        at = 0.5 if at is None else at
        _interpolate(source, toward, out, at, data, device, offline=offline, quiet=quiet)
        return
    for option, value in (("--data", data), ("--interpolate", at)):
        if value is not None:
            raise InputError(f"{option} is for the way between two models; add --toward, or leave it out.")
    from vitrail.weights.conversion import convert as convert_file

    arguments = options.load_arguments(family, keys, given, size, classes=classes, channels=channels)
    if labels is not None or prompts or templates is not None:
        from vitrail.weights.text.prompts import read_prompts

        arguments["prompts"] = read_prompts(labels, prompts, templates)
    report = convert_file(source, out, to=to or "vitrail", offline=offline, **arguments)
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
    for note in [] if quiet else report.notes:
        print(f"note: {printable(note, 500)}")
    if not report.holds:
        typer.echo("vitrail: the other library's logits are NaN or infinity; do not use OUT.", err=True)
        raise typer.Exit(1)


def _check_as_they_are(given: dict[str, object]) -> None:
    """Refuse options that change a model, where two are interpolated."""
    from vitrail.base.errors import InputError

    for option, value in given.items():
        if value is not None:
            raise InputError(
                f"{option} is not for --toward, which takes both models as they are and writes a vitrail "
                f"file; leave it out, and convert IN, MODEL or OUT by itself with {option}."
            )


def _interpolate(
    source: str,
    toward: str,
    out: Path,
    at: float,
    data: str | None,
    device: str,
    *,
    offline: bool,
    quiet: bool,
) -> None:
    """Write the weights between two models; with data, print the accuracy of the way between."""
    from vitrail.base.errors import printable
    from vitrail.cli.outputs import check_new_files
    from vitrail.weights.bundle.bundle import check_suffix
    from vitrail.weights.conversion import interpolate

    check_suffix(out)
    check_new_files({"OUT": out})
    arguments = {"offline": offline, "device": "cpu"}
    first, second = (load_model(one, arguments, quiet=quiet) for one in (source, toward))
    mixed = interpolate(first, second, at)
    if data is not None:
        from vitrail.evaluation.evaluate_model import evaluate
        from vitrail.model.device import place

        print("    t  accuracy")
        for t in sorted({*(step / 10 for step in range(11)), at}):
            between = interpolate(first, second, t)
            place(between.model, device)
            if t == 0:
                print_device(
                    between.model,
                    {} if device == "auto" else {"device": device},
                    usual_precision(between.model, None, between.native is not None),
                    quiet=quiet,
                )
            metrics = evaluate(between, data).metrics
            accuracy = None if metrics is None else metrics.top1
            mark = "  written" if t == at else ""
            print(f"{t:5.3g}  {'unknown' if accuracy is None else f'{accuracy:8.2%}'}{mark}", flush=True)
    mixed.save(out)
    print(f"written: {printable(out)}")
    if not quiet:
        print(f"note: {printable(mixed.notes[-1])}")
