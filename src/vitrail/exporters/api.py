"""`vt.export`: write a model as ONNX, a torch.export program, or an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.base.errors import InputError, option, printable, setting, suggest
from vitrail.base.summary import Summary
from vitrail.fast.gate import MIN_AGREEMENT
from vitrail.images.formats.folders import expand_folders
from vitrail.model.config import format_sides
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.load import as_bundle

if TYPE_CHECKING:
    from vitrail.exporters.proof import Proof
    from vitrail.model import ViT
    from vitrail.model.config import ViTConfig

Format = Literal["onnx", "torch-export", "html"]
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch-export": ".pt2", "html": ".html"}
_DYNAMIC = ("batch", "size")


@dataclass(frozen=True, repr=False)
class Exported(Summary):
    """A file that was written."""

    path: Path
    config: ViTConfig
    """Of the model."""
    proof: Proof | None = None
    """How far its outputs are from the model's, which is in a .proof.json as well; None for a page."""
    notes: list[str] = field(default_factory=list)
    """Remarks, one sentence each."""
    guess: str = ""
    """As in Bundle: that the preprocessing is a guess."""

    def summary(self) -> dict[str, str]:
        """The file, and the largest difference."""
        rows = {"file": str(self.path), "size": f"{self.path.stat().st_size / 1e6:.1f} MB"}
        if self.proof is not None:
            worst = max(self.proof.checks, key=lambda check: check.difference / check.limit)
            rows["largest difference"] = f"{worst.difference:.2g} (limit {worst.limit:.2g})"
        return rows | ({"notes": " ".join(self.notes)} if self.notes else {})


def export(
    model: Bundle | ViT | str | Path,
    out: str | Path,
    /,
    *,
    to: Format | None = None,
    dynamic: Sequence[str] | None = None,
    with_preprocess: bool = False,
    examples: Sequence[str | Path] = (),
    precision: str = "fp32",
    calibration: Any = None,
    min_agreement: float = MIN_AGREEMENT,
    keep: Collection[str] | Literal["auto"] = (),
    **options: Any,
) -> Exported:
    """Export a model, and check that the outputs are the same before the file gets its name.

    Args:
        model: a bundle, a run, a ViT with default preprocessing, or what `vitrail.load` takes.
        out: a new file. The proof is written beside it, as `out`.proof.json.
        to: "onnx", "torch-export" or "html", a page that runs a small model in a browser. By default what the
            ending of `out` says: .onnx, .pt2 or .html.
        dynamic: dimensions that may change: ("batch",), which is the default, or ("batch", "size").
        with_preprocess: include resizing and normalization; the input is uint8 images (B, h, w, C) then.
        examples: image files or folders for the page; ten images at most are shown.
        precision: "fp32", or for ONNX also "int8", which needs `calibration`.
        calibration, min_agreement, keep: as in `vitrail.accelerate`; calibration is a folder of images, or a
            list of them.
        options: passed to `vitrail.load`, such as size=384; for a torch-export program also the device that
            it runs on: by default a GPU if one can be used.
    """
    path = Path(out)
    form = _check_format(to, path)
    if options.get("device") is not None and form != "torch-export":
        runtime = "a browser" if form == "html" else "ONNX Runtime"
        raise InputError(
            f"{option('device')} is for {option('to', 'torch-export')}: {runtime} chooses the device itself; "
            "remove it."
        )
    if form == "html":
        given = {"dynamic": dynamic is not None, "with-preprocess": with_preprocess}
        _refuse("html", {**given, "precision": precision != "fp32"})
        return _export_page(model, path, examples, options)
    _refuse(form, {"examples": bool(examples)})
    dimensions = (dynamic,) if isinstance(dynamic, str) else tuple(dynamic or ("batch",))
    for name in dimensions:
        if name not in _DYNAMIC:
            raise InputError(
                f"{option('dynamic')} takes batch and size, not {printable(repr(name))}. "
                f"{suggest(str(name), _DYNAMIC)}"
            )

    from vitrail.exporters.onnx import write_int8, write_onnx
    from vitrail.exporters.proof import check_output
    from vitrail.exporters.torch_export import write_torch

    check_output(path, SUFFIXES[form])
    write: Callable[..., Proof]
    if precision != "fp32":
        _check_int8(form, precision, with_preprocess, calibration)
        write = partial(write_int8, calibration=calibration, min_agreement=min_agreement, keep=keep)
    else:
        one = write_onnx if form == "onnx" else write_torch
        write = partial(one, with_preprocess=with_preprocess)
    is_program = form == "torch-export" and not with_preprocess  # which resizes on the CPU
    bundle = _open_classifier(model, options, "auto" if is_program else "cpu")
    proof = write(bundle, path, dynamic=dimensions)
    return Exported(path, bundle.model.config, proof, _notes(bundle, form), bundle.guess)


