"""How the processes of a run share its model. The model does not know: all of it is applied from outside.

one   a single process
ddp   each process has the whole model, and gradients are averaged (DistributedDataParallel)
fsdp  each process has a shard of the weights, gradients and optimizer (FSDP2); a block's weights are gathered
      while it is computed
hsdp  replicas x shards: fsdp within a machine, ddp between machines

Each sharded tensor is a DTensor, cut along its first axis. In bf16 and fp16 the weights of blocks are
gathered in that format, which halves the traffic; shards, sums of gradients and optimizer are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vitrail.errors import ConfigError
from vitrail.fast.device import ComputeDevice
from vitrail.memory import format_bytes, memory_limit
from vitrail.model import ViT
from vitrail.recipes.settings import TrainConfig
from vitrail.training.fitting import MARGIN, Mode, StepMemory, fitting_mode
from vitrail.training.parallel import ProcessGroup

_CPU_MARGIN = 0.5  # of the memory: the data and other programs need some, too


@dataclass(frozen=True)
class Parallelism:
    """How the model is shared."""

    mode: Mode = "one"
    reason: str = ""
    """What was chosen and why, for the plan."""
    shards: int = 1
    """The processes that the model is cut for."""
    mesh: DeviceMesh | None = None

    @property
    def sharded(self) -> bool:
        return self.mesh is not None

    def apply(self, root: nn.Module, model: ViT, compute: ComputeDevice) -> None:
        """Move a model to its device, and cut it: each block, then what is left.

        Args:
            root: the module that will be called: the model, or one around it.
        """
        if self.mesh is None:
            root.to(compute.device)
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = compute.dtype if compute.dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(half, reduce_dtype=half and torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(root, mesh=self.mesh)  # the residual stream, between the blocks, stays in fp32

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

    def compile(self, wrapped: nn.Module, model: ViT) -> Any:
        """The module to call, compiled; of a sharded model each block, since gathering is not compiled.

        So a block is compiled first, then cut; a checkpointed one runs the compiled block again.
        """
        if not self.sharded:
            return torch.compile(wrapped)
        for block in model.blocks:
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


# ---- the choice -----------------------------------------------------------------------------


def choose_parallelism(
    model: ViT, settings: TrainConfig, compute: ComputeDevice, ranks: ProcessGroup, batch: int
) -> Parallelism:
    """Follow the settings; `auto` is ddp while weights, gradients, optimizer and activations fit in memory.

    Args:
        model: with its frozen parameters marked, on the CPU.
        batch: the images of a step, over all processes.
    """
    if ranks.count == 1:
        return Parallelism()
    mode, reason = settings.parallel, f"{settings.parallel}, as requested"
    if mode == "auto":
        mode, reason = _choose_mode(model, settings, compute, ranks, batch)
    if mode == "ddp":
        return Parallelism("ddp", f"{reason}; {ranks.count} copies of the model")
    shards = ranks.count if mode == "fsdp" else _shards_of_replica(ranks)
    shape = (ranks.count // shards, shards) if mode == "hsdp" else (shards,)
    mesh = init_device_mesh(compute.device.type, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    size = f"{ranks.count // shards} x {shards} shards" if mode == "hsdp" else f"{shards} shards"
    return Parallelism(mode, f"{reason}; {size}", shards, mesh)


def check_processes(settings: TrainConfig, ranks: ProcessGroup) -> None:
    """Check that the processes can share a model as the settings say."""
    if settings.parallel == "hsdp" and ranks.count > 1:
        _shards_of_replica(ranks)


def _shards_of_replica(ranks: ProcessGroup) -> int:
    """The processes of a machine; on one machine alone, half of them."""
    shards = ranks.local_count if ranks.local_count < ranks.count else ranks.count // 2
    if ranks.count < 4 or shards < 2 or ranks.count % shards:
        raise ConfigError(
            "parallel='hsdp' needs at least two replicas of at least two processes each: the same number on "
            "every machine, or an even number on one. This run has "
            f"{ranks.count} process{'es' * (ranks.count > 1)}, {ranks.local_count} of them on this machine; "
            "use parallel=fsdp."
        )
    return shards


def _choose_mode(
    model: ViT, settings: TrainConfig, compute: ComputeDevice, ranks: ProcessGroup, batch: int
) -> tuple[Literal["ddp", "fsdp", "hsdp"], str]:
    needed, available = step_memory(model, settings, compute, ranks, batch), _device_memory(compute, ranks)

    def fits(size: float) -> bool:  # all processes must choose alike: the smallest device decides
        return available is None or not ranks.any(size > available, compute.device)

    mode = fitting_mode(needed.total, ranks.count, ranks.local_count, fits)
    assert mode != "one"
    reason = f"{mode}: weights, gradients and optimizer take {format_bytes(needed.states(1))}"
    if mode == "ddp":
        return mode, reason + ("" if available is None else f" of {format_bytes(available)}")
    assert available is not None
    working, within = needed.activations(1), "; sharded within a machine they fit" if mode == "hsdp" else ""
    return mode, f"{reason}, activations {format_bytes(working)}, more than {format_bytes(available)}{within}"


def step_memory(
    model: ViT, settings: TrainConfig, compute: ComputeDevice, ranks: ProcessGroup, batch: int
) -> StepMemory:
    """What a step takes on each device, by the number of shards."""
    return StepMemory(
        config=model.config,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        images=batch // ranks.count // settings.accumulate,
        processes=ranks.count,
        itemsize=compute.dtype.itemsize,
        residual=compute.residual_bytes(settings.residual),
        checkpointed=settings.checkpoint_blocks,
        ema=bool(settings.ema),
    )


def _device_memory(compute: ComputeDevice, ranks: ProcessGroup) -> float | None:
    """The bytes that a process may plan with; None if unknown."""
    if compute.device.type == "cuda":
        return MARGIN * torch.cuda.get_device_properties(compute.device).total_memory
    limit = memory_limit()
    return None if limit is None else _CPU_MARGIN * limit / ranks.local_count
