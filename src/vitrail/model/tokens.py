"""From a picture to tokens: cut it into patches, flatten each, multiply by E (Eq. 1).

A convolution whose kernel and stride are the patch computes the same numbers from the same
parameters: `proj.weight` (D, C, P, P) is its kernel, and `proj.weight.flatten(1)` is E transposed.
Here it is one matrix product, which is the faster of the two (docs/patches.md).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig


def cut(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut pictures into flattened patches x_p, row by row: (B, C, H, W) -> (B, N, C P P)."""
    high, wide = patch
    x = images.unflatten(3, (-1, wide)).unflatten(2, (-1, high))  # (B, C, h, P, w, P)
    x = x.permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, P, P)
    return x.flatten(3).flatten(1, 2)  # (B, N, C P P)


class PatchProjection(nn.Conv2d):
    """x_p E + b, with the parameters of the convolution that computes the same."""

    def forward(self, images: Tensor) -> Tensor:
        high, wide = self.kernel_size
        return F.linear(cut(images, (high, wide)), self.weight.flatten(1), self.bias)  # (B, N, D)


class PatchTokens(nn.Module):
    """One token for each patch."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patch = config.patch_pixels
        self.proj = PatchProjection(config.channels, config.width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images)  # (B, N, D)