def _notes(bundle: Bundle, form: str) -> list[str]:
    """What this file loses: images in their own shape, and devices other than the GPU it was made on."""
    notes = []
    if bundle.native is not None:
        notes.append(
            "The model was trained on images in their own shape; this file takes "
            f"{format_sides(bundle.model.config.pixels)} only. vitrail serve and vt.Predictor keep the shape "
            "with the vitrail file."
        )
    device = next(bundle.model.parameters()).device
    if form == "torch-export" and device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
        other = option("device", "cpu")
        notes.append(f"The program runs on a GPU only ({device}, {name}); {other} makes one for CPUs.")
    return notes


def _open_classifier(model: Any, options: dict[str, Any], device: str = "cpu") -> Bundle:
    """The model; one of CLIP or SigLIP without classes only if it has no outputs that look like classes."""
    bundle = as_bundle(model, default_device=device, **options)
    if bundle.model.config.classes:
        bundle.require_classes(
            "write some into its head first, with vitrail convert MODEL NEW.safetensors --labels cat,dog; or "
            f"remove its projection with {setting('classes', 0)} to export pooled vectors.",
        )
    return bundle


def _export_page(model: Any, path: Path, examples: Sequence[str | Path], options: dict[str, Any]) -> Exported:
    from vitrail.exporters.html import check_page_path, write_classroom

    check_page_path(path)
    images = expand_folders([Path(one) for one in examples])
    name = Path(model).stem if isinstance(model, (str, Path)) else path.stem
    bundle = _open_classifier(model, options)
    notes = [*_notes(bundle, "html"), *write_classroom(bundle, path, name, images)]
    return Exported(path, bundle.model.config, notes=notes, guess=bundle.guess)


# ---- checks -------------------------------------------------------------------------------------


def _check_format(to: str | None, path: Path) -> str:
    """The format, by its name or by the ending of the file."""
    if to is None:
        forms = {suffix: form for form, suffix in SUFFIXES.items()}
        if path.suffix not in forms:
            raise InputError(
                f"The name of an exported file must end in .onnx, .pt2 or .html, and {printable(path)} does "
                f"not; change its ending, or name the format with {option('to')}."
            )
        return forms[path.suffix]
    if to not in SUFFIXES:
        raise InputError(f"Unknown format {printable(repr(to))} for {option('to')}. {suggest(to, SUFFIXES)}")
    return to


def _refuse(form: str, given: dict[str, bool]) -> None:
    """Refuse the arguments that are given and that this format has no use for."""
    for name in (name for name, is_given in given.items() if is_given):
        raise InputError(f"{option(name)} is not for {option('to', form)}; remove it.")


def _check_int8(form: str, precision: str, with_preprocess: bool, calibration: Any) -> None:
    if precision != "int8":
        raise InputError(
            f"Files are exported in fp32 or int8, not in {printable(precision)}; remove "
            f"{option('precision', precision)}."
        )
    _refuse(form, {"precision": form != "onnx"})
    if with_preprocess:
        raise InputError(
            f"{option('precision', 'int8')} takes normalized images; remove "
            f"{option('with-preprocess', True)}."
        )
    if calibration is None:
        raise InputError(
            "int8 needs images like those to come, to set its scales and to compare answers with fp32; name "
            f"a folder with {option('calibration', 'photos/')}."
        )
