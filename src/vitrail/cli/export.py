"""`vitrail export`: write a model as ONNX, a torch.export program, or an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from typer import Option

from vitrail.base.errors import printable
from vitrail.cli.options import MODEL, ModelOptions, SpeedOptions, split_names
from vitrail.cli.outputs import saving_gate_report

if TYPE_CHECKING:
    from vitrail.exporters.api import Format
    from vitrail.exporters.proof import Proof
    from vitrail.model.config import ViTConfig

_FILE_NAMES = {"onnx": "model.onnx", "torch-export": "model.pt2", "html": "classroom.html"}


def export(
    model: str = MODEL,
    to: str = Option(
        ...,
        metavar="onnx|torch-export|html",
        help="onnx: a file for ONNX Runtime. torch-export: a .pt2 program. html: a page that runs the "
        "model in a browser.",
    ),
    out: Path | None = Option(None, help="A new file.", show_default="model.onnx, model.pt2, classroom.html"),
    dynamic: str | None = Option(
        None, help="Dynamic dimensions: batch, or batch,size.", show_default="batch"
    ),
    with_preprocess: bool = Option(
        False, "--with-preprocess", help="Include resizing and normalization; the input is uint8 pixels."
    ),
    examples: list[Path] | None = Option(
        None,
        metavar="IMAGE|FOLDER",
        help="For html: example images of the page, ten at most; may be repeated.",
        show_default="digits or patterns",
    ),
    *,
    speed: SpeedOptions,
    opening: ModelOptions,
) -> None:
    """Export a model, and check that the outputs are the same.

    An ONNX or .pt2 file is compared with the model on the same inputs before it is saved. The differences,
    the versions and the time of both are in a .proof.json beside it. vitrail predict and vitrail serve
    accept the .onnx file; with --precision int8 it is smaller and faster on a CPU. A .pt2 program runs on
    --device.

    The HTML file is a page that runs a small model in any browser, without a server. A model that a
    format does not support is refused, and the message names the config field.
    """
    from vitrail.exporters.api import export as export_model

    out = out or Path(_FILE_NAMES.get(to, "model"))
    with saving_gate_report(out):
        result = export_model(
            model,
            out,
            to=cast("Format", to),
            dynamic=dynamic and split_names(dynamic),
            with_preprocess=with_preprocess,
            examples=examples or (),
            precision=speed.precision or "fp32",
            calibration=speed.calibration,
            min_agreement=speed.min_agreement,
            keep=speed.layers,
            **opening.arguments(),
        )
    opening.print_guess(result.guess)
    for note in [] if opening.quiet else result.notes:
        print(f"note: {note}")
    if result.proof is not None:
        _show_proof(result.proof, result.path, result.config)
        return
    size_mb = result.path.stat().st_size / 1e6
    print(f"Saved {printable(result.path)} ({size_mb:.1f} MB); open it in a browser.")


def _show_proof(proof: Proof, path: Path, config: ViTConfig) -> None:
    checks, speed = proof.checks, proof.speed
    worst = max(checks, key=lambda check: check.difference / check.limit)
    same, count = sum(check.same_class for check in checks), sum(check.inputs for check in checks)
    logits = f"logits (batch, {config.classes}), " if config.classes else ""
    print(f"outputs      {logits}embedding (batch, {config.pooled_width})")
    if (gate := proof.gate) is not None:
        print(
            f"agreement    {gate['agreement']:.2%} of {gate['images']:,} held-out images: the class of fp32"
        )
        print(f"mean KL      {gate['kl']:.2g} nats to fp32")
        if gate["top1"] is not None:
            print(f"top-1        {gate['top1']:.2%}, fp32 {gate['top1_fp32']:.2%}")
        print(
            f"kept         {len(gate['keep'])} layers in fp32"
            + (f": {', '.join(gate['keep'])}" * bool(gate["keep"]))
        )
    print(f"difference   at most {worst.difference:.2g} in {len(checks)} checks (limit {worst.limit:.2g})")
    print(f"same class   {same} of {count} inputs")
    if pixels := sum(check.pixels for check in checks):
        changed = sum(check.different_pixels for check in checks)
        largest = max(check.largest_pixel_difference for check in checks)
        effect = max(check.end_to_end_difference for check in checks)
        print(f"pixels       {changed:,} of {pixels:,} differ from Preprocess, by at most {largest}")
        print(f"             outputs differ by {effect:.2g} because of them")
    print(
        f"one image    {speed.exported:.3g} ms in {speed.runtime}, {speed.eager:.3g} ms in eager PyTorch "
        f"(median of {speed.n}, threads: {speed.threads})"
    )
    print("versions     " + ", ".join(f"{name} {version}" for name, version in proof.versions.items()))
    print(f"sha256       {proof.sha256}")
    print(f"Saved {printable(path)} ({proof.bytes / 1e6:.1f} MB) and {printable(path.name)}.proof.json")
