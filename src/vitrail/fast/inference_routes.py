"""The ways to compute a model, and which of them is the fastest on this machine."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.base.summary import Summary
from vitrail.fast.choices import Choices
from vitrail.fast.cuda_graph import Forward, Replay
from vitrail.fast.executable import Executable
from vitrail.fast.gate import Gate
from vitrail.fast.quantize import Calibration, block_layers
from vitrail.model import ViT
from vitrail.model.device import eval_mode

Precision = Literal["auto", "fp32", "bf16", "fp8", "int8"]
Goal = Literal["throughput", "latency"]
LOSSY = ("fp8", "int8")

Routes = dict[str, Callable[[], Forward]]
"""Functions that build a forward pass, by the route's name."""

GATE_BATCH = {"cpu": 8, "cuda": 64}
PLAIN = "PyTorch"
_BATCH = {"cpu": 8, "cuda": 256}  # of a measurement for throughput; 1 for latency
_SECONDS, _LEAST, _MOST = 4.0, 4, 20  # of a measurement
_TIMES_ROUNDING = 4.0  # how far answers may be from fp32, relative to the model's own in the same precision
_MIN_DISTANCE = 1e-4  # which is allowed in any case


@dataclass(frozen=True, kw_only=True, repr=False)
class Acceleration(Summary):
    """A report: how a model is computed, and why."""

    precision: str
    route: str
    """The name of the way that computes the forward pass."""
    why: list[str] = field(default_factory=list)
    """The reasons, one sentence each."""
    kept: tuple[str, ...] = ()
    """Layers that stay in the higher precision."""
    images_per_second: dict[str, float] = field(default_factory=dict)
    """Images per second of each route that was measured, at `batch` images."""
    batch: int = 1
    gate: Gate | None = None
    """How near the answers are to fp32; only for fp8 and int8."""

    def first_line(self) -> str:
        return f"{self.precision} by {self.route}"

    def summary(self) -> dict[str, str]:
        rows = {f"why {number}": sentence for number, sentence in enumerate(self.why, start=1)}
        for name, rate in self.images_per_second.items():
            rows[name] = f"{rate:,.1f} images/s at batch {self.batch}"
        if self.gate is not None:
            rows["agreement"] = f"{self.gate.agreement:.2%} of {self.gate.images:,} images"
        return rows

    def sentences(self) -> list[str]:
        """The report as sentences, for the notes of a command."""
        lines = [f"Computed in {self.precision} by {self.route}.", *self.why]
        if (gate := self.gate) is not None:
            top1 = "" if gate.top1 is None else f", top-1 {gate.top1:.2%} (fp32 {gate.top1_fp32:.2%})"
            lines.append(
                f"{gate.precision} gives the class of fp32 for {gate.agreement:.2%} of {gate.images:,} "
                f"held-out images, mean KL {gate.kl:.2g}{top1}."
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        gate = None if self.gate is None else self.gate.as_dict()
        return {**asdict(replace(self, gate=None)), "kept": list(self.kept), "gate": gate}


class Accelerated(Executable):
    """The forward pass of a model for inference; `.report` says how it is computed.

    With a mask, and while activations are recorded or edited, the model itself computes.
    """

    def __init__(self, model: ViT, run: Forward, report: Acceleration) -> None:
        super().__init__(model)
        self.run, self.report = run, report

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, K); without a head the pooled vector (B, D)."""
        if mask is not None or self.watched:
            return self.model(images, mask)
        return self.outputs(images)[1]

    @torch.inference_mode()
    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled vectors (B, D) and logits (B, K), as they are in the dtype of the forward pass."""
        if self.watched:
            pooled = self.model.pool_images(images)
            return pooled, self.model.logits(self.model.head(pooled))
        return self.run(images)

    def extra_repr(self) -> str:
        return self.report.first_line()


# ---- building -------------------------------------------------------------------------------


