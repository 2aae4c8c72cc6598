"""Static quantization: ranges of activations from calibration images, and how much each layer hurts.

observe      the smallest and largest input of each linear layer, by channel
simulate     a model that rounds inputs and weights of its linear layers as int8 or fp8 does, in fp32
find_worst   the KL that each layer causes alone
propose      the layers to keep in higher precision so that the rest passes the gate
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.fast.gate import compare, run_batches, worst_first
from vitrail.fast.plain import FP8_MAX, to_fp8
from vitrail.model import ViT
from vitrail.model.device import eval_mode

INT8_MAX = 127
_TINY = 1e-5
_FEW = 64  # images by which layers are compared with each other


@dataclass(frozen=True)
class Observed:
    """The inputs of a linear layer on the calibration images."""

    low: Tensor
    """The smallest of each channel: (K,)."""
    high: Tensor
    """The largest of each channel: (K,)."""

    @property
    def largest(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())


def block_layers(model: ViT) -> dict[str, nn.Linear]:
    """The linear layers of all blocks by name: nearly all of the arithmetic."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }


def observe(model: ViT, images: Tensor, batch: int) -> dict[str, Observed]:
    """Run the calibration images and return the range of each layer's input."""
    found: dict[str, Observed] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().float().flatten(0, -2)
            low, high = x.amin(0), x.amax(0)
            if (before := found.get(name)) is not None:
                low, high = torch.minimum(low, before.low), torch.maximum(high, before.high)
            found[name] = Observed(low, high)

        return hook

    with ExitStack() as stack:
        for name, layer in block_layers(model).items():
            stack.callback(layer.register_forward_pre_hook(watch(name)).remove)
        with eval_mode(model):
            for part in images.split(batch):
                model(part)
    return found


def int8_range(low: float, high: float) -> tuple[float, int]:
    """Scale and zero point of unsigned 8-bit integers from low to high; zero is a value of its own."""
    low, high = min(0.0, low), max(0.0, high)
    scale = max((high - low) / 255, 1e-12)
    return scale, min(255, max(0, round(-low / scale)))


def row_scales(weight: Tensor) -> Tensor:
    """The scale of 8-bit integers for each output channel of weights (N, K): (N,)."""
    return weight.abs().amax(1).clamp(min=1e-12) / INT8_MAX


def round_to_nearest(weight: Tensor) -> Tensor:
    """Weights (N, K) as 8-bit integers, in steps of `row_scales`."""
    return (weight / row_scales(weight)[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


# ---- simulation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8Scales:
    """How a linear layer is quantized to int8."""

    factors: Tensor
    """(K,): inputs are divided by them and the columns of the weights multiplied."""
    step: float
    """The scale of the input."""
    zero: int
    """The integer that stands for 0 in the input."""
    integers: Tensor
    """(N, K): the weights, multiplied by the factors and rounded."""
    rows: Tensor
    """(N,): the scales of the integers."""
    shift: Tensor
    """(N,): added to the bias, for what rounding changes on average."""

    def round_input(self, x: Tensor) -> Tensor:
        """What the integers of an input stand for, divided by the factors."""
        values = (x / self.factors / self.step).round().add(self.zero)
        return values.clamp(0, 255).sub(self.zero) * self.step

    def rounded_weight(self) -> Tensor:
        """What the integers of the weights stand for, multiplied by the factors."""
        return self.integers.to(self.rows.dtype) * self.rows[:, None]


def _int8_linear(layer: nn.Linear, seen: Observed, scales: Int8Scales | None) -> Callable[[Tensor], Tensor]:
    assert scales is not None
    rounded, bias = scales.rounded_weight(), _bias(layer)
    bias = None if bias is None else bias + scales.shift
    return lambda x: F.linear(scales.round_input(x), rounded, bias)


def _fp8_linear(layer: nn.Linear, seen: Observed, scales: Int8Scales | None) -> Callable[[Tensor], Tensor]:
    rows = FP8_MAX / layer.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-12)
    weight = to_fp8(layer.weight.detach(), rows).float() / rows
    factor = FP8_MAX / 2 / max(float(seen.largest.max()), _TINY)

    def forward(x: Tensor) -> Tensor:
        return F.linear(to_fp8(x, factor).float() / factor, weight, _bias(layer))

    return forward


def _bias(layer: Any) -> Tensor | None:
    return layer.masked_bias() if hasattr(layer, "masked_bias") else layer.bias


@contextmanager
def simulate(
    model: ViT,
    precision: str,
    seen: Mapping[str, Observed],
    names: Collection[str],
    scales: Mapping[str, Int8Scales] | None = None,
) -> Iterator[None]:
    """Round inputs and weights of the named layers while the block runs; the parameters do not change."""
    build = _fp8_linear if precision == "fp8" else _int8_linear
    layers: dict[str, Any] = {name: layer for name, layer in block_layers(model).items() if name in names}
    for name, layer in layers.items():
        layer.forward = build(layer, seen[name], None if scales is None else scales[name])
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


# ---- which layers hurt ----------------------------------------------------------------------


def find_worst(
    model: ViT,
    precision: str,
    seen: Mapping[str, Observed],
    names: Sequence[str],
    images: Tensor,
    batch: int,
    scales: Mapping[str, Int8Scales] | None = None,
) -> dict[str, float]:
    """The KL that each layer causes alone, the largest first."""
    images = images[:: max(1, len(images) // _FEW)][:_FEW]  # of all classes, if they are sorted
    exact = run_batches(model, images, batch)
    found = {}
    for name in names:
        with simulate(model, precision, seen, {name}, scales):
            logits = run_batches(model, images, batch)
        found[name] = compare(logits, exact, precision=precision, min_agreement=0).kl
    return worst_first(found)


def propose(
    model: ViT,
    precision: str,
    seen: Mapping[str, Observed],
    worst: Sequence[str],
    images: Tensor,
    batch: int,
    min_agreement: float,
    scales: Mapping[str, Int8Scales] | None = None,
) -> tuple[str, ...]:
    """The fewest of the worst layers that must stay as they are for the rest to pass; empty if none do."""
    exact = run_batches(model, images, batch)

    def passes(count: int) -> bool:
        with simulate(model, precision, seen, set(worst[count:]), scales):
            logits = run_batches(model, images, batch)
        return compare(logits, exact, precision=precision, min_agreement=min_agreement).passed

    low, high = 0, len(worst)  # all layers kept is no quantization
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return tuple(worst[:high]) if high < len(worst) else ()
