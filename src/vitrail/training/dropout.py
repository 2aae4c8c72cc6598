"""The seeds of a run's dropout: functions of (seed, step), and for several processes of an image's place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.images.rng import random_integer
from vitrail.model.config import ViTConfig
from vitrail.model.device import seed_generators
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig


@dataclass
class DropoutSeeds:
    """The seed of a micro-batch's masks, and which rows of them are this process's.

    The images of a step, in order, are those of process 0, then of process 1, ...; each takes its own in
    `accumulate` micro-batches. A single process would take all of them in as many.
    """

    ranks: ProcessGroup
    device: torch.device
    seed: int
    accumulate: int
    alike: bool
    """Whether all processes draw the same (`vitrail.fast.variants`)."""
    part: int = 0
    """This process's part of what a single process would take at once."""

    @property
    def shared(self) -> bool:
        """Whether the model's modules must draw for all processes."""
        return self.alike and self.count > 1

    @property
    def count(self) -> int:
        return self.ranks.count

    def start(self, step: int, micro_batch: int = 0) -> None:
        """Seed the generators for a micro-batch."""
        key = self.ranks.rank
        if self.alike:
            key, self.part = divmod(self.ranks.rank * self.accumulate + micro_batch, self.ranks.count)
        seed_generators(random_integer([self.seed, step, key, 2]), self.device)

    def start_next(self, step: int, micro_batch: int) -> None:
        """Seed micro-batches after the first; does nothing within a CUDA graph, which reads one seed."""
        captured = self.ranks.count == 1 and self.device.type != "cpu"
        if micro_batch and self.alike and not captured:
            self.start(step, micro_batch)

    def take_rows(self, drawn: Tensor) -> Tensor:
        """Select this process's rows of what was drawn for all."""
        return drawn.unflatten(0, (self.ranks.count, -1))[self.part]


def dropout_seeds(
    config: ViTConfig, settings: TrainConfig, ranks: ProcessGroup, device: torch.device
) -> DropoutSeeds:
    """Return the seeds of a run. On GPUs, masks of activations are not drawn for other processes."""
    dropout = bool(config.dropout or config.attention_dropout)
    alike = (device.type == "cpu" or not dropout) and not settings.native
    return DropoutSeeds(ranks, device, settings.seed, settings.accumulate, alike)
