"""Dropout of a batch that several processes share: the same for an image, whatever their number.

Torch draws the masks of a whole batch in one call, so an image's numbers depend on the batch they are drawn
with. Each process therefore draws for all processes, from the same seed, and takes the rows of its own
images: bit for bit what a single process draws for them. The modules here replace those of a twin.

DropPath and patch dropout draw a few numbers for an image, so that costs nothing. Dropout draws one for every
activation. On a CPU that is a small part of a step, also for a few processes. On GPUs, whose products are a
thousand times as fast, the masks of eight processes would take about as long as the step, and a fused
attention kernel draws only for the rows that it computes. There, a model with dropout keeps its own modules,
and each process has a seed of its own. So do images in their own shape, which have no rows in common.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from vitrail.fast.twin import replace_modules, take_parts
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.layers import DropPath
from vitrail.model.packing import Segments
from vitrail.model.position import Rotate, identity
from vitrail.model.tap import Tap
from vitrail.model.tokens import PatchDropout


class Rows(Protocol):
    """Which rows of what is drawn for all processes are this one's."""

    @property
    def count(self) -> int: ...

    def take_rows(self, drawn: Tensor) -> Tensor: ...


def draw_for_all(twin: ViT, rows: Rows) -> None:
    """Let every module of a twin that draws random numbers draw for all processes."""

    def build(module: nn.Module) -> nn.Module | None:
        if isinstance(module, Attention) and module.dropout:
            return _SharedAttention(module, rows)
        if type(module) in _SHARED and module.p:
            return _SHARED[type(module)](module, rows)
        return None

    replace_modules(twin, build)


class _SharedDropPath(DropPath):
    def __init__(self, path: nn.Module, rows: Rows) -> None:
        nn.Module.__init__(self)
        take_parts(self, path)
        self.rows = rows

    def forward(self, branch: Tensor, images: Segments | None = None) -> Tensor:
        if not self.training:
            return branch
        drawn = super().forward(torch.ones(self.rows.count * len(branch), 1, 1, device=branch.device))
        return branch * (self.rows.take_rows(drawn) > 0) / (1 - self.p)


class _SharedPatchDropout(PatchDropout):
    def __init__(self, dropout: nn.Module, rows: Rows) -> None:
        nn.Module.__init__(self)
        take_parts(self, dropout)
        self.rows = rows

    def forward(self, z: Tensor) -> Tensor:
        if not self.training:
            return z
        tokens = torch.arange(z.shape[1], device=z.device)[:, None]
        drawn = super().forward(tokens.expand(self.rows.count * len(z), -1, 1))
        return z.gather(1, self.rows.take_rows(drawn).expand(-1, -1, z.shape[2]))


class _SharedDropout(nn.Dropout):
    def __init__(self, dropout: nn.Module, rows: Rows) -> None:
        nn.Module.__init__(self)
        take_parts(self, dropout)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = super().forward(x.new_ones(self.rows.count * len(x), *x.shape[1:]))
        return x * self.rows.take_rows(drawn)


class _SharedAttention(Attention):
    """Attention that computes its weights explicitly in training, because they are dropped one by one."""

    def __init__(self, attention: Attention, rows: Rows) -> None:
        nn.Module.__init__(self)
        take_parts(self, attention)
        self.weights = _SharedWeights(_SharedDropout(nn.Dropout(attention.dropout), rows))
        self.dropout = 0.0

    def forward(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | Segments | None = None,
        rotate: Rotate = identity,
    ) -> Tensor:
        self.explicit = int(self.training)
        return super().forward(z, context, mask=mask, rotate=rotate)


class _SharedWeights(Tap):
    """The attention weights; some of them zero."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__(explicit=True)
        self.drop = drop

    def forward(self, weights: Tensor) -> Tensor:
        dropped: Tensor = self.drop(super().forward(weights))
        return dropped


_SHARED = {DropPath: _SharedDropPath, nn.Dropout: _SharedDropout, PatchDropout: _SharedPatchDropout}
