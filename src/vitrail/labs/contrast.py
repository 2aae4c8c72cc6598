"""Two towers, one space: what belongs together comes to lie in the same direction (CLIP, VATT).

Each tower is a ViT whose head is the projection into the common space: of pictures, of texts or of
sounds, which differ in their tokens alone. In a batch, each vector of one tower is asked which vectors of
the other are its own; the rest of the batch are the wrong answers (noise contrastive estimation).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model import ViT

FIRST, MOST = 1 / 0.07, 100.0  # what cosines are multiplied with, at first and at most (CLIP's numbers)


class Towers(nn.Module):
    """Two encoders and the temperature that they share."""

    def __init__(self, first: ViT, second: ViT) -> None:
        super().__init__()
        self.first, self.second = first, second
        # At first a tower's vectors are nearly alike, whatever it is shown, and two towers that are both like
        # that hardly get away from it. Their differences count, so what they have in common is taken off.
        self.first_norm, self.second_norm = (
            nn.BatchNorm1d(tower.config.classes, affine=False) for tower in (first, second)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(FIRST)))

    @property
    def scale(self) -> Tensor:
        """One over the temperature: learned, as its logarithm."""
        return self.log_scale.exp().clamp(max=MOST)

    def place_first(self, x: Tensor) -> Tensor:
        """Where in the common space the first tower puts each: vectors of length 1, (B, space)."""
        return F.normalize(self.first_norm(self.first(x)), dim=-1)

    def place_second(self, x: Tensor) -> Tensor:
        return F.normalize(self.second_norm(self.second(x)), dim=-1)

    def loss(self, a: Tensor, a_kinds: Tensor, b: Tensor, b_kinds: Tensor) -> Tensor:
        """How badly the pairs of a batch are found, asked from both sides.

        Args:
            a, b: what the first and the second tower take.
            a_kinds, b_kinds: (A,) and (B,) what each shows: those of one kind belong together.
        """
        return contrast(self.place_first(a), a_kinds, self.place_second(b), b_kinds, self.scale)


def build_tower(space: int, **fields: Any) -> ViT:
    """A ViT into the common space: its head is the projection, without a bias as in CLIP."""
    shared = {"position": "sincos1d", "class_token": False, "pool": "mean", "head_bias": False}
    tower = ViT(ViTConfig(**{**shared, "classes": space, **fields}))
    # A classifier's head begins with zeros, which have no direction.
    nn.init.normal_(tower.get_parameter("head.weight"), std=tower.config.width**-0.5)
    return tower


def contrast(a: Tensor, a_kinds: Tensor, b: Tensor, b_kinds: Tensor, scale: Tensor) -> Tensor:
    """Symmetric cross-entropy over the batch, with every partner of the same kind as a right answer.

    CLIP takes the one partner from the same row as right and all others as wrong. With few different texts
    that would be false: two pictures of `a small seven on the left` have the same text, and each would be
    pushed away from the other's. So the target is shared among all partners of the same kind.
    """
    logits = scale * a @ b.T  # (A, B)
    own = (a_kinds[:, None] == b_kinds[None]).to(logits.dtype)
    return (shared_entropy(logits, own) + shared_entropy(logits.T, own.T)) / 2


def shared_entropy(logits: Tensor, own: Tensor) -> Tensor:
    """Cross-entropy to targets that lie evenly on a row's own; a row with none of them has no say."""
    has = own.sum(dim=1)
    targets = own / has.clamp(min=1)[:, None]
    losses = -(targets * logits.log_softmax(dim=1)).sum(dim=1)
    return losses.sum() / (has > 0).sum().clamp(min=1)
