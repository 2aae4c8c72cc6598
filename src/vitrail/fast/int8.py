"""A model in int8 for ONNX Runtime: static scales, weights by output channel, inputs by layer.

Static scales, because with dynamic ones the answer for an image would depend on the others in its batch.
The graph has QuantizeLinear and DequantizeLinear in front of each product, the standard operators, which ONNX
Runtime fuses into integer products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.fast.quantize import Observed, block_layers, int8_range, quantize_rows
from vitrail.model import ViT

if TYPE_CHECKING:
    from onnx import ModelProto


def input_scales(seen: Mapping[str, Observed], factors: Mapping[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Scale and zero point of the input of each smoothed layer."""
    return {
        name: int8_range(float((seen[name].low / values).min()), float((seen[name].high / values).max()))
        for name, values in factors.items()
    }


def quantize_graph(graph: ModelProto, model: ViT, scales: Mapping[str, tuple[float, int]]) -> int:
    """Quantize the products of these layers of a traced model in place; how many were found.

    Args:
        model: the traced model; its weights tell which product is which layer.
    """
    from onnx import helper, numpy_helper

    layers = block_layers(model)
    wanted = {layers[name].weight.detach().T.contiguous().numpy().tobytes(): name for name in scales}
    stored = {tensor.name: tensor for tensor in graph.graph.initializer}
    nodes: list[Any] = []
    removed: dict[str, str] = {}
    for node in graph.graph.node:
        name = None
        if node.op_type == "MatMul" and node.input[1] in stored:
            name = wanted.get(numpy_helper.to_array(stored[node.input[1]]).tobytes())
        if name is not None:
            source, weight = node.input
            integers, rows = quantize_rows(layers[name].weight.detach())
            step, zero = scales[name]
            tensors = {
                f"{name}.weight_int8": integers.T.contiguous().numpy(),
                f"{name}.weight_scale": rows.numpy(),
                f"{name}.weight_zero": np.zeros(len(rows), np.int8),
                f"{name}.input_scale": np.array(step, np.float32),
                f"{name}.input_zero": np.array(zero, np.uint8),
            }
            graph.graph.initializer.extend(
                numpy_helper.from_array(array, key) for key, array in tensors.items()
            )
            weight_int8, weight_scale, weight_zero, scale, zero_point = tensors
            nodes += [
                helper.make_node("QuantizeLinear", [source, scale, zero_point], [f"{name}.input_int8"]),
                helper.make_node(
                    "DequantizeLinear", [f"{name}.input_int8", scale, zero_point], [f"{name}.input"]
                ),
                helper.make_node(
                    "DequantizeLinear", [weight_int8, weight_scale, weight_zero], [f"{name}.weight"], axis=1
                ),
            ]
            node.input[0], node.input[1] = f"{name}.input", f"{name}.weight"
            removed[weight] = name
        nodes.append(node)
    still_used = {key for node in nodes for key in node.input}
    keep = [tensor for tensor in graph.graph.initializer if tensor.name in still_used]
    del graph.graph.node[:], graph.graph.initializer[:]
    graph.graph.node.extend(nodes)
    graph.graph.initializer.extend(keep)
    return len(removed)
