"""Weights in 8-bit integers, each rounded so that it makes up for the rounding of those before it.

Frantar et al. 2023 (GPTQ): column by column, the error of a column is spread over the columns that are still
to be rounded, as the inputs on the calibration images correlate. What remains of the error on average is
subtracted from the bias (Nagel et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.fast.quantize import INT8_MAX, Int8Scales, block_layers, row_scales
from vitrail.model import ViT
from vitrail.model.device import eval_mode

_TOKENS = 8192  # of all calibration images that are looked at
_MAX_INPUTS = 4096  # of a layer, whose moments fill as many rows; wider ones are rounded to the nearest
_DAMPING = 0.01  # of the mean square of an input, for those that are always zero
_COLUMNS = 64  # that are rounded before the others are updated


@dataclass(eq=False)
class _Moments:
    """Of the inputs of a layer: their means, those of the rounded ones, and the products of these."""

    exact: Tensor
    rounded: Tensor
    products: Tensor | None
    count: int = 0


def round_weights(
    model: ViT, scales: Mapping[str, Int8Scales], images: Tensor, batch: int
) -> dict[str, Int8Scales]:
    """The scales with rounded weights and corrections of the bias."""
    moments = _observe(model, scales, images, batch)
    layers = block_layers(model)
    found = {}
    for name, one in scales.items():
        weight, seen = layers[name].weight.detach(), moments.pop(name)
        integers = one.integers
        if seen.products is not None:
            integers = round_columns(weight * one.factors, seen.products / seen.count)
        one = replace(one, integers=integers)
        error = weight @ (seen.exact / seen.count) - one.rounded_weight() @ (seen.rounded / seen.count)
        found[name] = replace(one, shift=_for_bias(layers[name], error))
    return found


def _for_bias(layer: Any, error: Tensor) -> Tensor:
    """The part of a correction that the bias can take: none without one, and none for k if it has none."""
    if layer.bias is None:
        return torch.zeros_like(error)
    mask = getattr(layer, "bias_mask", None)
    return error if mask is None else error * mask


def _observe(model: ViT, scales: Mapping[str, Int8Scales], images: Tensor, batch: int) -> dict[str, _Moments]:
    """Run the calibration images in fp32 and add up the moments of some of their tokens."""
    found: dict[str, _Moments] = {}
    step = max(1, len(images) * _tokens(model) // _TOKENS)

    def watch(name: str, scale: Int8Scales) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().float().flatten(0, -2)[::step]
            rounded = scale.round_input(x)
            if name not in found:
                K = x.shape[1]
                products = torch.zeros(K, K) if K <= _MAX_INPUTS else None
                found[name] = _Moments(torch.zeros(K), torch.zeros(K), products)
            one = found[name]
            one.exact += x.sum(0)
            one.rounded += rounded.sum(0)
            one.count += len(x)
            if one.products is not None:
                one.products.addmm_(rounded.T, rounded)

        return hook

    with ExitStack() as stack:
        layers = block_layers(model)
        for name, scale in scales.items():
            stack.callback(layers[name].register_forward_pre_hook(watch(name, scale)).remove)
        with eval_mode(model):
            for part in images.split(batch):
                model(part)
    return found


def _tokens(model: ViT) -> int:
    return model.config.prefix + math.prod(model.config.grid)


def round_columns(weight: Tensor, products: Tensor) -> Tensor:
    """Weights (N, K) in steps of `row_scales`, as integers, for inputs with these mean products (K, K).

    The inputs with the largest squares come first: their errors are spread over the most others.
    """
    products = products + _DAMPING * products.diagonal().mean() * torch.eye(len(products))
    order = products.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(products[order][:, order]))
    spread = torch.linalg.cholesky(inverse, upper=True)  # row i: of the error of column i over the later ones
    steps = weight / row_scales(weight)[:, None]
    steps = steps[:, order]
    integers = torch.empty_like(steps)
    for begin in range(0, steps.shape[1], _COLUMNS):
        end = min(begin + _COLUMNS, steps.shape[1])
        block = steps[:, begin:end].clone()
        errors = torch.empty_like(block)
        for i in range(end - begin):
            row = spread[begin + i, begin + i : end]
            integers[:, begin + i] = block[:, i].round().clamp(-INT8_MAX, INT8_MAX)
            errors[:, i] = (block[:, i] - integers[:, begin + i]) / row[0]
            block[:, i:] -= errors[:, i : i + 1] * row
        steps[:, end:] -= errors @ spread[begin:end, end:]
    return integers[:, order.argsort()].to(torch.int8)
