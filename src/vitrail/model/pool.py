"""Pooling: from tokens to one vector for the image, y of Eq. 4."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.model.mlp import build_mlp
from vitrail.model.norm import build_norm


class ClassPool(nn.Module):
    """The class token; with a distilled head, class and distillation token concatenated."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.count = 2 if config.head == "distilled" else 1

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, : self.count].flatten(1)  # (B, D) or (B, 2 D)


class MeanPool(nn.Module):
    """The mean of the patches, or of all tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.first = 0 if config.pool == "mean-all" else config.prefix

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.first :].mean(dim=1)  # (B, D)


class ClassMeanPool(nn.Module):
    """Class token and mean of the patches, concatenated (DINOv2's linear classifiers)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.first = config.prefix

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens[:, 0], tokens[:, self.first :].mean(dim=1)], dim=1)  # (B, 2 D)


class AttentionPool(nn.Module):
    """A learned query attends to the patches or to all tokens, then an MLP (MAP head, Zhai et al. 2022)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.first = 0 if config.pool_tokens == "all" else config.prefix
        config = _pool_config(config)
        self.probe = nn.Parameter(torch.empty(1, config.width))
        self.attention = Attention(config)
        self.norm = build_norm(config)
        self.mlp = build_mlp(config)

    def forward(self, tokens: Tensor) -> Tensor:
        probe = self.probe.expand(tokens.shape[0], -1, -1)  # (B, 1, D)
        y = self.attention(probe, context=tokens[:, self.first :])
        y = y + self.mlp(self.norm(y))
        return y[:, 0]  # (B, D)


def _pool_config(config: ViTConfig) -> ViTConfig:
    """The config of the attention pool: its own heads and hidden width, without what only blocks have."""
    heads = config.pool_heads or config.heads
    return replace(
        config,
        heads=heads,
        head_width=config.heads_width // heads,
        mlp_width=config.pool_mlp_width or config.F,
        position="none",
        position_at="start",
        position_sigma=None,
        scale="head",
        attention_norm=False,
        mlp_norm=False,
    )


class FlattenPool(nn.Module):
    """All patch tokens concatenated into one vector."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.first = config.prefix

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.first :].flatten(1)  # (B, N D)


def build_pool(config: ViTConfig) -> nn.Module:
    """The pooling module of `config.pool`."""
    match config.pool:
        case "class":
            return ClassPool(config)
        case "mean" | "mean-all":
            return MeanPool(config)
        case "class-mean":
            return ClassMeanPool(config)
        case "attention":
            return AttentionPool(config)
        case "flatten":
            return FlattenPool(config)
