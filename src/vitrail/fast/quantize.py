"""Static quantization of linear layers: ranges from calibration images, and a simulation in fp32.

`Calibration` runs the images once for the ranges, and once more to round weights (`vitrail.fast.int8`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model import ViT
from vitrail.model.device import eval_mode

INT8_MAX, FP8_MAX = 127, 448.0
"""The largest numbers of int8 and of fp8 e4m3."""
_TINY = 1e-5


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
        """Round an input as its integers do; the result is divided by the factors."""
        values = (x / self.factors / self.step).round().add(self.zero)
        return values.clamp(0, 255).sub(self.zero) * self.step

    def rounded_weight(self) -> Tensor:
        """The rounded weights, multiplied by the factors."""
        return self.integers.to(self.rows.dtype) * self.rows[:, None]


class Calibration:
    """Images like those to come, and what they say about the layers of a model.

    Args:
        batch: images of a forward pass.
    """

    def __init__(self, model: ViT, images: Tensor, batch: int) -> None:
        self.model, self.images, self.batch = model, images, batch

    @cached_property
    def seen(self) -> dict[str, Observed]:
        """The inputs of all layers of blocks."""
        return observe(self.model, self.images, self.batch)

    @cached_property
    def scales(self) -> dict[str, Int8Scales]:
        """How each layer is quantized to int8."""
        from vitrail.fast.int8 import choose_scales, round_weights

        return round_weights(self.model, choose_scales(self.model, self.seen), self.images, self.batch)

    @contextmanager
    def simulate(self, precision: str, names: Collection[str]) -> Iterator[None]:
        """Round inputs and weights of the named layers while the block runs; the parameters do not change."""
        layers: dict[str, Any] = {
            name: layer for name, layer in block_layers(self.model).items() if name in names
        }
        for name, layer in layers.items():
            if precision == "fp8":
                layer.forward = _fp8_linear(layer, self.seen[name])
            else:
                layer.forward = _int8_linear(layer, self.scales[name])
        try:
            yield
        finally:
            for layer in layers.values():
                del layer.forward


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

    def see(name: str, x: Tensor) -> None:
        low, high = x.amin(0), x.amax(0)
        if (before := found.get(name)) is not None:
            low, high = torch.minimum(low, before.low), torch.maximum(high, before.high)
        found[name] = Observed(low, high)

    see_inputs(model, block_layers(model), images, batch, see)
    return found


def see_inputs(
    model: ViT, names: Iterable[str], images: Tensor, batch: int, see: Callable[[str, Tensor], None]
) -> None:
    """Run images, and call `see` with the name of each of these layers and its input, (tokens, K) in fp32."""

    def hook(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        see(name, args[0].detach().float().flatten(0, -2))

    layers = block_layers(model)
    with ExitStack() as stack, eval_mode(model):
        for name in names:
            stack.callback(layers[name].register_forward_pre_hook(partial(hook, name)).remove)
        for part in images.split(batch):
            model(part)


def to_fp8(x: Tensor, factor: float | Tensor) -> Tensor:
    """x factor in fp8 e4m3; what is too large becomes the largest number."""
    return (x.float() * factor).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def row_scales(weight: Tensor) -> Tensor:
    """The scale of 8-bit integers for each output channel of weights (N, K): (N,)."""
    return weight.abs().amax(1).clamp(min=1e-12) / INT8_MAX


def _int8_linear(layer: nn.Linear, scales: Int8Scales) -> Callable[[Tensor], Tensor]:
    rounded, bias = scales.rounded_weight(), _bias(layer)
    bias = None if bias is None else bias + scales.shift
    return lambda x: F.linear(scales.round_input(x), rounded, bias)


def _fp8_linear(layer: nn.Linear, seen: Observed) -> Callable[[Tensor], Tensor]:
    rows = FP8_MAX / layer.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-12)
    weight = to_fp8(layer.weight.detach(), rows).float() / rows
    factor = FP8_MAX / 2 / max(float(seen.largest.max()), _TINY)
    return lambda x: F.linear(to_fp8(x, factor).float() / factor, weight, _bias(layer))


def _bias(layer: Any) -> Tensor | None:
    return layer.masked_bias() if hasattr(layer, "masked_bias") else layer.bias
