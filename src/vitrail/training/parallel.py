"""Several processes as one: what torchrun has started, and the few things they tell each other."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.data.sources import Dataset
from vitrail.errors import ConfigError
from vitrail.training.settings import TrainConfig


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int = 0
    count: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """This process's consecutive part of a global batch."""
        size = len(batch) // self.count
        return batch[self.rank * size : (self.rank + 1) * size]

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether it is so in any process: all act alike, or they would wait for each other for ever."""
        if self.count == 1:
            return here
        flag = torch.tensor(float(here), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def union(self, names: dict[str, str]) -> dict[str, str]:
        """What any process has found, the first one's first."""
        if self.count == 1:
            return names
        found: list[dict[str, str]] = [{} for _ in range(self.count)]
        dist.all_gather_object(found, names)
        return {name: reason for some in found for name, reason in some.items()}

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


def join() -> Ranks:
    """The processes that torchrun started; one alone where it did not."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))


def shared(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model with gradients averaged over processes. Sharding would be applied here too."""
    if ranks.count == 1:
        return model
    return nn.parallel.DistributedDataParallel(model)


def batch_of(data: Dataset, settings: TrainConfig, ranks: Ranks) -> int:
    """How many pictures a step has: no more than there are, and it must be possible to share them out."""
    s, batch = settings, min(settings.batch, len(data.train) // 2 * 2 or 1)
    mixes = bool(s.mixing.mixup or s.mixing.cutmix)
    if batch % (ranks.count * s.accumulate * (2 if mixes else 1)):
        raise ConfigError(
            "A batch must fall into equal parts for every process and every part of a step"
            + (", pairs in each." if mixes else "."),
            f"batch={batch}, {ranks.count} processes, accumulate={s.accumulate}",
            "Change batch or accumulate.",
        )
    if s.sampling == "balanced" and data.several:
        raise ConfigError(
            "Balanced sampling needs one class for each picture.",
            "pictures that can show several",
            "Use --set class_weights=balanced.",
        )
    return batch


def leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
