"""How processes share a model: copies, or a shard of every tensor in each process.

one   a single process
ddp   each process has the whole model, and gradients are averaged (DistributedDataParallel)
fsdp  each process has a shard of the weights, gradients and optimizer (FSDP2); a block's weights are gathered
      while it is computed
hsdp  replicas x shards: fsdp within a machine, ddp between machines

FSDP2 wraps the modules of a twin in place; the model itself only holds the shards. Each is a DTensor, cut
along its first axis. In bf16 and fp16 the weights of blocks are gathered in that format, which halves the
traffic; shards, sums of gradients and optimizer are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vitrail.fast.executable import hold_parameters, share_parameters
from vitrail.model import ViT


@dataclass(frozen=True)
class Parallelism:
    """How the model is shared."""

    mode: Literal["one", "ddp", "fsdp", "hsdp"] = "one"
    reason: str = ""
    """What was chosen and why, for the plan."""
    shards: int = 1
    """The processes that the model is cut for."""
    mesh: DeviceMesh | None = None

    @property
    def sharded(self) -> bool:
        return self.mesh is not None

    def place(self, model: ViT, device: torch.device) -> None:
        """Move a model to its device, or let it hold this process's shards."""
        if self.mesh is None:
            model.to(device)
        else:
            twin = share_parameters(model)
            self.cut(model, twin, twin)

    def cut(self, model: ViT, twin: ViT, root: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        """Cut a twin, each block and then what is left; the model holds the shards and stays as it is.

        Args:
            root: the module that will be called: the twin, or one around it.
            dtype: that the weights of blocks are gathered in.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = dtype if dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(half, reduce_dtype=half and torch.float32, cast_forward_inputs=False)
        for block in twin.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(root, mesh=self.mesh)  # the residual stream, between the blocks, stays in fp32
        hold_parameters(model, twin)

    def wrap(self, root: nn.Module) -> nn.Module:
        """The module to call in training."""
        return nn.parallel.DistributedDataParallel(root) if self.mode == "ddp" else root

    @contextmanager
    def accumulate(self, wrapped: Any, last: bool) -> Iterator[None]:
        """Context of a micro-batch: copies exchange gradients with the last one only.

        Shards do so with every one: whole gradients, kept for the last, would take the memory of the model.
        """
        if self.mode == "hsdp":
            wrapped.set_requires_all_reduce(last)
        if self.mode == "ddp" and not last:
            with wrapped.no_sync():
                yield
        else:
            yield

    def compile(self, wrapped: nn.Module, twin: ViT) -> Any:
        """The module to call, compiled; of a sharded twin each block, since gathering is not compiled.

        So a block is compiled first, then cut; a checkpointed one runs the compiled block again.
        """
        if not self.sharded:
            return torch.compile(wrapped)
        for block in twin.blocks:
            block.forward = torch.compile(block.forward)
        return wrapped


def gather(tensor: Tensor) -> Tensor:
    """A whole copy of a tensor. All processes of a sharded one must call it."""
    return tensor.full_tensor().clone() if is_sharded(tensor) else tensor.clone()  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def copy_into(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    local_part(target).copy_(part_of(whole.to(target.device), target))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor that would be sharded as another is."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()  # each cuts its own


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this is this process's part, sharded as another is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, shape=like.shape, stride=like.stride())


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has a part of a tensor only."""
    return hasattr(tensor, "full_tensor")  # a DTensor
