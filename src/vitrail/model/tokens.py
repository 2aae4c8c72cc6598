"""From a picture to tokens: cut it into patches, flatten each, multiply by E (Eq. 1).

A convolution whose kernel and stride are the patch computes the same numbers from the same
parameters: `proj.weight` (D, C, P, P) is its kernel, and `proj.weight.flatten(1)` is E transposed.
Here it is one matrix product, which is the faster of the two (docs/patches.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import STEM_STRIDES, ViTConfig
from vitrail.model.norm import build_norm
from vitrail.model.stem import ConvStem, ResNetStem, initialise_stem


def cut(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut pictures into flattened patches x_p, row by row: (B, C, H, W) -> (B, N, C P P).

    Pixels at the right and bottom that fill no whole patch are left out.
    """
    high, wide = patch
    h, w = images.shape[2] // high, images.shape[3] // wide
    x = images[:, :, : h * high, : w * wide]
    x = x.unflatten(3, (w, wide)).unflatten(2, (h, high))  # (B, C, h, P, w, P)
    x = x.permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, P, P)
    return x.flatten(3).flatten(1, 2)  # (B, N, C P P)


class PatchProjection(nn.Conv2d):
    """x_p E + b, with the parameters of the convolution that computes the same."""

    def forward(self, flat: Tensor) -> Tensor:
        return F.linear(flat, self.weight.flatten(1), self.bias)  # (B, N, D)


class PatchTokens(nn.Module):
    """One token for each patch: x_p E, with a norm before and after where the config says so."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.build(config, config.channels, config.patch_pixels)

    def build(self, config: ViTConfig, channels: int, patch: tuple[int, int]) -> None:
        self.patch = patch
        before = config.embedding_norm in ("before", "both")
        after = config.embedding_norm in ("after", "both")
        flat = channels * patch[0] * patch[1]
        self.norm_before = build_norm(config, flat) if before else nn.Identity()
        self.proj = PatchProjection(channels, config.width, patch, stride=patch, bias=config.embedding_bias)
        self.norm_after = build_norm(config) if after else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm_after(self.embed(self.norm_before(cut(images, self.patch))))  # (B, N, D)

    def embed(self, flat: Tensor) -> Tensor:
        return self.proj(flat)


class MLPTokens(PatchTokens):
    """Note 004, step 2.1: an MLP on each flat patch, with one hidden layer of width D."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.width, config.width)

    def embed(self, flat: Tensor) -> Tensor:
        return self.fc(F.gelu(self.proj(flat)))


class StemTokens(PatchTokens):
    """A hybrid (paper, 3.1): patches are cut from a stem's feature map."""

    def __init__(self, config: ViTConfig) -> None:
        nn.Module.__init__(self)
        self.stem = build_stem(config)
        initialise_stem(self.stem)
        down, across = config.patch_pixels
        stride = STEM_STRIDES[config.embedding]
        self.build(config, self.stem.out_channels, (down // stride, across // stride))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.stem(images))


def build_stem(config: ViTConfig) -> ConvStem | ResNetStem:
    if config.embedding == "conv":
        return ConvStem(config.channels, config.width)
    return ResNetStem(config.channels)


def build_tokens(config: ViTConfig) -> PatchTokens:
    match config.embedding:
        case "linear":
            return PatchTokens(config)
        case "mlp":
            return MLPTokens(config)
        case "conv" | "resnet":
            return StemTokens(config)


class PatchDropout(nn.Module):
    """In training, each picture goes without some of its patches (Li et al. 2022, FLIP)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix = config.prefix
        self.keep = max(1, round(config.patches * (1 - config.patch_dropout)))
        self.rate = config.patch_dropout

    def forward(self, z: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return z
        prefix, patches = z[:, : self.prefix], z[:, self.prefix :]
        chance = torch.rand(patches.shape[:2], device=z.device)
        kept = chance.argsort(dim=1)[:, : self.keep].sort(dim=1).values  # a draw without replacement
        patches = patches.gather(1, kept[..., None].expand(-1, -1, z.shape[2]))
        return torch.cat([prefix, patches], dim=1)  # (B, n + kept, D)
