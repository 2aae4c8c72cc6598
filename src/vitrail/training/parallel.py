"""Data-parallel training: the processes that torchrun has started, and what they exchange."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.data.sources import Dataset
from vitrail.errors import ConfigError
from vitrail.recipes.settings import TrainConfig


@dataclass(frozen=True)
class ProcessGroup:
    """This process and its group; the default is a single process."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def shard(self, batch: Tensor) -> Tensor:
        """This process's consecutive part of a global batch."""
        size = len(batch) // self.count
        return batch[self.rank * size : (self.rank + 1) * size]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is true in any process. All must act alike, or they would wait for ever."""
        if self.count == 1:
            return flag
        result = torch.tensor(float(flag), device=device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return bool(result.item())

    def union(self, entries: dict[str, str]) -> dict[str, str]:
        """The entries of all processes, in the order of their ranks."""
        if self.count == 1:
            return entries
        gathered: list[dict[str, str]] = [{} for _ in range(self.count)]
        dist.all_gather_object(gathered, entries)
        return {name: value for part in gathered for name, value in part.items()}

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()


def init_process_group() -> ProcessGroup:
    """Join the processes that torchrun started; without torchrun, a group of one."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ProcessGroup()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))


def destroy_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def wrap_model(model: nn.Module, ranks: ProcessGroup) -> nn.Module:
    """The model with gradients averaged over processes. Sharding would be applied here too."""
    if ranks.count == 1:
        return model
    return nn.parallel.DistributedDataParallel(model)


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
            "--set class_weights=balanced."
        )
    if s.sampling == "balanced" and s.shuffle_block is not None:
        raise ConfigError("sampling='balanced' has an order of its own; set no shuffle_block with it.")
    return batch
