"""Classification heads: from the pooled vector to logits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.config import ViTConfig
from vitrail.model.mlp import build_activation


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
