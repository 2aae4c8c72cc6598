"""The processes that torchrun has started, and what they exchange (`sharding.py` has the model's part)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from vitrail.base.errors import ConfigError, VitrailError, option, setting
from vitrail.base.machine import format_bytes, memory_limit
from vitrail.fast.parallelism import Parallelism
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice
from vitrail.training.plan.cost import MARGIN, StepMemory, fitting_mode
from vitrail.training.recipes.settings import TrainConfig

T = TypeVar("T")
_LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")  # of gloo


@dataclass(frozen=True)
class ProcessGroup:
    """This process and its group; the default is a single process."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def shard(self, batch: Tensor) -> Tensor:
        """This process's consecutive part of a global batch."""
        size = len(batch) // self.count
        return batch[self.rank * size : (self.rank + 1) * size]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place: exchanged on the device where the tensor is."""
        if self.count > 1:
            dist.all_reduce(tensor, group=_host_group() if tensor.device.type == "cpu" else None)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process. All must act alike, or they would wait for ever."""
        if self.count == 1:
            return flag
        result = torch.tensor(int(flag))
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=_host_group())
        return bool(result.item())

    def union(self, entries: dict[str, str]) -> dict[str, str]:
        """The entries of all processes, in the order of their ranks."""
        if self.count == 1:
            return entries
        gathered: list[dict[str, str]] = [{} for _ in range(self.count)]
        dist.all_gather_object(gathered, entries)
        return {name: value for part in gathered for name, value in part.items()}

    def from_main(self, value: T) -> T:
        """The main process's value, in all processes."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()


class SharedSignal:
    """A signal that stops all processes after the same step: the one after that in which it came to any.

    Each step sends it in the background, from CPU to CPU, and reads what the step before sent: none waits.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self.ranks = ranks
        self._sent: tuple[Tensor, dist.Work] | None = None

    def exchange(self, number: int) -> int:
        """Send this process's signal, or 0; return that of any process, as the last step has sent it."""
        if self.ranks.count == 1:
            return number
        if before := self.collect():
            return before
        sent = torch.tensor(number)
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=_host_group(), async_op=True)
        self._sent = sent, work
        return 0

    def collect(self) -> int:
        """The signal that was sent last, by any process; 0 if there is none."""
        if self._sent is None:
            return 0
        (number, work), self._sent = self._sent, None
        work.wait()
        return int(number)


def _host_group() -> dist.ProcessGroup | None:
    """The group that exchanges tensors in the CPU's memory: the default one, if it can.

    A group that the caller has made for GPUs alone gets a second one beside it, once.
    """
    default = dist.group.WORLD
    assert default is not None
    return None if "cpu" in dist.get_backend_config(default) else _gloo_beside(default)


@cache
def _gloo_beside(default: dist.ProcessGroup) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
    return group


def init_process_group() -> ProcessGroup:
    """Join the processes that torchrun started; without torchrun, a group of one."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ProcessGroup()
    local_rank, local_count = (int(os.environ.get(f"LOCAL_{what}", "0")) for what in ("RANK", "WORLD_SIZE"))
    if not dist.is_initialized():
        if local_rank < torch.cuda.device_count():
            torch.cuda.set_device(local_rank)  # or every process would have memory on the first GPU
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, rank, count = next(rendezvous("env://"))
        if local_count == count:
            # torchrun starts processes again on the store of those that have ended: with their addresses.
            # Several machines count their restarts differently; docs/scale.md has what to set there.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), local_rank, local_count or 1)


class LostProcess(VitrailError):
    """Another process of the run has ended, and this one cannot go on without it."""

    def __init__(self) -> None:
        super().__init__(
            "another process of this run has ended, or cannot be reached any more; its own message says why. "
            f"Resume from the last checkpoint with {option('resume', True)}. If a run has that from the "
            "first start, torchrun --max-restarts 3 resumes it by itself."
        )


def is_lost_process(error: BaseException) -> bool:
    """Whether an error means that another process did not answer."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _LOST)


def destroy_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def global_batch_size(data: Dataset, settings: TrainConfig, ranks: ProcessGroup) -> int:
    """The number of images in a step: at most those there are, divisible by processes and accumulation."""
    s, batch = settings, min(settings.batch, len(data.train) // 2 * 2 or 1)
    mixes = bool(s.mixing.mixup or s.mixing.cutmix)
    if batch % (ranks.count * s.accumulate * (2 if mixes else 1)):
        pairs = " times 2, because mixup and cutmix need pairs" if mixes else ""
        raise ConfigError(
            f"the batch must be divisible by processes times accumulate{pairs}; got batch={batch}, "
            f"{ranks.count} process{'es' * (ranks.count > 1)} and accumulate={s.accumulate}. Change batch or "
            "accumulate."
        )
    if s.sampling == "balanced" and data.multilabel:
        raise ConfigError(
            "sampling='balanced' needs exactly one class per image, and this data is multi-label; use "
            f"{setting('class_weights', 'balanced')}."
        )
    if s.sampling == "balanced" and s.shuffle_block is not None:
        raise ConfigError("sampling='balanced' has an order of its own; set no shuffle_block with it.")
    return batch


# ---- how they share the model ---------------------------------------------------------------

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
    shards = ranks.count if mode == "fsdp" else shards_of_replica(ranks)
    shape = (ranks.count // shards, shards) if mode == "hsdp" else (shards,)
    mesh = init_device_mesh(compute.device.type, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    size = f"{ranks.count // shards} x {shards} shards" if mode == "hsdp" else f"{shards} shards"
    return Parallelism(mode, f"{reason}; {size}", shards, mesh)


def shards_of_replica(ranks: ProcessGroup) -> int:
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
    needed, available = step_memory(model, settings, compute, ranks, batch), usable_memory(compute, ranks)
    # All processes must choose alike: the smallest device decides.
    mode = fitting_mode(
        needed.total, ranks.count, ranks.local_count, lambda size: not ranks.any(size > available)
    )
    assert mode != "one"
    reason = f"{mode}: weights, gradients and optimizer take {format_bytes(needed.states(1))}"
    if mode == "ddp":
        return mode, reason + (f" of {format_bytes(available)}" if math.isfinite(available) else "")
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


def usable_memory(compute: ComputeDevice, ranks: ProcessGroup) -> float:
    """The bytes that a step may take; infinite if the memory of the machine is unknown."""
    if compute.device.type == "cuda":
        return MARGIN * torch.cuda.get_device_properties(compute.device).total_memory
    limit = memory_limit()
    return math.inf if limit is None else _CPU_MARGIN * limit / ranks.local_count
