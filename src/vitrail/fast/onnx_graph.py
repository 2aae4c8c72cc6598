"""A traced model as an ONNX graph, and ONNX Runtime to run it: the fastest way on a CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.base.errors import InputError, printable, require_extra
from vitrail.base.telemetry import import_onnxruntime
from vitrail.fast.onnx_fuse import fuse_attention
from vitrail.fast.variants import shorten_last_block
from vitrail.model import ViT
from vitrail.model.attention import QKV

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

OPSET = 20  # the first with GELU and LayerNorm as operators


class _Outputs(nn.Module):
    """A model in fp32 that returns what predictions need."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False)
        if shorten_last_block(self.model):
            attention: Any = self.model.blocks[-1].attention
            attention.qkv = _SplitQKV(attention.qkv)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.model.encode(images).pooled
        return pooled, self.model.head(pooled) * 1.0  # without a head, an output of its own


class _SplitQKV(nn.Module):
    """q by one layer, k and v by another: a graph should store both weights, and not cut them from one."""

    def __init__(self, qkv: QKV) -> None:
        super().__init__()
        inner = len(qkv.weight) // 3
        bias = qkv.masked_bias()
        self.weights = nn.ParameterList([qkv.weight[:inner].clone(), qkv.weight[inner:].clone()])
        self.biases = nn.ParameterList([] if bias is None else [bias[:inner].clone(), bias[inner:].clone()])

    def project_cross(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        q_bias, kv_bias = self.biases or (None, None)
        return F.linear(z, self.weights[0], q_bias), F.linear(context, self.weights[1], kv_bias)


def build_onnx(model: ViT) -> ModelProto:
    """images (B, C, H, W) to `pooled` and `logits` in fp32, with a dynamic batch; for ONNX Runtime."""
    import_onnxruntime()  # before onnxscript and torch.onnx, which can load it too
    with require_extra("export"):
        import onnxscript  # noqa: F401  # torch imports it later, with a less helpful error
    example = torch.zeros(2, *model.config.input_shape)
    with quiet(), explain_errors(), torch.no_grad():
        program = torch.export.export(_Outputs(model), (example,), dynamic_shapes=({0: Dim("batch", min=1)},))
    graph = to_onnx(program, inputs=["images"], outputs=["pooled", "logits"])
    fuse_attention(graph, model)
    return graph


def to_onnx(program: ExportedProgram, *, inputs: Sequence[str], outputs: Sequence[str]) -> ModelProto:
    """A traced program as ONNX, without the source locations that the exporter adds."""
    with quiet(), explain_errors(), torch.no_grad():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
        )
    assert exported is not None
    model = exported.model_proto
    _strip_source_locations(model.graph)
    return model


def open_session(data: bytes, threads: int | None = None) -> Any:
    """A session of ONNX Runtime with as many threads as torch uses, or as given, and without logging."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # fatal only; problems arrive as exceptions
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class OnnxForward:
    """Pooled vectors and logits of images, computed by ONNX Runtime on the CPU.

    Args:
        one_by_one: each thread has an image of its own, whose activations stay in its cache, instead of all
            threads sharing each product of a batch.
    """

    def __init__(self, graph: ModelProto, *, one_by_one: bool = False) -> None:
        self.pool = ThreadPoolExecutor(torch.get_num_threads()) if one_by_one else None
        self.session = open_session(graph.SerializeToString(), 1 if one_by_one else None)

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        batch = images.detach().to("cpu", torch.float32).contiguous().numpy()
        if self.pool is None or len(batch) < 2:
            pooled, logits = self._run(batch)
        else:
            found = self.pool.map(self._run, np.split(batch, len(batch)))
            pooled, logits = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return torch.from_numpy(pooled), torch.from_numpy(logits)

    def _run(self, batch: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return list(self.session.run(["pooled", "logits"], {"images": batch}))


def _strip_source_locations(graph: Any) -> None:
    """Remove source locations, which contain paths of this machine, and inferred shapes."""
    del graph.metadata_props[:], graph.value_info[:]
    graph.doc_string = ""
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                _strip_source_locations(inner)
    for value in (*graph.input, *graph.output, *graph.initializer):
        del value.metadata_props[:]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's warnings and logs; what concerns a user arrives as an error."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn an error of the exporter into an InputError."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = next(iter(str(cause).strip().splitlines()), "")
        raise InputError(
            f"torch cannot trace this model: {type(cause).__name__}: {printable(reason, 300).rstrip('.')}. "
            "Try it without a dynamic size, or use the vitrail file itself."
        ) from error
