"""The seeds of a run's dropout: functions of (seed, step), and for several processes of an image's place."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.images.rng import random_integer
from vitrail.model.config import ViTConfig
from vitrail.model.device import seed_generators
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig


class DropoutSeeds:
    """The seed of a micro-batch's masks, and which rows of them are this process's.

    The images of a step, in order, are those of process 0, then of process 1, ...; each takes its own in
    `accumulate` micro-batches. A single process would take all of them in as many.
    """

    def __init__(
        self, config: ViTConfig, settings: TrainConfig, ranks: ProcessGroup, device: torch.device
    ) -> None:
        self.ranks, self.count, self.device = ranks, ranks.count, device
        self.seed, self.accumulate = settings.seed, settings.accumulate
        activations = bool(config.dropout or config.attention_dropout)
        self.alike = (device.type == "cpu" or not activations) and not settings.native
        """Whether all processes draw the same (`vitrail.fast.variants`); not masks of activations on GPUs."""
        self.part = 0
        """This process's part of what a single process would take at once."""

    def start(self, step: int, micro_batch: int = 0) -> None:
        """Seed the generators for a micro-batch."""
        key = self.ranks.rank
        if self.alike:
            key, self.part = divmod(self.ranks.rank * self.accumulate + micro_batch, self.count)
        seed_generators(random_integer([self.seed, step, key, 2]), self.device)

    def start_next(self, step: int, micro_batch: int) -> None:
        """Seed micro-batches after the first; does nothing within a CUDA graph, which reads one seed."""
        captured = self.count == 1 and self.device.type != "cpu"
        if micro_batch and self.alike and not captured:
            self.start(step, micro_batch)

    def take_rows(self, drawn: Tensor) -> Tensor:
        """Select this process's rows of what was drawn for all."""
        return drawn.unflatten(0, (self.count, -1))[self.part]
