"""A model in int8 for ONNX Runtime: static scales, weights by output channel, inputs by layer.

Static scales, because with dynamic ones the answer for an image would depend on the others in its batch.
The graph has QuantizeLinear and DequantizeLinear in front of each product, the standard operators, which ONNX
Runtime fuses into integer products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.fast.quantize import (
    Int8Scales,
    Observed,
    block_layers,
    int8_range,
    round_to_nearest,
    row_scales,
)
from vitrail.fast.smooth import can_smooth, is_free
from vitrail.model import ViT

if TYPE_CHECKING:
    from onnx import ModelProto

_STRENGTH, _STRENGTH_FC2 = 0.9, 0.8  # of smoothing: 1 moves all of a channel's range into the weights
_SPREAD = 8.0  # of the largest channel to the median one, from which smoothing is worth a product of its own
_TINY = 1e-5
_ALL = slice(None)  # rows of a weight


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
        found[name] = Int8Scales(factors, *int8_range(low, high), integers, rows, torch.zeros_like(rows))
    return found


def _smoothing(weight: Tensor, seen: Observed, strength: float) -> Tensor:
    """A factor for each input channel (K,), which moves some of its range into the weights.

    Channels with large inputs then lose less of the range of the others (Xiao et al. 2023, SmoothQuant).
    """
    columns = weight.abs().amax(0).clamp(min=_TINY)
    return seen.largest.clamp(min=_TINY) ** strength / columns ** (1 - strength)


@torch.no_grad()
def correct_biases(model: ViT, scales: Mapping[str, Int8Scales]) -> None:
    """Add the shifts to the biases of a smoothed model, whose rows may be divided by the next factors."""
    layers = block_layers(model)
    for name, one in scales.items():
        bias: Tensor | None = layers[name].bias
        if bias is not None:
            bias += one.shift * row_scales(layers[name].weight) / one.rows


def quantize_graph(graph: ModelProto, model: ViT, scales: Mapping[str, Int8Scales]) -> int:
    """Quantize the products of these layers of a traced model in place; how many layers were found.

    Args:
        model: the traced model, smoothed; its weights tell which product is which layer. Where the next
            layer's factors have divided its rows, their scales are divided, too.
    """
    from onnx import helper, numpy_helper

    layers = block_layers(model)
    wanted = {
        _bytes(part): (name, rows) for name in scales for rows, part in _parts(name, layers[name].weight)
    }
    stored = {tensor.name: tensor for tensor in graph.graph.initializer}
    nodes: list[Any] = []
    found: set[str] = set()
    for node in graph.graph.node:
        match = None
        if node.op_type == "MatMul" and node.input[1] in stored:
            match = wanted.get(numpy_helper.to_array(stored[node.input[1]]).tobytes())
        if match is not None:
            layer, part = match
            name = layer if part == _ALL else f"{layer}.{part.start or 0}"
            rows = row_scales(layers[layer].weight.detach())[part]
            tensors = {
                f"{name}.weight_int8": scales[layer].integers[part].T.contiguous().numpy(),
                f"{name}.weight_scale": rows.numpy(),
                f"{name}.weight_zero": np.zeros(len(rows), np.int8),
                f"{name}.input_scale": np.array(scales[layer].step, np.float32),
                f"{name}.input_zero": np.array(scales[layer].zero, np.uint8),
            }
            graph.graph.initializer.extend(
                numpy_helper.from_array(array, key) for key, array in tensors.items()
            )
            weight_int8, weight_scale, weight_zero, scale, zero_point = tensors
            nodes += [
                helper.make_node(
                    "QuantizeLinear", [node.input[0], scale, zero_point], [f"{name}.input_int8"]
                ),
                helper.make_node(
                    "DequantizeLinear", [f"{name}.input_int8", scale, zero_point], [f"{name}.input"]
                ),
                helper.make_node(
                    "DequantizeLinear", [weight_int8, weight_scale, weight_zero], [f"{name}.weight"], axis=1
                ),
            ]
            node.input[0], node.input[1] = f"{name}.input", f"{name}.weight"
            found.add(layer)
        nodes.append(node)
    still_used = {key for node in nodes for key in node.input}
    keep = [tensor for tensor in graph.graph.initializer if tensor.name in still_used]
    del graph.graph.node[:], graph.graph.initializer[:]
    graph.graph.node.extend(nodes)
    graph.graph.initializer.extend(keep)
    return len(found)


def _parts(name: str, weight: Tensor) -> list[tuple[slice, Tensor]]:
    """The rows of a layer that may be a product of their own: q by itself, k and v, in the last block."""
    inner = len(weight) // 3
    rows = [_ALL, slice(None, inner), slice(inner, None)] if name.endswith("qkv") else [_ALL]
    return [(part, weight[part]) for part in rows]


def _bytes(weight: Tensor) -> bytes:
    """What the graph stores of a weight."""
    return weight.detach().T.contiguous().numpy().tobytes()
