"""Export a model to ONNX in int8, with a gate instead of equality: the answers must be those of fp32."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.exporters.graph import plan_for
from vitrail.exporters.onnx import PACKAGES, build, check_weight_bytes
from vitrail.exporters.proof import Check, Proof, measure_speed, write_checked
from vitrail.fast.accelerate import read_calibration
from vitrail.fast.choices import Choices
from vitrail.fast.gate import MIN_AGREEMENT, check_agreement, pass_gate, split_images
from vitrail.fast.inference_routes import Accelerated, Acceleration, Builder
from vitrail.fast.onnx_graph import OPSET, open_session
from vitrail.predict.engine import OnnxEngine
from vitrail.weights.bundle.bundle import Bundle

if TYPE_CHECKING:
    from onnx import ModelProto

_SAME = 1e-4  # the most that a single image and a batch may differ


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
