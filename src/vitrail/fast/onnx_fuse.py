"""Changes of an ONNX graph: int8 products, and ONNX Runtime's own operators instead of standard ones.

`quantize_graph` puts QuantizeLinear and DequantizeLinear in front of each product, the standard operators,
which ONNX Runtime fuses into integer products. The others are only for graphs that ONNX Runtime runs here:
other runtimes do not know its operators, so exported files keep the standard ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from vitrail.fast.quantize import Int8Scales, block_layers, row_scales
from vitrail.model import ViT
from vitrail.model.attention import Attention

if TYPE_CHECKING:
    from onnx import ModelProto

_DOMAIN = "com.microsoft"
_SPLIT_HEADS = [2, 0, 3, 1, 4]  # (B, T, 3, k, d) to (3, B, k, T, d)
_JOIN_HEADS = [0, 2, 1, 3]  # (B, k, T, d) to (B, T, k, d)
_MOVES = ("Mul", "Slice", "Squeeze", "Reshape", "Transpose")  # between qkv and the scores; Mul is the scale
_ALL = slice(None)  # rows of a weight


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
            *weight, scale, zero = tensors
            x, x_int8, w = (f"{name}.{part}" for part in ("input", "input_int8", "weight"))
            nodes += [
                helper.make_node("QuantizeLinear", [node.input[0], scale, zero], [x_int8]),
                helper.make_node("DequantizeLinear", [x_int8, scale, zero], [x]),
                helper.make_node("DequantizeLinear", weight, [w], axis=1),
            ]
            node.input[0], node.input[1] = x, w
            found.add(layer)
        nodes.append(node)
    _set_nodes(graph, nodes)
    _prune(graph)
    return len(found)


def _parts(name: str, weight: Tensor) -> list[tuple[slice, Tensor]]:
    """The rows of a layer that may be a product of their own: q by itself, k and v, in the last block."""
    inner = len(weight) // 3
    rows = [_ALL, slice(None, inner), slice(inner, None)] if name.endswith("qkv") else [_ALL]
    return [(part, weight[part]) for part in rows]


def _bytes(weight: Tensor) -> bytes:
    """The bytes that the graph stores for a weight."""
    return weight.detach().T.contiguous().numpy().tobytes()


def fuse_attention(graph: ModelProto, model: ViT) -> int:
    """Replace attention in place wherever q, k and v go unchanged into it; how often.

    With norms of q and k, rotary embedding or a position bias the standard operators stay.
    """
    from onnx import helper

    first = cast(Attention, model.blocks[0].attention)
    found = 0
    for softmax in [node for node in graph.graph.node if node.op_type == "Softmax"]:
        ends = _find_ends(graph.graph.node, softmax)
        if ends is None:
            continue
        projected, heads = ends
        q, k, v = (f"{heads}.{part}" for part in "qkv")
        fused = [
            helper.make_node("Split", [projected], [q, k, v], axis=2, num_outputs=3),
            helper.make_node(
                "MultiHeadAttention",
                [q, k, v],
                [heads],
                domain=_DOMAIN,
                num_heads=first.head_count,
                scale=first.scale,
            ),
        ]
        kept = [node for node in graph.graph.node if heads not in node.output]
        after = next(n for n, node in enumerate(kept) if projected in node.output) + 1
        _set_nodes(graph, [*kept[:after], *fused, *kept[after:]])
        found += 1
    _finish(graph)
    return found


def fuse_products(graph: ModelProto) -> int:
    """Replace each product of dequantized int8 tensors, and the sum with its bias; how many there were.

    ONNX Runtime would do so itself, but leave the sum.
    """
    from onnx import helper

    nodes, stored = list(graph.graph.node), {tensor.name for tensor in graph.graph.initializer}
    maker = {name: node for node in nodes for name in node.output}
    fused: dict[str, Any] = {}  # by the name of the result
    for node in nodes:
        factors = [maker.get(name) for name in node.input] if node.op_type == "MatMul" else []
        if [getattr(one, "op_type", None) for one in factors] != ["DequantizeLinear"] * 2:
            continue
        (x, x_scale, x_zero), (w, w_scale, w_zero) = (one.input for one in factors if one is not None)
        inputs, result = [x, w, x_scale, w_scale, x_zero, w_zero], node.output[0]
        sum_ = _user(nodes, result, "Add")
        bias = [] if sum_ is None else [name for name in sum_.input if name in stored]
        if sum_ is not None and bias:
            inputs, result = [*inputs, *bias], sum_.output[0]
        fused[result] = helper.make_node("MatMulIntegerToFloat", inputs, [result], domain=_DOMAIN)
    _set_nodes(graph, [fused.get(node.output[0], node) for node in nodes])
    _split_products(graph)
    _finish(graph)
    return len(fused)


def _split_products(graph: ModelProto) -> None:
    """Compute q, k and v by a product each where they are split after one: without a copy of them."""
    from onnx import helper, numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    maker = {name: node for node in graph.graph.node for name in node.output}
    nodes: list[Any] = []
    for node in graph.graph.node:
        product = maker.get(node.input[0]) if node.op_type == "Split" else None
        if product is None or product.op_type != "MatMulIntegerToFloat":
            nodes.append(node)
            continue
        x, weight, x_scale, scale, x_zero, zero, *bias = product.input
        for number, result in enumerate(node.output):
            names = {key: f"{key}.{number}" for key in (weight, scale, zero, *bias)}
            for key, name in names.items():
                part = np.split(stored[key], len(node.output), axis=-1)[number]
                graph.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(part), name))
            inputs = [x, names[weight], x_scale, names[scale], x_zero, names[zero]]
            inputs += [names[key] for key in bias]
            nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, [result], domain=_DOMAIN))
    _set_nodes(graph, nodes)


def _finish(graph: ModelProto) -> None:
    """Remove what no output depends on, and declare the operators."""
    from onnx import helper

    _prune(graph)
    if all(one.domain != _DOMAIN for one in graph.opset_import):
        graph.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


def _prune(graph: ModelProto) -> None:
    """Remove the nodes and tensors that no output depends on."""
    wanted = {output.name for output in graph.graph.output}
    nodes = []
    for node in reversed(graph.graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            nodes.append(node)
    _set_nodes(graph, nodes[::-1])
    keep = [tensor for tensor in graph.graph.initializer if tensor.name in wanted]
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(keep)


def _find_ends(nodes: Iterable[Any], softmax: Any) -> tuple[str, str] | None:
    """The names of q, k and v in one tensor (B, T, 3 k d), and of the heads (B, T, k d); None if another
    kind of attention is around this softmax."""
    nodes = list(nodes)
    maker = {name: node for node in nodes for name in node.output}
    scores = maker.get(softmax.input[0])
    values = _user(nodes, softmax.output[0], "MatMul")
    if scores is None or scores.op_type != "MatMul" or values is None:
        return None
    joined = _user(nodes, values.output[0], "Transpose")
    flat = (
        None if joined is None or _order(joined) != _JOIN_HEADS else _user(nodes, joined.output[0], "Reshape")
    )
    sources = {_projection(maker, name) for name in (*scores.input, values.input[1])}
    if flat is None or len(sources) > 1:
        return None
    (projected,) = sources
    return None if projected is None else (projected, flat.output[0])


def _projection(maker: dict[str, Any], name: str) -> str | None:
    """Where q, k or v comes from, if nothing but moves and the scale are in between."""
    while (node := maker.get(name)) is not None and node.op_type in _MOVES:
        name = node.input[0]
        if node.op_type == "Transpose" and _order(node) == _SPLIT_HEADS:
            reshape = maker.get(name)
            return reshape.input[0] if reshape is not None and reshape.op_type == "Reshape" else None
    return None


def _user(nodes: list[Any], name: str, kind: str) -> Any:
    """The only node that takes this tensor, if it is of this kind."""
    users = [node for node in nodes if name in node.input]
    return users[0] if len(users) == 1 and users[0].op_type == kind else None


def _order(transpose: Any) -> list[int]:
    return list(next(one.ints for one in transpose.attribute if one.name == "perm"))


def _set_nodes(graph: ModelProto, nodes: Iterable[Any]) -> None:
    nodes = list(nodes)
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
