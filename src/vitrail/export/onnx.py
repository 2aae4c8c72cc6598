"""A model as one ONNX file: graph, weights, and in its metadata all that `vt.Predictor` wants to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.errors import InputError, needs
from vitrail.export.graph import Graph, Plan, explained, plan_for, quiet, trace
from vitrail.export.keep import check_place, write_proven
from vitrail.export.proof import Proof, Run, prove
from vitrail.predict.engine import OnnxEngine, session_of
from vitrail.predict.onnx_file import ABOUT, MOST_BYTES, TAKES
from vitrail.telemetry import import_onnxruntime
from vitrail.weights.bundle import Bundle

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20  # has GELU and LayerNorm as operators of their own
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
SPARE = 2**24  # bytes beside the weights


def write_onnx(
    bundle: Bundle, path: str | Path, *, dynamic: tuple[str, ...] = (), with_preprocess: bool = False
) -> Proof:
    """Write the file and, beside it, the proof that it gives the model's answers; both or neither.

    Args:
        path: a new file that ends in .onnx.
        dynamic: "size" for pictures of any size; the batch is free in any case.
        with_preprocess: whether the graph takes 8-bit pictures (B, h, w, C) and resizes them itself.
    """
    onnxruntime = import_onnxruntime()  # before onnxscript and torch.onnx, which can load it too
    with needs("export"):
        import onnx
        import onnxscript  # noqa: F401  # torch asks for it late, in words of its own
    place = check_place(Path(path), ".onnx")
    plan = plan_for(bundle, dynamic=dynamic, with_preprocess=with_preprocess)
    check_weight(bundle)
    model = build(bundle, plan)
    session = None

    def run(part: Path) -> Run:
        nonlocal session
        session = OnnxEngine(part).session  # our own reader must take it
        if plan.whole:  # the levels are in the file's graph, and come out when asked
            seen = onnx.ModelProto.FromString(part.read_bytes())
            seen.graph.output.append(
                onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, None)
            )
            session = session_of(onnxruntime, seen.SerializeToString())
        names = [one.name for one in session.get_outputs()]
        return lambda batch: dict(zip(names, session.run(names, {plan.input: batch}), strict=True))

    return write_proven(
        place,
        model.SerializeToString(deterministic=True),
        lambda part: prove(bundle, plan, run(part), runtime="ONNX Runtime"),
        {"form": "onnx", "opset": OPSET, "packages": PACKAGES},
    )


def check_weight(bundle: Bundle) -> None:
    size = 4 * sum(parameter.numel() for parameter in bundle.model.parameters())
    if size > MOST_BYTES - SPARE:
        raise InputError(
            f"One ONNX file holds at most {MOST_BYTES:,} bytes.",
            f"a model whose weights take {size:,}",
            "Export it with --to torch-export, or use the vitrail file itself.",
        )


def build(bundle: Bundle, plan: Plan) -> ModelProto:
    """The graph as ONNX, without what the exporter wrote down about this machine."""
    assert bundle.preprocess is not None  # plan_for has looked
    graph = Graph(bundle.model, bundle.preprocess, plan)
    program = trace(graph, bundle.preprocess)
    with quiet(), explained(), torch.no_grad():
        made = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[plan.input],
            output_names=graph.outputs,
        )
    assert made is not None
    model = made.model_proto
    tidy(model.graph)
    if plan.whole:
        del model.graph.output[-1]  # the levels are still computed under their name
    name_axes(model, plan)
    for key, value in about(bundle, plan).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    return model


def about(bundle: Bundle, plan: Plan) -> dict[str, str]:
    """The metadata: what a vitrail file says of itself, and what this graph takes."""
    described = {**bundle.describe(), "source": None}  # the original's tensors are not in this file
    takes = {"takes": plan.input, "any_size": plan.any_size}
    return {ABOUT: json.dumps(described), TAKES: json.dumps(takes)}


def tidy(graph: Any) -> None:
    """Take out where on this machine each line of the model lies, and shapes that follow from others."""
    del graph.metadata_props[:], graph.value_info[:]
    graph.doc_string = ""
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                tidy(inner)
    for value in (*graph.input, *graph.output, *graph.initializer):
        del value.metadata_props[:]


def name_axes(model: ModelProto, plan: Plan) -> None:
    """Words for the axes that are free, instead of the tracer's letters."""
    words = ("batch", "height", "width", "") if plan.whole else ("batch", "", "height", "width")
    for word, axis in zip(words, model.graph.input[0].type.tensor_type.shape.dim, strict=True):
        if axis.HasField("dim_param"):
            axis.dim_param = word
    for value in model.graph.output:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
