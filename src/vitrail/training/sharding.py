"""Choosing how the processes of a run share its model (`vitrail.fast.parallelism` has the ways)."""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import init_device_mesh

from vitrail.base.errors import ConfigError
from vitrail.base.machine import format_bytes, memory_limit
from vitrail.fast.parallelism import Parallelism
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice
from vitrail.training.parallel import ProcessGroup
from vitrail.training.plan.cost import MARGIN, StepMemory, fitting_mode
from vitrail.training.recipes.settings import TrainConfig

_CPU_MARGIN = 0.5  # of the memory: the data and other programs need some, too


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
        return available is None or not ranks.any(size > available)

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
