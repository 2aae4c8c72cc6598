"""A model made faster: `vt.accelerate(model)` returns a module with the same forward.

fast = vt.accelerate(model, precision="int8", calibrate=images)
fast(images)                                             # logits, as model(images)
print(fast.report)                                       # what was done, why, and how near the answers are
fast.model                                               # the model itself, with all of its weights

`accelerate_bundle` does the same for commands, which name files instead of tensors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from vitrail.base.errors import InputError, option, printable, suggest
from vitrail.base.fields import as_integer, short_repr
from vitrail.fast.choices import Choices
from vitrail.fast.cuda_graph import Forward
from vitrail.fast.gate import (
    MIN_AGREEMENT,
    GateError,
    check_agreement,
    compare,
    pass_gate,
    run_batches,
    split_images,
)
from vitrail.fast.inference_routes import (
    GATE_BATCH,
    LOSSY,
    PLAIN,
    Accelerated,
    Acceleration,
    Builder,
    Goal,
    PaddedReplay,
    Precision,
    has_bf16,
    plain_forward,
    resolve,
)
from vitrail.fast.merge import MergedForward, why_not_merged
from vitrail.images.decode import read_pixels
from vitrail.images.formats.folders import list_images
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.weights.bundle.bundle import Bundle

_MAX_CALIBRATION = 512  # images of a folder, half of them for ranges: more change these little


def accelerate(
    model: ViT,
    precision: Precision = "auto",
    goal: Goal = "throughput",
    *,
    calibrate: Tensor | None = None,
    labels: Tensor | None = None,
    min_agreement: float = MIN_AGREEMENT,
    keep: Collection[str] | Literal["auto"] = (),
    merge: int = 0,
    remember: bool = True,
) -> Accelerated:
    """A module with the model's forward, computed in the fastest way that was measured on this machine.

    Args:
        model: a ViT of images, on the device where it shall run. It is not changed.
        precision: "auto" is fp32 on a CPU and bf16 on a GPU. "fp8" (GPU) and "int8" (CPU) are lossy: they
            need `calibrate` and must pass the gate.
        goal: "throughput" of large batches, or the "latency" of one image.
        calibrate: normalized images (N, C, H, W), as `preprocess` returns them; some hundred that are like
            those to come. Every second one sets ranges of activations; answers are compared on the others.
        labels: the classes (N,) of these images, for the accuracy in the report.
        min_agreement: the fraction of the others for which the most likely class must be that of fp32.
        keep: names of layers to leave in higher precision, such as "blocks.0.mlp.fc2"; or "auto" for the
            fewest with which the gate passes.
        merge: tokens to merge in each block (Bolya et al. 2023, ToMe), in fp32 or bf16: fewer tokens are
            faster, and lossy. It needs `calibrate` and must pass the gate; none by default.
        remember: whether to store what was measured in the cache folder.

    Raises:
        GateError: too many answers differ. It names the layers that cause it.
    """
    execution = InferenceExecution(precision, goal, calibrate, labels, min_agreement, keep, merge, remember)
    return accelerate_as(model, execution)


@dataclass(frozen=True, eq=False)
class InferenceExecution:
    """How inference computes a model; the fields are the arguments of `accelerate`."""

    precision: Precision = "auto"
    goal: Goal = "throughput"
    calibrate: Tensor | None = None
    labels: Tensor | None = None
    min_agreement: float = MIN_AGREEMENT
    keep: Collection[str] | Literal["auto"] = ()
    merge: int = 0
    remember: bool = True


def accelerate_as(model: ViT, how: InferenceExecution) -> Accelerated:
    """Build the fastest forward pass of a model that was measured and passes the gate."""
    device = _check(model, how)
    chosen = resolve(how.precision, device)
    choices = Choices(device, remember=how.remember)
    if how.merge:
        return _merge_tokens(model, chosen, how)
    if chosen not in LOSSY:
        return Builder(model, device, how.goal, choices, None).fastest(chosen)
    assert how.calibrate is not None
    ranges, held_out, labels = split_images(how.calibrate, how.labels)
    builder = Builder(model, device, how.goal, choices, ranges)
    names = builder.quantizable(chosen)
    if isinstance(how.keep, str) and how.keep != "auto":
        raise InputError(f'keep takes a list of layers or "auto", not {short_repr(how.keep)}.')
    kept = () if how.keep == "auto" else tuple(how.keep)
    if unknown := [name for name in kept if name not in names]:
        raise InputError(
            f"keep: no layer {unknown[0]!r} is computed in {chosen}. {suggest(unknown[0], names)}"
        )
    return pass_gate(
        builder.calibration,
        lambda kept: builder.fastest(chosen, kept),
        chosen,
        kept,
        names,
        held_out,
        labels=labels,
        min_agreement=how.min_agreement,
        search=how.keep == "auto",
    )


def _merge_tokens(model: ViT, precision: str, how: InferenceExecution) -> Accelerated:
    """The model with tokens merged in each block, if its answers are near enough on all images."""
    assert how.calibrate is not None
    run: Forward = MergedForward(model, how.merge, torch.bfloat16 if precision == "bf16" else torch.float32)
    device, where = next(model.parameters()).device, PLAIN
    if device.type == "cuda":
        run, where = PaddedReplay(run), "PyTorch in a CUDA graph"
    why = f"{how.merge} tokens are merged in each of {model.config.depth} blocks."
    fast = Accelerated(model, run, Acceleration(precision=precision, route=where, why=[why]))
    with eval_mode(model):
        found, exact = (run_batches(one, how.calibrate, GATE_BATCH[device.type]) for one in (fast, model))
    gate = compare(
        found,
        exact,
        precision=f"{precision} with {how.merge} tokens merged in each block",
        min_agreement=how.min_agreement,
        labels=how.labels,
    )
    if not gate.passed:
        raise GateError(gate, "merge fewer tokens")
    fast.report = replace(fast.report, gate=gate)
    return fast


def accelerate_by_default(model: ViT) -> Accelerated | None:
    """Accelerate for a command without a precision: on a GPU, bf16 by fused kernels in CUDA graphs.

    Nothing is measured, so that a command with few images starts at once; what `accelerate` has measured
    before on this machine is used. On a CPU building takes longer than most commands save.

    Returns:
        None for a model that is computed as it is. So is one for which this fails with a blank image; the
        report then says why.
    """
    parameter = next(model.parameters())
    usual = parameter.dtype in (torch.float32, torch.bfloat16) and model.config.input == "image"
    if not (usual and has_bf16(parameter.device)):
        return None
    builder = Builder(model, parameter.device, "throughput", Choices(parameter.device, measure=False), None)
    try:
        fast = builder.fastest("bf16")
        fast(torch.zeros(1, *model.config.input_shape, device=parameter.device))
        torch.cuda.current_stream(parameter.device).synchronize()  # not the device: others may be capturing
    except Exception as error:  # no compiler for Triton, too little memory, a backend without support
        why = f"It could not be accelerated ({type(error).__name__}: {str(error)[:200]})."
        name = "bf16" if parameter.dtype == torch.bfloat16 else "fp32"
        report = Acceleration(precision=name, route=PLAIN, why=[why])
        return Accelerated(model, plain_forward(model, parameter.dtype), report)
    if parameter.dtype == torch.float32:
        why = f"{option('precision', 'fp32')} computes in the model's own precision."
        fast.report = replace(fast.report, why=[*fast.report.why, why])
    return fast


# ---- the model of a bundle, calibrated on files ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How a command or a predictor accelerates its model."""

    precision: str = "auto"
    calibration: Any = None
    """A folder of images, or paths, PIL images and arrays; for int8 and fp8."""
    min_agreement: float = MIN_AGREEMENT
    keep: Collection[str] | Literal["auto"] = ()


