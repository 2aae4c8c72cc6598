"""How fast a model is in each precision, how much memory it takes, and how near its answers are to fp32."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.base.errors import InputError, VitrailError
from vitrail.base.telemetry import disable_telemetry
from vitrail.fast.accelerate import accelerate, read_calibration
from vitrail.fast.choices import describe_machine
from vitrail.fast.gate import MIN_AGREEMENT, compare, run_batches, split_images
from vitrail.fast.inference_routes import LOSSY, Precision
from vitrail.model.device import eval_mode
from vitrail.weights.bundle.bundle import Bundle, versions

_SECONDS, _LEAST, _MOST = 3.0, 5, 200  # of a measurement
_CHECK_BATCH = 16
_MOST_IMAGES = 256  # for calibration, and to compare with

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One way to compute a model, at one batch size."""

    name: str
    precision: str
    batch: int
    images_per_second: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    memory_mb: float | None = None
    """The peak on a GPU; on a CPU it is not measured."""
    weights_mb: float | None = None
    agreement: float | None = None
    """The fraction of images with the class of fp32; none of them is a calibration image."""
    kl: float | None = None
    top1: float | None = None
    error: str = ""
    """Why there are no numbers."""


@dataclass(frozen=True, kw_only=True)
class SpeedTable:
    """All rows, and what they depend on."""

    machine: str
    images: int
    """By which agreement and top-1 were measured."""
    rows: list[SpeedRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_speeds(
    bundle: Bundle,
    data: Any = None,
    *,
    precisions: Sequence[str],
    batches: Sequence[int],
    min_agreement: float = MIN_AGREEMENT,
    keep: Any = (),
    peers: bool = True,
    progress: Callable[[str], None] = lambda what: None,
) -> SpeedTable:
    """Measure a model in each precision and batch size, beside the model as it is.

    Args:
        data: a folder of images. Up to 256 are for calibration and 256 others to compare answers on; without
            it, lossy precisions cannot be measured.
    """
    model = bundle.model
    device = next(model.parameters()).device
    calibration = images = labels = exact = None
    if data is not None:
        calibration, images, labels = split_images(*read_calibration(bundle, data, 2 * _MOST_IMAGES))
        with eval_mode(model):
            exact = run_batches(model, images, _CHECK_BATCH)
    rows: list[SpeedRow] = []
    notes: list[str] = []
    for precision in ("plain", *precisions):
        progress(precision)
        try:
            name, run, used = _build(model, precision, calibration, min_agreement, keep, notes)
        except VitrailError as error:
            rows.append(SpeedRow(name=precision, precision=precision, batch=0, error=str(error)))
            continue
        gate = None
        if images is not None and exact is not None and model.config.classes:
            logits = run_batches(run, images, _CHECK_BATCH)
            gate = compare(logits, exact, precision=used, min_agreement=min_agreement, labels=labels)
        size = round(_weight_bytes(model, used) / 1e6, 1)
        for batch in batches:
            row = replace(_measure(name, used, run, model.config.input_shape, batch, device), weights_mb=size)
            if gate is not None:
                row = replace(row, agreement=gate.agreement, kl=gate.kl, top1=gate.top1)
            rows.append(row)
    if peers:
        progress("timm")
        rows += _peer_rows(model, batches, device)
    shown = 0 if images is None else len(images)
    return SpeedTable(machine=describe_machine(device), images=shown, rows=rows, notes=notes)


def _build(
    model: Any, precision: str, calibration: Tensor | None, min_agreement: float, keep: Any, notes: list[str]
) -> tuple[str, Run, str]:
    """The name, the forward pass and the precision of a row."""
    if precision == "plain":

        def run(images: Tensor) -> Tensor:
            with eval_mode(model):
                return model(images)

        kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        dtype = next(model.parameters()).dtype
        return "PyTorch, as it is", run, kinds.get(dtype, str(dtype))
    if precision in LOSSY and calibration is None:
        raise InputError(f"{precision} needs a folder of images as DATA.")
    images, kept = (calibration, keep) if precision in LOSSY else (None, ())
    fast = accelerate(
        model, cast(Precision, precision), calibrate=images, min_agreement=min_agreement, keep=kept
    )
    notes += [f"{precision}: {sentence}" for sentence in fast.report.sentences()]
    return fast.report.route, fast, fast.report.precision


def _weight_bytes(model: Any, precision: str) -> int:
    """Bytes of the weights: in int8 and fp8 the blocks' matrices take one byte a value."""
    total = sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2
    )
    if precision in LOSSY:
        return matrices + (total - matrices) * (4 if precision == "int8" else 2)
    return total * (4 if precision == "fp32" else 2)


# ---- time -----------------------------------------------------------------------------------


@torch.inference_mode()
def _measure(
    name: str, precision: str, run: Run, shape: Sequence[int], batch: int, device: torch.device
) -> SpeedRow:
    """Time forward passes one after the other; on a GPU also the peak of memory."""
    images = torch.randn(batch, *shape, device=device)
    cuda = device.type == "cuda"
    for _ in range(2):
        run(images)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    while len(times) < _LEAST or (sum(times) < _SECONDS and len(times) < _MOST):
        begin = time.perf_counter()
        run(images)
        if cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return SpeedRow(
        name=name,
        precision=precision,
        batch=batch,
        images_per_second=round(batch / median, 2),
        p50_ms=round(1000 * median, 3),
        p99_ms=round(1000 * sorted(times)[min(len(times) - 1, int(0.99 * len(times)))], 3),
        memory_mb=round(torch.cuda.max_memory_allocated(device) / 1e6, 1) if cuda else None,
    )


def _peer_rows(model: Any, batches: Sequence[int], device: torch.device) -> list[SpeedRow]:
    """timm's model of the same size with random weights, or why there is none."""
    c = model.config
    disable_telemetry()  # of huggingface_hub, which timm imports
    try:
        from timm.models.vision_transformer import VisionTransformer

        peer = VisionTransformer(
            img_size=c.pixels,
            patch_size=c.patch_pixels,
            in_chans=c.channels,
            num_classes=c.classes,
            embed_dim=c.width,
            depth=c.depth,
            num_heads=c.heads,
            mlp_ratio=c.F / c.width,
        )
    except Exception as error:  # a peer that does not import, or has no such model, is listed with the reason
        reason = f"{type(error).__name__}: {str(error)[:120]}"
        return [SpeedRow(name="timm", precision="fp32", batch=0, error=reason)]
    dtype = next(model.parameters()).dtype
    peer = peer.to(device, dtype).eval()
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"

    def run(images: Tensor) -> Tensor:
        return peer(images.to(dtype))

    return [_measure("timm, eager", kind, run, c.input_shape, batch, device) for batch in batches]
