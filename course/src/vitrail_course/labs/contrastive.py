"""Contrastive training of towers with a common embedding space: two in CLIP, three in VATT.

Each tower is a ViT whose head is the projection into the embedding space. Towers for images, texts and sounds
differ only in their tokens. In a batch, each embedding of one tower is classified among those of the other;
the rest of the batch are the negatives (noise contrastive estimation).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model import ViT
from vitrail.model.config import ViTConfig

_INITIAL_SCALE, _MAX_SCALE = 1 / 0.07, 100.0  # factor on cosine similarities, as in CLIP


class Towers(nn.Module):
    """Encoders of several modalities, by name, with a common embedding space and a learned temperature."""

    def __init__(self, **towers: ViT) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(towers)
        # At initialization a tower's outputs are nearly the same for all inputs, and such towers hardly
        # train. BatchNorm removes their common mean.
        self.norms = nn.ModuleDict(
            {name: nn.BatchNorm1d(tower.config.classes, affine=False) for name, tower in towers.items()}
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(_INITIAL_SCALE)))

    @property
    def scale(self) -> Tensor:
        """The inverse temperature; its logarithm is the parameter."""
        return self.log_scale.exp().clamp(max=_MAX_SCALE)

    def embed(self, name: str, x: Tensor) -> Tensor:
        """Embeddings of a tower: unit vectors, (B, dimension)."""
        return F.normalize(self.norms[name](self.towers[name](x)), dim=-1)

    def loss(self, a: Tensor, a_classes: Tensor, b: Tensor, b_classes: Tensor) -> Tensor:
        """The contrastive loss of the embeddings of two towers.

        Args:
            a, b: embeddings.
            a_classes, b_classes: (A,) and (B,) their classes; inputs of the same class are positive pairs.
        """
        return contrastive_loss(a, a_classes, b, b_classes, self.scale)


def build_tower(dimension: int, **fields: Any) -> ViT:
    """A ViT whose head projects into the embedding space, without a bias as in CLIP."""
    defaults = {"position": "sincos1d", "class_token": False, "pool": "mean", "head_bias": False}
    tower = ViT(ViTConfig(**{**defaults, "classes": dimension, **fields}))
    # A classifier's head is initialized to zero, which has no direction.
    nn.init.normal_(tower.get_parameter("head.weight"), std=tower.config.width**-0.5)
    return tower


def contrastive_loss(a: Tensor, a_classes: Tensor, b: Tensor, b_classes: Tensor, scale: Tensor) -> Tensor:
    """Symmetric cross-entropy over the batch, where all pairs of the same class are positive.

    CLIP has one positive per row and takes all others as negatives. With few different texts that would be
    wrong: two images of `a small seven on the left` have the same text, and each would be pushed away from
    the other's. So the target probability is divided among all positives.
    """
    logits = scale * a @ b.T  # (A, B)
    positives = (a_classes[:, None] == b_classes[None]).to(logits.dtype)
    return (_soft_cross_entropy(logits, positives) + _soft_cross_entropy(logits.T, positives.T)) / 2


def _soft_cross_entropy(logits: Tensor, positives: Tensor) -> Tensor:
    """Cross-entropy with uniform targets over a row's positives; rows without positives are ignored."""
    count = positives.sum(dim=1)
    targets = positives / count.clamp(min=1)[:, None]
    losses = -(targets * logits.log_softmax(dim=1)).sum(dim=1)
    return losses.sum() / (count > 0).sum().clamp(min=1)