def accelerate_bundle(bundle: Bundle, how: Speedup | None) -> Accelerated | None:
    """Accelerate the bundle's model; `accelerate_by_default` without `how`. None if it runs as it is."""
    if how is None:
        return accelerate_by_default(bundle.model)
    images = labels = None
    if how.precision in LOSSY:
        if how.calibration is None:
            raise InputError(
                f"{how.precision} is lossy and needs images like those to come, to set its scales and to "
                f"compare answers with fp32; name a folder with {option('calibration', 'photos/')}."
            )
        images, labels = read_calibration(bundle, how.calibration)
    return accelerate(
        bundle.model,
        cast(Precision, how.precision),
        calibrate=images,
        labels=labels,
        min_agreement=how.min_agreement,
        keep=how.keep,
    )


def read_calibration(
    bundle: Bundle, source: Any, most: int = _MAX_CALIBRATION
) -> tuple[Tensor, Tensor | None]:
    """Read up to `most` evenly spaced images, normalized, and their labels.

    Args:
        source: a folder of images, or a list of paths, PIL images and arrays.

    Returns:
        Images (N, C, H, W), and labels (N,) if the folder of every image has the name of a class.
    """
    assert bundle.preprocess is not None
    paths = _list_calibration(source)
    images: list[Tensor] = []
    step = max(1.0, len(paths) / most)
    chosen = [paths[int(step * index)] for index in range(min(len(paths), most))]
    for path in chosen:
        try:
            pixels = read_pixels(path, bundle.preprocess, limit_memory=True)
        except (OSError, ValueError) as error:
            name = printable(path) if isinstance(path, (str, os.PathLike)) else f"image {len(images)}"
            raise InputError(f"The calibration image {name} cannot be read: {error}") from error
        images.append(bundle.preprocess.normalize(pixels))
    device = next(bundle.model.parameters()).device
    names = {name: index for index, name in enumerate(bundle.labels or [])}
    folders = [Path(path).parent.name if isinstance(path, (str, os.PathLike)) else "" for path in chosen]
    named = bool(names) and all(folder in names for folder in folders)
    labels = torch.tensor([names[folder] for folder in folders]) if named else None
    return torch.stack(images).to(device), labels