class Builder:
    """Builds the ways to compute a model, and measures which is the fastest.

    Args:
        calibrate: images for int8 and fp8.
    """

    def __init__(
        self, model: ViT, device: torch.device, goal: Goal, choices: Choices, calibrate: Tensor | None
    ) -> None:
        self.model, self.device, self.goal, self.choices = model, device, goal, choices
        if calibrate is not None:
            self.calibration = Calibration(model, calibrate, GATE_BATCH[device.type])

    def quantizable(self, precision: str) -> list[str]:
        """The layers that can be computed in this precision."""
        names = list(block_layers(self.model))
        if precision == "fp8":
            from vitrail.fast.fused import why_not_fused

            reason = why_not_fused(self.model)
            if reason is not None:
                raise InputError(f"fp8 needs the fused blocks, and {reason}; use bf16.")
            return [name for name in names if name.endswith(("qkv", "mlp.fc1", "mlp.fc2"))]
        return names

    def fastest(self, precision: str, kept: tuple[str, ...] = ()) -> Accelerated:
        """The fastest of the routes of this precision, the plain model among them."""
        routes, why = self.routes(precision, kept)
        batch = 1 if self.goal == "latency" else _BATCH[self.device.type]
        images = torch.zeros(batch, *self.model.config.input_shape, device=self.device)
        runs: dict[str, Forward] = {}
        errors: dict[str, Exception] = {}

        @functools.cache
        def measure_all() -> dict[str, float]:
            for route, build in routes.items():
                try:
                    runs[route] = build()
                    runs[route](images)
                except Exception as error:  # the others are measured nevertheless
                    errors[route] = error
            working = {route: run for route, run in runs.items() if route not in errors}
            return _seconds(working, images, self.device)

        def measure(name: str) -> float:
            seconds = measure_all()
            if name in errors:
                raise errors[name]
            return seconds[name]

        question = f"model {_config_key(self.model)}, {precision}, {len(kept)} kept, batch {batch}"
        *_, name = routes  # the one with the most fused
        if len(routes) > 1:
            name = self.choices.fastest(question, list(routes), measure, default=name)
        for failed, reason in self.choices.failures.items():
            if failed.startswith(question):
                why.append(f"{failed.removeprefix(question + ': ')} does not work here: {reason}.")
        seconds = self.choices.seconds.get(question, {})
        if name == PLAIN and len(routes) > 1:
            why.append(f"Nothing else was faster at batch {batch}, so the model itself computes.")
        run = runs[name] if name in runs else routes[name]()
        if name != PLAIN and precision not in LOSSY:
            plain = runs[PLAIN] if PLAIN in runs else routes[PLAIN]()
            if wrong := self._find_error(run, plain):
                why, name, run = [f"{name} {wrong}, so the model itself computes."], PLAIN, plain
        # Beside the quantized route there are others, which are not lossy.
        used = precision if precision in name or precision not in LOSSY else resolve("auto", self.device)
        report = Acceleration(
            precision=used,
            route=name,
            why=why,
            kept=kept if used in LOSSY else (),
            images_per_second={route: round(batch / one, 2) for route, one in seconds.items() if one},
            batch=batch,
        )
        return Accelerated(self.model, run, report)

    @torch.inference_mode()
    def _find_error(self, run: Forward, plain: Forward) -> str | None:
        """Describe an error if the answers for random images are farther from fp32 than rounding is.

        A kernel that was tested elsewhere may be compiled wrongly for this GPU, or by this version.
        """
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, *self.model.config.input_shape, generator=generator).to(self.device)
        exact = plain_forward(self.model, torch.float32)(images)[0]
        limit = max(_TIMES_ROUNDING * _distance(plain(images)[0], exact), _MIN_DISTANCE)
        found = _distance(run(images)[0], exact)
        if found <= limit:
            return None
        return f"gave other answers than the model (they differ by {found:.2g} of their size)"

    def routes(self, precision: str, kept: tuple[str, ...]) -> tuple[Routes, list[str]]:
        """The routes by name, and the reasons for them."""
        if self.device.type == "cuda":
            return self._gpu_routes(precision, kept)
        routes: Routes = {PLAIN: lambda: plain_forward(self.model, torch.float32)}
        if find_spec("onnxruntime") is None or find_spec("onnxscript") is None:
            if precision == "int8":
                raise InputError('int8 needs ONNX Runtime; install it with: pip install "vitrail[export]".')
            return routes, [
                "ONNX Runtime is not installed (pip install 'vitrail[export]'), so PyTorch computes."
            ]
        why = "On a CPU, ONNX Runtime fuses operators that PyTorch computes one by one."
        from vitrail.fast.onnx_graph import OnnxForward, build_onnx

        build = functools.cache(functools.partial(build_onnx, self.model))
        if precision == "int8":
            why = "int8 products with static scales from the calibration images; the rest in fp32."
            build = functools.cache(functools.partial(self.int8_graph, kept))
        if self.goal == "throughput":
            name = f"ONNX Runtime, {precision}, an image for each thread"
            routes[name] = lambda: OnnxForward(build(), one_by_one=True)
        routes[f"ONNX Runtime, {precision}"] = lambda: OnnxForward(build())
        return routes, [why]

    def int8_graph(self, kept: tuple[str, ...] = ()) -> Any:
        """The model for ONNX Runtime, with int8 products except in some layers."""
        from vitrail.fast.onnx_fuse import fuse_products
        from vitrail.fast.onnx_graph import build_onnx

        graph = self.quantized_graph(kept, build_onnx)
        fuse_products(graph)
        return graph

    def quantized_graph(self, kept: tuple[str, ...], build: Callable[[ViT], Any]) -> Any:
        """The ONNX graph that `build` makes of the smoothed model, with int8 products."""
        from vitrail.fast.int8 import correct_biases
        from vitrail.fast.onnx_fuse import quantize_graph
        from vitrail.fast.smooth import smooth

        chosen = {name: one for name, one in self.calibration.scales.items() if name not in kept}
        smoothed = smooth(self.model, {name: one.factors for name, one in chosen.items()})
        correct_biases(smoothed, chosen)
        graph = build(smoothed)
        found = quantize_graph(graph, smoothed, chosen)
        if found != len(chosen):
            raise RuntimeError(f"{found} of {len(chosen)} products were found in the traced model")
        return graph

    def _gpu_routes(self, precision: str, kept: tuple[str, ...]) -> tuple[Routes, list[str]]:
        from vitrail.fast.fused import FusedForward, has_kernels, why_not_fused

        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        routes: Routes = {
            PLAIN: lambda: plain_forward(self.model, dtype),
            "PyTorch in a CUDA graph": lambda: PaddedReplay(plain_forward(self.model, dtype)),
        }
        if precision == "fp32":
            return routes, ["fp32 was asked for; a CUDA graph saves the launches of the kernels."]
        if not has_kernels(self.device):
            return routes, ["Triton is not installed, so there are no fused kernels."]
        if (reason := why_not_fused(self.model)) is not None:
            return routes, [f"The blocks are computed by their own code in bf16: {reason}."]
        ranges = None
        if precision == "fp8":
            ranges = {name: float(one.largest.max()) for name, one in self.calibration.seen.items()}
        routes[f"fused kernels, {precision}, in a CUDA graph"] = lambda: PaddedReplay(
            FusedForward(self.model, self.choices, ranges=ranges, keep=kept)
        )
        return routes, [
            f"Norms, GELU, sums and {precision} products in few kernels, launched as one CUDA graph."
        ]


