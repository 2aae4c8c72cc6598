"""The norms, and what else a branch passes through before it is added."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig


def build_norm(config: ViTConfig, width: int | None = None) -> nn.Module:
    """LN of Eq. 2 to 4, over the last axis, or what stands in its place."""
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
    """In training, leave a branch out for some pictures (stochastic depth, Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate  # one for each picture
        return branch * kept / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"{self.rate:.3f}"