def _list_calibration(source: Any) -> list[Any]:
    is_path = isinstance(source, (str, os.PathLike))
    if is_path and not Path(source).is_dir():
        raise InputError(f"The calibration images must be in a folder, and {printable(source)} is none.")
    paths: list[Any] = (
        list_images(source) if is_path else list(source) if isinstance(source, Iterable) else []
    )
    if len(paths) < 2:
        raise InputError(
            f"There are {'too few' if paths else 'no'} images to calibrate with in "
            f"{printable(source) if is_path else 'calibration'}; name a folder with some hundred."
        )
    return paths


# ---- arguments ------------------------------------------------------------------------------


def _check(model: Any, how: InferenceExecution) -> torch.device:
    """Refuse what cannot be done, with the reason; returns the device."""
    precision, calibrate, labels = how.precision, how.calibrate, how.labels
    if not isinstance(model, ViT):
        raise InputError(f"accelerate takes a ViT, not {short_repr(model)}; of a bundle, its .model.")
    for name, value, allowed in (
        ("precision", precision, get_args(Precision)),
        ("goal", how.goal, get_args(Goal)),
    ):
        if value not in allowed:
            raise InputError(f"Unknown {name} {short_repr(value)}. {suggest(str(value), allowed)}")
    if model.config.input != "image":
        raise InputError(
            f"accelerate takes a model of images, and this one has input={model.config.input!r}; call it "
            "as it is."
        )
    device = next(model.parameters()).device
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"accelerate knows CPUs and NVIDIA GPUs, and the model is on {device}; move it.")
    if precision == "fp8" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < (9, 0)):
        raise InputError(
            "fp8 needs an NVIDIA GPU of compute capability 9.0 (H100) or later; on a CPU, use int8."
        )
    if precision == "int8" and device.type != "cpu":
        raise InputError("int8 is for CPUs, and the model is on a GPU; use fp8 or bf16 there.")
    if precision == "bf16" and device.type == "cpu":
        raise InputError("bf16 can end the process on some CPUs, so it is for GPUs only; use fp32 or int8.")
    check_agreement(how.min_agreement)
    merge = as_integer("merge", how.merge, 0, 10_000)
    if merge and precision in LOSSY:
        raise InputError(f"merge is for fp32 and bf16, not for {precision}; remove one of them.")
    if merge and (reason := why_not_merged(model)) is not None:
        raise InputError(f"The tokens of this model cannot be merged: {reason}; remove merge.")
    if merge or precision in LOSSY:
        if calibrate is None:
            raise InputError(
                f"{'merge' if merge else precision} is lossy and needs images to calibrate with and compare "
                "answers on; give some hundred normalized ones as calibrate=images."
            )
        if not isinstance(calibrate, Tensor) or calibrate.ndim != 4 or len(calibrate) < 2:
            shape = tuple(calibrate.shape) if isinstance(calibrate, Tensor) else short_repr(calibrate)
            raise InputError(
                f"calibrate must be a tensor of at least two images (N, C, H, W), not {shape}: half of them "
                "set ranges, and answers are compared on the others."
            )
        if labels is not None and (not isinstance(labels, Tensor) or labels.shape != calibrate.shape[:1]):
            raise InputError(f"labels must be a tensor of one class for each of the {len(calibrate)} images.")
    return device
