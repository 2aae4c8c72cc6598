"""Export a model to one ONNX file: graph, weights, and as metadata all that `vt.Predictor` needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.base.errors import InputError, option, require_extra
from vitrail.base.telemetry import import_onnxruntime
from vitrail.exporters.graph import Graph, Plan, plan_for, trace
from vitrail.exporters.proof import Proof, Run, prove, write_checked
from vitrail.fast.onnx_graph import OPSET, open_session, to_onnx
from vitrail.predict.engine import OnnxEngine
from vitrail.predict.onnx_file import EXPORT_KEY, FEATURES_KEY, MAX_BYTES, MODEL_KEY
from vitrail.weights.bundle.bundle import Bundle

if TYPE_CHECKING:
    from onnx import ModelProto

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
GRAPH_BYTES = 2**24  # room for the graph beside the weights


def write_onnx(
    bundle: Bundle, path: str | Path, *, dynamic: tuple[str, ...] = (), with_preprocess: bool = False
) -> Proof:
    """Write the file and, beside it, the proof that its outputs equal the model's; both or neither.

    Args:
        path: a new file that ends in .onnx.
        dynamic: "size" for images of any size; the batch is always dynamic.
        with_preprocess: whether the graph takes uint8 images (B, h, w, C) and resizes them itself.
    """
    import_onnxruntime()  # before onnxscript and torch.onnx, which can load it too
    with require_extra("export"):
        import onnx
        import onnxscript  # noqa: F401  # torch imports it later, with a less helpful error
    plan = plan_for(bundle, dynamic=dynamic, with_preprocess=with_preprocess)
    check_weight_bytes(bundle)
    model = build(bundle, plan)

    def run(partial: Path) -> Run:
        session = OnnxEngine(partial).session  # our own reader must accept it
        if plan.with_preprocess:  # the graph computes the pixels; make them an output
            model = onnx.ModelProto.FromString(partial.read_bytes())
            model.graph.output.append(
                onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, None)
            )
            session = open_session(model.SerializeToString())
        names = [one.name for one in session.get_outputs()]
        return lambda batch: dict(zip(names, session.run(names, {plan.input: batch}), strict=True))

    return write_checked(
        Path(path),
        model.SerializeToString(deterministic=True),
        lambda partial: prove(bundle, plan, run(partial), runtime="ONNX Runtime"),
        "onnx",
        opset=OPSET,
        packages=PACKAGES,
    )


def check_weight_bytes(bundle: Bundle) -> None:
    size = 4 * sum(parameter.numel() for parameter in bundle.model.parameters())
    if size > MAX_BYTES - GRAPH_BYTES:
        raise InputError(
            f"An ONNX file holds at most {MAX_BYTES:,} bytes, and the weights of this model take {size:,}; "
            f"export it with {option('to', 'torch-export')}, or use the vitrail file itself."
        )


def build(bundle: Bundle, plan: Plan) -> ModelProto:
    """The graph as ONNX, with the metadata."""
    assert bundle.preprocess is not None  # plan_for has checked
    graph = Graph(bundle.model, bundle.preprocess, plan)
    program = trace(graph, bundle.preprocess)
    model = to_onnx(program, inputs=[plan.input], outputs=graph.outputs)
    if plan.with_preprocess:
        del model.graph.output[-1]  # the pixels stay in the graph under their name
    _name_axes(model, plan)
    for key, value in build_metadata(bundle, plan).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    return model


def build_metadata(bundle: Bundle, plan: Plan) -> dict[str, str]:
    """The metadata: the description in a vitrail file, and what this graph takes."""
    description = {**bundle.describe(), "source": None}  # the original tensors are not in this file
    graph = {"takes": plan.input, "any_size": plan.any_size}
    metadata = {MODEL_KEY: json.dumps(description), EXPORT_KEY: json.dumps(graph)}
    if bundle.statistics is not None:
        metadata[FEATURES_KEY] = json.dumps(bundle.statistics.describe())
    return metadata


def _name_axes(model: ModelProto, plan: Plan) -> None:
    """Name the dynamic axes; the tracer calls them s77 and the like."""
    names = ("batch", "height", "width", "") if plan.with_preprocess else ("batch", "", "height", "width")
    for name, axis in zip(names, model.graph.input[0].type.tensor_type.shape.dim, strict=True):
        if axis.HasField("dim_param"):
            axis.dim_param = name
    for value in model.graph.output:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
