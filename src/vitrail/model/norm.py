"""Normalization, LayerScale and stochastic depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.config import ViTConfig
from vitrail.model.segments import Segments


def build_norm(config: ViTConfig, width: int | None = None) -> nn.Module:
    """LN of Eq. 2 to 4, over the last axis; RMSNorm or an identity if the config has them instead."""
    width = width or config.width
    match config.norm:
        case "layer":
            return nn.LayerNorm(width, eps=config.eps)
        case "rms":
            return nn.RMSNorm(width, eps=config.eps)
        case "none":
            return nn.Identity()


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch (Touvron et al. 2021, CaiT)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.width))

    def forward(self, branch: Tensor) -> Tensor:
        return branch * self.weight


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, skip a residual branch for some of the images.

    Args:
        p: the probability of skipping the branch for an image.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor, images: Segments | None = None) -> Tensor:
        """The branch, (B, T, D); of several images in one sequence, (1, T, D), each is skipped by itself."""
        if not self.training or self.p == 0:
            return branch
        count = branch.shape[0] if images is None else len(images.lengths)
        mask = torch.rand(count, 1, 1, device=branch.device) >= self.p  # one for each image
        mask = mask if images is None else images.spread(mask)
        return branch * mask / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p:.3f}"
