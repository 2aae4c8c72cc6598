"""Dropout of a batch that several processes share: the same for an image, whatever their number.

Torch draws the masks of a whole batch in one call, so an image's numbers depend on the batch they are drawn
with. Each process therefore draws for all processes, from the same seed, and takes the rows of its own
images: what a single process draws for them, bit by bit. The model does not know: its modules get another
class.

DropPath and patch dropout draw a few numbers for an image, so that costs nothing. Dropout draws one for every
activation. On a CPU that is a small part of a step, also for a few processes. On GPUs, whose products are a
thousand times as fast, the masks of eight processes would take about as long as the step, and a fused
attention kernel draws only for the rows that it computes. There, a model with dropout keeps its own classes,
and each process has a seed of its own. So it is for images in their own shape, which have no rows in common.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.data.rng import random_integer
from vitrail.fast.device import seed_generators
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.norm import DropPath
from vitrail.model.position import Rotate, identity
from vitrail.model.segments import Segments
from vitrail.model.tap import Tap
from vitrail.model.tokens import PatchDropout
from vitrail.recipes.settings import TrainConfig
from vitrail.training.parallel import ProcessGroup


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
    """Whether all processes draw the same."""
    part: int = 0
    """This process's part of what a single process would take at once."""

    def start(self, step: int, micro_batch: int = 0) -> None:
        """Seed the generators for a micro-batch."""
        key = self.ranks.rank
        if self.alike:
            key, self.part = divmod(self.ranks.rank * self.accumulate + micro_batch, self.ranks.count)
        seed_generators(random_integer([self.seed, step, key, 2]), self.device)

    def start_next(self, step: int, micro_batch: int) -> None:
        """The same for the second and later ones, but not within a CUDA graph, which reads one seed."""
        captured = self.ranks.count == 1 and self.device.type != "cpu"
        if micro_batch and self.alike and not captured:
            self.start(step, micro_batch)

    def take_rows(self, drawn: Tensor) -> Tensor:
        """This process's rows of what was drawn for all."""
        return drawn.unflatten(0, (self.ranks.count, -1))[self.part]


def share_dropout(
    model: ViT, settings: TrainConfig, ranks: ProcessGroup, device: torch.device
) -> DropoutSeeds:
    """Let every module of a model that draws random numbers draw for all processes, if there are several."""
    dropout = bool(model.config.dropout or model.config.attention_dropout)
    alike = (device.type == "cpu" or not dropout) and not settings.native
    seeds = DropoutSeeds(ranks, device, settings.seed, settings.accumulate, alike)
    for module in list(model.modules()) if alike and ranks.count > 1 else ():
        if isinstance(module, Attention) and module.dropout:
            module.__class__ = _SharedAttention
            module.weights.__class__ = _SharedWeights
            module.weights.drop = _share(nn.Dropout(module.dropout), seeds)
            module.dropout = 0.0
        elif isinstance(module, DropPath | nn.Dropout | PatchDropout) and module.p:
            _share(module, seeds)
    return seeds


def _share(module: nn.Module, seeds: DropoutSeeds) -> nn.Module:
    classes = {DropPath: _SharedDropPath, nn.Dropout: _SharedDropout, PatchDropout: _SharedPatchDropout}
    module.__class__ = classes.get(type(module), type(module))
    module.seeds = seeds  # type: ignore[assignment]
    return module


class _SharedDropPath(DropPath):
    seeds: DropoutSeeds

    def forward(self, branch: Tensor, images: Segments | None = None) -> Tensor:
        if not self.training:
            return branch
        drawn = super().forward(torch.ones(self.seeds.ranks.count * len(branch), 1, 1, device=branch.device))
        return branch * (self.seeds.take_rows(drawn) > 0) / (1 - self.p)


class _SharedPatchDropout(PatchDropout):
    seeds: DropoutSeeds

    def forward(self, z: Tensor) -> Tensor:
        if not self.training:
            return z
        tokens = torch.arange(z.shape[1], device=z.device)[:, None]
        drawn = super().forward(tokens.expand(self.seeds.ranks.count * len(z), -1, 1))
        return z.gather(1, self.seeds.take_rows(drawn).expand(-1, -1, z.shape[2]))


class _SharedDropout(nn.Dropout):
    seeds: DropoutSeeds

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * self.seeds.take_rows(
            super().forward(x.new_ones(self.seeds.ranks.count * len(x), *x.shape[1:]))
        )


class _SharedAttention(Attention):
    """Attention that computes its weights explicitly in training, because they are dropped one by one."""

    def forward(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | Segments | None = None,
        rotate: Rotate = identity,
    ) -> Tensor:
        self.explicit += self.training
        try:
            return super().forward(z, context, mask=mask, rotate=rotate)
        finally:
            self.explicit -= self.training


class _SharedWeights(Tap):
    """The attention weights; some of them zero."""

    drop: nn.Module

    def forward(self, weights: Tensor) -> Tensor:
        dropped: Tensor = self.drop(super().forward(weights))
        return dropped
