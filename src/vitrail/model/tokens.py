"""From a picture to tokens: cut it into patches, flatten each, multiply by E (Eq. 1).

A convolution whose kernel and stride are the patch computes the same numbers from the same
parameters: `proj.weight` (D, C, P, P) is its kernel, and `proj.weight.flatten(1)` is E transposed.
Here it is one matrix product, which is the faster of the two (docs/patches.md).

Whatever can be cut can be encoded (note 003: "just patch it"). A video is cut into tubelets, small
boxes of pixels; a sound becomes the picture of its spectrogram; a text comes in pieces already.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import STEM_STRIDES, ViTConfig
from vitrail.model.norm import build_norm
from vitrail.model.stem import ConvStem, ResNetStem, initialise_stem


def cut(images: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Cut pictures into flattened patches x_p, row by row: (B, C, H, W) -> (B, N, C P P).

    Pixels at the right and bottom that fill no whole patch are left out. A video is cut alike, with
    one axis more: (B, C, frames, H, W).
    """
    x, axes = images, len(patch)
    for axis in range(axes + 1, 1, -1):  # from the last, so that those before keep their number
        side = patch[axis - 2]
        count = images.shape[axis] // side
        x = x.narrow(axis, 0, count * side).unflatten(axis, (count, side))
    places, pixels = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)  # x: (B, C, h, P, w, P)
    x = x.permute(0, *places, 1, *pixels)  # (B, h, w, C, P, P)
    return x.flatten(1 + axes).flatten(1, axes)  # (B, N, C P P)


class PatchProjection(nn.Conv2d):
    """x_p E + b, with the parameters of the convolution that computes the same."""

    def forward(self, flat: Tensor) -> Tensor:
        return F.linear(flat, self.weight.flatten(1), self.bias)  # (B, N, D)


class TubeletProjection(nn.Conv3d):
    """The same for a video."""

    def forward(self, flat: Tensor) -> Tensor:
        return F.linear(flat, self.weight.flatten(1), self.bias)  # (B, N, D)


class PatchTokens(nn.Module):
    """One token for each patch: x_p E, with a norm before and after where the config says so."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.build(config, config.channels, config.patch_pixels)

    def build(self, config: ViTConfig, channels: int, patch: tuple[int, ...]) -> None:
        self.patch = patch
        before = config.embedding_norm in ("before", "both")
        after = config.embedding_norm in ("after", "both")
        flat = channels * math.prod(patch)
        projection = TubeletProjection if config.input == "video" else PatchProjection
        self.norm_before = build_norm(config, flat) if before else nn.Identity()
        self.proj = projection(channels, config.width, patch, stride=patch, bias=config.embedding_bias)  # type: ignore[arg-type]
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


class SpectrogramTokens(PatchTokens):
    """A sound (B, samples) as the picture of its spectrogram: frequencies down, time across."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.bins = config.pixels[0]
        self.register_buffer("window", torch.hann_window(2 * self.bins), persistent=False)

    def spectrogram(self, sounds: Tensor) -> Tensor:
        """The logarithm of the power in each bin of each frame, as a whole of mean 0 and variance 1.

        A frame is 2 `bins` samples, half of them shared with the frame before; bin i holds i + 1
        waves of that length. The highest frequency is at the bottom.
        """
        frames = sounds.unfold(1, 2 * self.bins, self.bins) * cast(Tensor, self.window)
        waves = torch.fft.rfft(frames, norm="ortho")[..., 1:]  # (B, frames, bins), without the mean
        power = waves.real.square() + waves.imag.square()
        x = (power + 1e-6).log().transpose(1, 2)  # (B, bins, frames)
        return F.layer_norm(x, x.shape[1:])[:, None]  # (B, 1, bins, frames)

    def forward(self, sounds: Tensor) -> Tensor:
        return super().forward(self.spectrogram(sounds))


class TextTokens(nn.Module):
    """Token numbers (B, length) to their rows of E: x E for one-hot x, without the product."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Embedding(config.vocabulary or 0, config.width)
        self.norm_after = build_norm(config) if config.embedding_norm == "after" else nn.Identity()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.norm_after(self.proj(numbers))  # (B, N, D)


def build_tokens(config: ViTConfig) -> PatchTokens | TextTokens:
    match config.input, config.embedding:
        case "text", _:
            return TextTokens(config)
        case "audio", _:
            return SpectrogramTokens(config)
        case _, "mlp":
            return MLPTokens(config)
        case _, "conv" | "resnet":
            return StemTokens(config)
        case _:
            return PatchTokens(config)


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
