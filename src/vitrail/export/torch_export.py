"""A model as a .pt2 file of torch.export: for C++ and for other programs in torch, without vitrail."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.fx import GraphModule

from vitrail.export.graph import Graph, explained, plan_for, quiet, trace
from vitrail.export.keep import check_place, write_proven
from vitrail.export.onnx import about
from vitrail.export.proof import Proof, Run, prove
from vitrail.weights.bundle import Bundle


def write_torch(
    bundle: Bundle, path: str | Path, *, dynamic: tuple[str, ...] = (), with_preprocess: bool = False
) -> Proof:
    """Write the file and its proof, both or neither; arguments as for `write_onnx`.

    What an ONNX file has as metadata lies in the .pt2 as extra files of the same names. The program gives
    a tuple: logits, where there is a head, then the embedding, and with preprocessing the levels.
    """
    place = check_place(Path(path), ".pt2")
    plan = plan_for(bundle, dynamic=dynamic, with_preprocess=with_preprocess)
    assert bundle.preprocess is not None  # plan_for has looked
    graph = Graph(bundle.model, bundle.preprocess, plan)
    program = trace(graph, bundle.preprocess)
    forget(program.graph_module)
    data = io.BytesIO()
    with quiet(), explained():
        torch.export.save(program, data, extra_files=about(bundle, plan))

    def run(part: Path) -> Run:
        with quiet():
            module = torch.export.load(io.BytesIO(part.read_bytes())).module()  # we have just written it
        return lambda batch: {
            name: tensor.numpy()
            for name, tensor in zip(graph.outputs, module(torch.from_numpy(batch)), strict=True)
        }

    return write_proven(
        place,
        data.getvalue(),
        lambda part: prove(bundle, plan, run(part), runtime="torch.export"),
        {"form": "torch-export", "packages": ()},
    )


def forget(module: torch.nn.Module) -> None:
    """Take out where on this machine each line of the model lies."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for word in ("stack_trace", "source_fn_stack", "nn_module_stack", "from_node"):
                node.meta.pop(word, None)
