"""Scales and weights of a model in int8: smoothed, rounded so that errors make up for each other.

Scales are static, because with dynamic ones the answer for an image would depend on the others in its batch.

smoothing  moves the range of channels with large inputs into the weights (Xiao et al. 2023, SmoothQuant)
rounding   goes column by column; the error of a column is spread over those that are still to be rounded, as
           the inputs on the calibration images correlate (Frantar et al. 2023, GPTQ)
biases     what remains of the error on average is subtracted from them (Nagel et al. 2019)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.fast.quantize import INT8_MAX, Int8Scales, Observed, block_layers, row_scales, see_inputs
from vitrail.fast.smooth import can_smooth, is_free
from vitrail.model import ViT

_STRENGTH, _STRENGTH_FC2 = 0.9, 0.8  # of smoothing: 1 moves all of a channel's range into the weights
_SPREAD = 8.0  # of the largest channel to the median one, from which smoothing is worth a product of its own
_TINY = 1e-5
_TOKENS = 8192  # of all calibration images that are looked at
_MAX_INPUTS = 4096  # of a layer, whose moments fill as many rows; wider ones are rounded to the nearest
_DAMPING = 0.01  # of the mean square of an input, for those that are always zero
_COLUMNS = 64  # that are rounded before the others are updated


def choose_scales(model: ViT, seen: Mapping[str, Observed]) -> dict[str, Int8Scales]:
    """Smoothed where that is possible, and with the full range of the calibration images.

    Where smoothing takes time, only layers with a few large channels are smoothed: in DeiT-Ti the largest is
    2 to 5 times the median, and with a product before each fc2 it was 6 % slower and no nearer to fp32.
    Clipping the range to where the mean error of a layer's output is smallest gives worse answers: the few
    large values carry much of them.
    """
    found = {}
    for name, layer in block_layers(model).items():
        one = seen[name]
        factors, weight = torch.ones_like(one.low), layer.weight.detach()
        spread = float(one.largest.max() / one.largest.median().clamp(min=_TINY))
        if can_smooth(model, name) and (is_free(model, name) or spread > _SPREAD):
            factors = _smoothing(weight, one, _STRENGTH_FC2 if name.endswith("fc2") else _STRENGTH)
        low, high = float((one.low / factors).min()), float((one.high / factors).max())
        weight = weight * factors
        integers, rows = round_to_nearest(weight), row_scales(weight)
        low, high = min(0.0, low), max(0.0, high)  # zero is a value of its own
        step = max((high - low) / 255, 1e-12)
        zero = min(255, max(0, round(-low / step)))
        found[name] = Int8Scales(factors, step, zero, integers, rows, torch.zeros_like(rows))
    return found


def _smoothing(weight: Tensor, seen: Observed, strength: float) -> Tensor:
    """A factor for each input channel (K,): those with large inputs then take less of the others' range."""
    columns = weight.abs().amax(0).clamp(min=_TINY)
    return seen.largest.clamp(min=_TINY) ** strength / columns ** (1 - strength)


def round_to_nearest(weight: Tensor) -> Tensor:
    """Weights (N, K) as 8-bit integers, in steps of `row_scales`."""
    return (weight / row_scales(weight)[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


@dataclass(eq=False)
class _Moments:
    """Sums over the inputs of a layer."""

    exact: Tensor
    """(K,), as they are."""
    rounded: Tensor
    """(K,), rounded."""
    products: Tensor | None
    """(K, K), of the rounded ones with each other."""
    count: int = 0


def round_weights(
    model: ViT, scales: Mapping[str, Int8Scales], images: Tensor, batch: int
) -> dict[str, Int8Scales]:
    """The scales with rounded weights and corrections of the bias."""
    moments: dict[str, _Moments] = {}
    every = max(1, len(images) * model.config.tokens // _TOKENS)

    def see(name: str, x: Tensor) -> None:
        x, K = x[::every], x.shape[1]
        if name not in moments:
            products = torch.zeros(K, K) if K <= _MAX_INPUTS else None
            moments[name] = _Moments(torch.zeros(K), torch.zeros(K), products)
        one, rounded = moments[name], scales[name].round_input(x)
        one.exact += x.sum(0)
        one.rounded += rounded.sum(0)
        one.count += len(x)
        if one.products is not None:
            one.products.addmm_(rounded.T, rounded)

    see_inputs(model, scales, images, batch, see)
    found = {}
    for name, layer in block_layers(model).items():
        if name not in scales:
            continue
        one, seen, weight = scales[name], moments.pop(name), layer.weight.detach()
        if seen.products is not None:
            one = replace(one, integers=round_columns(weight * one.factors, seen.products / seen.count))
        error = weight @ (seen.exact / seen.count) - one.rounded_weight() @ (seen.rounded / seen.count)
        found[name] = replace(one, shift=_for_bias(layer, error))
    return found


def _for_bias(layer: Any, error: Tensor) -> Tensor:
    """The part of a correction that the bias can take: none without one, and none for k if it has none."""
    if layer.bias is None:
        return torch.zeros_like(error)
    mask = getattr(layer, "bias_mask", None)
    return error if mask is None else error * mask


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


@torch.no_grad()
def correct_biases(model: ViT, scales: Mapping[str, Int8Scales]) -> None:
    """Add the shifts to the biases of a smoothed model, whose rows may be divided by the next factors."""
    layers = block_layers(model)
    for name, one in scales.items():
        bias: Tensor | None = layers[name].bias
        if bias is not None:
            bias += one.shift * row_scales(layers[name].weight) / one.rows
