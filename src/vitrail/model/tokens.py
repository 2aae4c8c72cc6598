"""Tokenizers. For images: cut into patches, flatten each, multiply by E (Eq. 1).

A convolution whose kernel size and stride are the patch size computes the same values from the same
parameters: `proj.weight` (D, C, P, P) is its kernel, and `proj.weight.flatten(1)` is E transposed.
Here it is one matrix product, which is faster on a GPU (docs/patches.md).

Other inputs differ only here: a video is cut into tubelets, boxes of frames x height x width; a waveform
is turned into its spectrogram, which is cut like an image; token ids are looked up in an embedding table.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.config import STEM_STRIDES, ViTConfig
from vitrail.model.layers import build_norm
from vitrail.model.stem import ConvStem, MobileStem, ResNetStem, initialize_stem
from vitrail.model.tap import TappedModule


def cut_patches(images: Tensor, patch: tuple[int, ...]) -> Tensor:
    """A view of images as a grid of patches: (B, C, H, W) -> (B, h, w, C, P, P).

    Pixels at the right and bottom that fill no complete patch are dropped. Videos have one axis more:
    (B, C, frames, H, W).
    """
    x, axes = images, len(patch)
    for axis in range(axes + 1, 1, -1):  # from the last axis, so that the indices before it stay valid
        side = patch[axis - 2]
        count = images.shape[axis] // side
        x = x.narrow(axis, 0, count * side).unflatten(axis, (count, side))
    grid_axes, patch_axes = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)  # x: (B, C, h, P, w, P)
    return x.permute(0, *grid_axes, 1, *patch_axes)  # (B, h, w, C, P, P)


def patchify(images: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Cut images into flattened patches x_p, row by row: (B, C, H, W) -> (B, N, C P P)."""
    return cut_patches(images, patch).flatten(1 + len(patch)).flatten(1, len(patch))


class PatchProjection(nn.Conv2d):
    """x_p E + b as a matrix product, with the parameters of the equivalent convolution."""

    def forward(self, flat: Tensor) -> Tensor:
        return F.linear(flat, self.weight.flatten(1), self.bias)  # (B, N, D)


class TubeletProjection(nn.Conv3d):
    """PatchProjection for videos."""

    def forward(self, flat: Tensor) -> Tensor:
        return F.linear(flat, self.weight.flatten(1), self.bias)  # (B, N, D)


class PatchTokens(TappedModule):
    """One token for each patch: x_p E, with a norm before or after if `config.embedding_norm` says so."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self._build(config, config.channels, config.patch_pixels)

    def _build(self, config: ViTConfig, channels: int, patch: tuple[int, ...]) -> None:
        self.patch = patch
        before = config.embedding_norm in ("before", "both")
        after = config.embedding_norm in ("after", "both")
        flat = channels * math.prod(patch)
        projection = TubeletProjection if config.input == "video" else PatchProjection
        self.norm_before = build_norm(config, flat) if before else nn.Identity()
        self.proj = projection(channels, config.width, patch, stride=patch, bias=config.embedding_bias)  # type: ignore[arg-type]
        self.norm_after = build_norm(config) if after else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm_after(self.embed(self.norm_before(patchify(images, self.patch))))  # (B, N, D)

    def embed(self, flat: Tensor) -> Tensor:
        return self.proj(flat)


class MLPTokens(PatchTokens):
    """An MLP on each flattened patch, with one hidden layer of width D."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.width, config.width)

    def embed(self, flat: Tensor) -> Tensor:
        return self.fc(F.gelu(self.proj(flat)))


class StemTokens(PatchTokens):
    """Hybrid architecture (paper, Section 3.1): patches are cut from a convolutional feature map."""

    def __init__(self, config: ViTConfig) -> None:
        nn.Module.__init__(self)
        self.stem: ConvStem | ResNetStem | MobileStem
        match config.embedding:
            case "conv":
                self.stem = ConvStem(config.channels, config.width)
            case "mobile":
                self.stem = MobileStem(config.channels, config.width)
            case _:
                self.stem = ResNetStem(config.channels)
        initialize_stem(self.stem)
        down, across = config.patch_pixels
        stride = STEM_STRIDES[config.embedding]
        self._build(config, self.stem.out_channels, (down // stride, across // stride))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.stem(images))


class SpectrogramTokens(PatchTokens):
    """Patches of the spectrogram of a waveform (B, samples): frequency down, time across."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.bins = config.pixels[0]
        self.register_buffer("window", torch.hann_window(2 * self.bins), persistent=False)

    def spectrogram(self, waveforms: Tensor) -> Tensor:
        """Log power spectrogram, normalized to mean 0 and variance 1: (B, 1, bins, frames).

        A frame is 2 `bins` samples and overlaps the previous one by half; bin i is the frequency of
        i + 1 periods per frame. The highest frequency is at the bottom.
        """
        frames = waveforms.unfold(1, 2 * self.bins, self.bins) * cast(Tensor, self.window)
        spectrum = torch.fft.rfft(frames, norm="ortho")[..., 1:]  # (B, frames, bins), without the mean
        power = spectrum.real.square() + spectrum.imag.square()
        x = (power + 1e-6).log().transpose(1, 2)  # (B, bins, frames)
        return F.layer_norm(x, x.shape[1:])[:, None]  # (B, 1, bins, frames)

    def forward(self, waveforms: Tensor) -> Tensor:
        return super().forward(self.spectrogram(waveforms))


class TextTokens(TappedModule):
    """Embedding of token ids (B, length): their rows of E, which is x E for one-hot x."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Embedding(config.vocabulary or 0, config.width)
        self.norm_after = build_norm(config) if config.embedding_norm == "after" else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm_after(self.proj(ids))  # (B, N, D)


def build_tokens(config: ViTConfig) -> PatchTokens | TextTokens:
    """The tokenizer of `config.input` and `config.embedding`."""
    match config.input, config.embedding:
        case "text", _:
            return TextTokens(config)
        case "audio", _:
            return SpectrogramTokens(config)
        case _, "mlp":
            return MLPTokens(config)
        case _, "conv" | "resnet" | "mobile":
            return StemTokens(config)
        case _:
            return PatchTokens(config)


class PatchDropout(nn.Module):
    """In training, drop a random subset of the patches of each image (Li et al. 2022, FLIP)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix = config.prefix
        self.count = max(1, round(config.patches * (1 - config.patch_dropout)))
        self.p = config.patch_dropout

    def forward(self, z: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return z
        prefix, patches = z[:, : self.prefix], z[:, self.prefix :]
        order = torch.rand(patches.shape[:2], device=z.device).argsort(dim=1)  # a random permutation
        index = order[:, : self.count].sort(dim=1).values  # (B, count)
        patches = patches.gather(1, index[..., None].expand(-1, -1, z.shape[2]))
        return torch.cat([prefix, patches], dim=1)  # (B, n + count, D)

    def extra_repr(self) -> str:
        return f"p={self.p}"