def _distance(some: Tensor, exact: Tensor) -> float:
    """The distance of pooled vectors from the exact ones, relative to their size."""
    return float((some.float() - exact).norm() / exact.norm())


def resolve(precision: str, device: torch.device) -> str:
    """Resolve "auto" for a device: bf16 on a GPU that has it, else fp32."""
    if precision == "auto":
        return "bf16" if has_bf16(device) else "fp32"
    return precision


def has_bf16(device: torch.device) -> bool:
    """Whether this is a GPU that computes in bf16, rather than emulating it."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _config_key(model: ViT) -> str:
    text = json.dumps(asdict(model.config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain_forward(model: ViT, dtype: torch.dtype) -> Forward:
    """The model's own code, in this dtype; a copy if it has another one."""
    if next(model.parameters()).dtype != dtype:
        model = copy.deepcopy(model).to(dtype)

    def forward(images: Tensor) -> tuple[Tensor, Tensor]:
        with eval_mode(model):
            pooled = model.encode(images.to(dtype)).pooled
            return pooled, model.head(pooled)

    return forward


class PaddedReplay(Replay):
    """Small batches are filled up with zeros to few sizes: each size takes a CUDA graph of its own."""

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        count, size = len(images), padded_size(len(images))
        if size == count:
            return super().__call__(images)
        pooled, logits = super().__call__(F.pad(images, (0, 0) * 3 + (0, size - count)))
        return pooled[:count], logits[:count]


def padded_size(count: int) -> int:
    """1, 2, 4 or 8; a multiple of 8 up to 32; as it is above."""
    if count <= 8:
        return 1 << (count - 1).bit_length() if count else 0
    return -(-count // 8) * 8 if count <= 32 else count


@torch.inference_mode()
def _seconds(runs: dict[str, Forward], images: Tensor, device: torch.device) -> dict[str, float]:
    """The seconds of each forward pass: the fastest of several, in turns, because other load only slows."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for number in range(_MOST):
        if number >= _LEAST and time.perf_counter() - started > _SECONDS:
            break
        for name, run in runs.items():
            begin = time.perf_counter()
            run(images)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            times[name].append(time.perf_counter() - begin)
    return {name: min(some) for name, some in times.items()}
