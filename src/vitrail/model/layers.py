"""The layers of a block besides attention: norms, the MLP of Eq. 3, LayerScale and stochastic depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitrail.model.config import ViTConfig
from vitrail.model.tap import Tap, TappedModule

if TYPE_CHECKING:
    from vitrail.model.packing import Segments


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


class MLP(TappedModule):
    """fc2(GELU(fc1 z)), with one hidden layer of width F or, with `mlp_hidden`, more of them."""

    parts = 1
    """Vectors of width F that fc1 computes."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        hidden = config.F
        self.fc1 = nn.Linear(config.width, self.parts * hidden, bias=config.linear_bias)
        middle = range(config.mlp_hidden - 1)
        self.middle = nn.ModuleList(nn.Linear(hidden, hidden, bias=config.linear_bias) for _ in middle)
        self.activation = build_activation(config)
        self.hidden = Tap()
        self.drop = nn.Dropout(config.dropout)
        self.norm = build_norm(config, hidden) if config.mlp_norm else nn.Identity()
        self.fc2 = nn.Linear(hidden, config.width, bias=config.linear_bias)
        self.out = Tap()

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.activation(self.fc1(z))  # (B, T, F)
        for layer in self.middle:
            hidden = self.activation(layer(self.drop(hidden)))
        return self.out(self.fc2(self.norm(self.drop(self.hidden(hidden)))))  # (B, T, D)


class GatedMLP(MLP):
    """fc2(activation(a) b) with [a, b] = fc1 z; with silu this is SwiGLU (Shazeer 2020)."""

    parts = 2

    def forward(self, z: Tensor) -> Tensor:
        gate, value = self.fc1(z).chunk(2, dim=-1)  # each (B, T, F)
        hidden = self.hidden(self.activation(gate) * value)
        return self.out(self.fc2(self.norm(self.drop(hidden))))  # (B, T, D)


def build_mlp(config: ViTConfig) -> nn.Module:
    """The MLP of `config.mlp`."""
    match config.mlp:
        case "plain":
            return MLP(config)
        case "gated":
            return GatedMLP(config)


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), the approximation of GELU in OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def build_activation(config: ViTConfig) -> nn.Module:
    """The activation of `config.activation`."""
    match config.activation:
        case "gelu":
            return nn.GELU()  # x Phi(x), exactly
        case "gelu-tanh":
            return nn.GELU(approximate="tanh")
        case "quick-gelu":
            return QuickGELU()
        case "relu":
            return nn.ReLU()
        case "silu":
            return nn.SiLU()
