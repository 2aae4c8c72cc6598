"""From tokens to logits: pooling to one vector for the image, y of Eq. 4, and classification heads."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.model.layers import build_activation, build_mlp, build_norm


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


class ClassMeanPool(MeanPool):
    """Class token and mean of the patches, concatenated (DINOv2's linear classifiers)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens[:, 0], super().forward(tokens)], dim=1)  # (B, 2 D)


class FlattenPool(MeanPool):
    """All patch tokens concatenated into one vector."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.first :].flatten(1)  # (B, N D)


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


# ---- heads ----------------------------------------------------------------------------------


class TwoLayerHead(nn.Module):
    """fc2(activation(fc1 y)); with tanh, the paper's head for pre-training."""

    def __init__(self, config: ViTConfig, activation: nn.Module) -> None:
        super().__init__()
        hidden = config.head_hidden or config.width
        self.fc1 = nn.Linear(config.pooled_width, hidden)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, config.classes)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(pooled)))  # (B, K)


class DistilledHead(nn.Module):
    """One linear layer each for the class and the distillation token, averaged (DeiT)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.classes = nn.Linear(config.width, config.classes)
        self.distillation = nn.Linear(config.width, config.classes)

    def separate_logits(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the two layers, for a loss on each: both (B, K)."""
        class_token, distillation_token = pooled.chunk(2, dim=1)
        return self.classes(class_token), self.distillation(distillation_token)

    def forward(self, pooled: Tensor) -> Tensor:
        class_logits, distillation_logits = self.separate_logits(pooled)
        return (class_logits + distillation_logits) / 2  # (B, K)


class CosineHead(nn.Module):
    """fc2(y / |y|) with y = fc1 of the pooled vector: with texts as fc2's rows, a zero-shot classifier.

    A row of fc2 is a text's unit vector times the scale, so that a logit is the scaled cosine of image and
    text. Without `head_hidden` the pooled vector itself is compared (SigLIP).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, hidden = config.pooled_width, config.head_hidden
        self.fc1 = nn.Linear(width, hidden, bias=config.head_bias) if hidden else nn.Identity()
        self.fc2 = nn.Linear(hidden or width, config.classes, bias=config.head_bias)

    def embed(self, pooled: Tensor) -> Tensor:
        """The unit vector of an image, in the space of the texts: (B, E)."""
        return F.normalize(self.fc1(pooled), dim=-1)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.fc2(self.embed(pooled))  # (B, K)


def build_head(config: ViTConfig) -> nn.Module:
    """The head of `config.head`; an identity without classes."""
    if config.classes == 0:
        return nn.Identity()
    match config.head:
        case "linear":
            return nn.Linear(config.pooled_width, config.classes, bias=config.head_bias)
        case "mlp":
            return TwoLayerHead(config, build_activation(config))
        case "tanh":
            return TwoLayerHead(config, nn.Tanh())
        case "distilled":
            return DistilledHead(config)
        case "cosine":
            return CosineHead(config)
