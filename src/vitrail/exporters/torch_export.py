"""Export a model to a .pt2 file of torch.export, for C++ and for PyTorch programs without vitrail."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.fx import GraphModule

from vitrail.base.errors import InputError, option
from vitrail.exporters.graph import Graph, build_metadata, plan_for, trace
from vitrail.exporters.proof import Proof, Run, prove, write_checked
from vitrail.fast.onnx_graph import explain_errors, quiet
from vitrail.weights.bundle.bundle import Bundle


def write_torch(
    bundle: Bundle, path: str | Path, *, dynamic: tuple[str, ...] = (), with_preprocess: bool = False
) -> Proof:
    """Write the file and its proof, both or neither; the arguments are those of `write_onnx`.

    The metadata of an ONNX file is stored as extra files of the same names. The program returns a tuple:
    logits (if there is a head), the embedding, and with preprocessing the resized pixels. It runs on the
    device of the model.
    """
    plan = plan_for(bundle, dynamic=dynamic, with_preprocess=with_preprocess)
    assert bundle.preprocess is not None  # plan_for has checked
    device = next(bundle.model.parameters()).device
    if with_preprocess and device.type != "cpu":
        raise InputError(
            f"{option('with-preprocess', True)} resizes on the CPU, and the program is for {device}; drop "
            "one of the two."
        )
    graph = Graph(bundle.model, bundle.preprocess, plan, device)
    program = trace(graph, bundle.preprocess)
    _strip_source_locations(program.graph_module)
    data = io.BytesIO()
    with quiet(), explain_errors():
        torch.export.save(program, data, extra_files=build_metadata(bundle, plan))

    def run(partial: Path) -> Run:
        with quiet():
            module = torch.export.load(io.BytesIO(partial.read_bytes())).module()
        return lambda batch: {
            name: tensor.cpu().numpy()
            for name, tensor in zip(graph.outputs, module(torch.from_numpy(batch).to(device)), strict=True)
        }

    return write_checked(
        Path(path),
        data.getvalue(),
        lambda partial: prove(bundle, plan, run(partial), runtime="torch.export"),
        "torch-export",
    )


def _strip_source_locations(module: torch.nn.Module) -> None:
    """Remove stack traces: they contain paths of this machine."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for key in ("stack_trace", "source_fn_stack", "nn_module_stack", "from_node"):
                node.meta.pop(key, None)
