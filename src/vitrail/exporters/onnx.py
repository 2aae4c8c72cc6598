"""Export a model to one ONNX file: graph, weights, and as metadata all that `vt.Predictor` needs.

In int8 a gate takes the place of equality: the answers must be those of fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vitrail.base.errors import InputError, option, require_extra
from vitrail.base.telemetry import import_onnxruntime
from vitrail.exporters.graph import Graph, Plan, build_metadata, plan_for, trace
from vitrail.exporters.proof import Check, Proof, Run, measure_speed, prove, write_checked
from vitrail.fast.accelerate import read_calibration
from vitrail.fast.choices import Choices
from vitrail.fast.gate import MIN_AGREEMENT, check_agreement, pass_gate, split_images
from vitrail.fast.inference_routes import Accelerated, Acceleration, Builder
from vitrail.fast.onnx_graph import OPSET, open_session, to_onnx
from vitrail.predict.engine import OnnxEngine
from vitrail.predict.onnx_file import MAX_BYTES
from vitrail.weights.bundle.bundle import Bundle

if TYPE_CHECKING:
    from onnx import ModelProto

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
GRAPH_BYTES = 2**24  # room for the graph beside the weights
_SAME = 1e-4  # the most that a single image and a batch may differ in int8


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


def _name_axes(model: ModelProto, plan: Plan) -> None:
    """Name the dynamic axes; the tracer calls them s77 and the like."""
    names = ("batch", "height", "width", "") if plan.with_preprocess else ("batch", "", "height", "width")
    for name, axis in zip(names, model.graph.input[0].type.tensor_type.shape.dim, strict=True):
        if axis.HasField("dim_param"):
            axis.dim_param = name
    for value in model.graph.output:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"


# ---- int8 ---------------------------------------------------------------------------------------


def write_int8(
    bundle: Bundle,
    path: str | Path,
    calibration: Any,
    *,
    dynamic: tuple[str, ...] = (),
    min_agreement: float = MIN_AGREEMENT,
    keep: Collection[str] | Literal["auto"] = (),
) -> Proof:
    """Write the file and, beside it, the gate's report; neither if too many answers differ from fp32.

    Args:
        calibration: a folder of images, or a list of them: every second one sets the scales, and answers are
            compared on the others.
        min_agreement, keep: as in `vitrail.accelerate`.
    """
    if not bundle.model.config.classes:
        raise InputError("int8 is checked by its classes, and this model has no head; export it in fp32.")
    plan = plan_for(bundle, dynamic=dynamic)
    check_weight_bytes(bundle)
    bundle = replace(bundle, model=copy.deepcopy(bundle.model).to("cpu", torch.float32).eval())
    images, labels = read_calibration(bundle, calibration)
    ranges, held_out, labels = split_images(images, labels)
    device = torch.device("cpu")
    builder = Builder(bundle.model, device, "throughput", Choices(device, remember=False), ranges)
    graphs: dict[tuple[str, ...], ModelProto] = {}

    def quantized(kept: tuple[str, ...]) -> Accelerated:
        graph = graphs[kept] = builder.quantized_graph(
            kept, lambda smoothed: build(replace(bundle, model=smoothed), plan)
        )
        forward = _Session(graph.SerializeToString(deterministic=True))
        return Accelerated(bundle.model, forward, Acceleration(precision="int8", route="ONNX", kept=kept))

    names = builder.quantizable("int8")
    kept = () if keep == "auto" else tuple(keep)
    report = pass_gate(
        builder.calibration,
        quantized,
        "int8",
        kept,
        names,
        held_out,
        labels=labels,
        min_agreement=check_agreement(min_agreement),
        search=keep == "auto",
    ).report
    assert report.gate is not None
    gate = {**report.gate.as_dict(), "keep": list(report.kept)}

    def prove(partial: Path) -> Proof:
        run = _Session(OnnxEngine(partial).session)  # our own reader must accept it
        check = _check_batches(run, images[:4])
        speed = measure_speed(
            bundle.model, images[:1], lambda batch: run.outputs(batch), images[:1].numpy(), "ONNX Runtime"
        )
        return Proof(checks=[check], speed=speed, precision="int8", gate=gate)

    data = graphs[report.kept].SerializeToString(deterministic=True)
    return write_checked(Path(path), data, prove, "onnx", opset=OPSET, packages=PACKAGES)


def _check_batches(run: _Session, images: Tensor) -> Check:
    """The answer for an image does not depend on the others in its batch."""
    together = run(images)[1]
    alone = torch.cat([run(image[None])[1] for image in images])
    return Check(
        what="images alone and in a batch",
        inputs=len(images),
        difference=float((together - alone).abs().max()),
        limit=_SAME * max(1.0, float(together.abs().max())),
        same_class=int((together.argmax(1) == alone.argmax(1)).sum()),
    )


class _Session:
    """Runs an exported graph on normalized images."""

    def __init__(self, session: Any) -> None:
        self.session = open_session(session) if isinstance(session, bytes) else session

    def outputs(self, batch: Any) -> dict[str, Any]:
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, {"images": batch}), strict=True))

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.outputs(images.contiguous().numpy())
        return torch.from_numpy(found["embedding"]), torch.from_numpy(found["logits"])
