"""Lab `patching`: patch embedding as a convolution and as a matrix product give the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model.tokens import patchify
from vitrail.views.canvas import SEQUENTIAL, add_colorbar, new_figure, show_map, styled
from vitrail_course.labs.lab import LabResult, LabSize, load_images
from vitrail_course.labs.verdict import ROUNDING, Verdict, identity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "patching"
TITLE = "a convolution makes the tokens"
NOTE = '002 "Trick: combine patching and linear projection", 001 "Patch Embedding"'
CLAIM = (
    "Kernel size is the same as patch size. Stride length is the same as patch size. Convolution reduces "
    "to matrix multiplication."
)
ACCEPTS = "images"

_PATCHES = [(4, 4), (2, 2), (8, 8), (2, 4), (1, 8), (8, 1), (1, 1)]
_ARTICLE_TOLERANCE = 1e-5  # the tolerance that note 001 uses
_FLOAT64_TOLERANCE = 1e-12


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    count, width = (256, 192) if size == "full" else (8, 16)
    images = _with_three_channels(load_images(data, count))
    float32, float64, channels_last = [], [], []
    for patch in _PATCHES if size == "full" else _PATCHES[:3]:
        kernel = torch.randn(width, images.shape[1], *patch, dtype=torch.float64)
        expected = _tokens_by_convolution(images, kernel)
        float64.append(_relative_difference(_tokens_by_matrix(images, kernel), expected))
        float32.append(
            _relative_difference(_tokens_by_matrix(images.float(), kernel.float()).double(), expected)
        )
        if patch != (1, 1):  # for a single pixel, both orders are the same
            channels_last.append(_relative_difference(_tokens_channels_last(images, kernel), expected))
    numbers = {"float64": max(float64), "float32": max(float32), "channels last": min(channels_last)}
    setting = f"{len(images)} images, {len(float64)} patch sizes, random kernels of {width} filters."
    unit = "maximum relative difference in float64"
    figure = draw(
        images, _tokens_by_convolution(images, torch.randn(width, images.shape[1], 2, 2, dtype=torch.float64))
    )
    return LabResult(max(float64), unit, len(float64) * len(images), setting, figure, numbers=numbers)


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """The tokens must be equal up to rounding, where E is the kernel as a C P P x D matrix, as 002 has it."""
    return Verdict(
        [
            identity(
                "both give the same tokens in float64",
                numbers["float64"] <= _FLOAT64_TOLERANCE,
                f"relative difference {numbers['float64']:.1e}; {numbers['channels last']:.2f} if patches "
                "are "
                "flattened in another order than the kernel",
                f"{_FLOAT64_TOLERANCE:g}",
                ROUNDING,
            ),
            identity(
                "and in float32",
                numbers["float32"] <= _ARTICLE_TOLERANCE,
                f"relative difference {numbers['float32']:.1e}",
                f"{_ARTICLE_TOLERANCE:g}",
                "note 001, atol=1e-5",
            ),
        ]
    )


def _tokens_by_convolution(images: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(images, kernel, stride=kernel.shape[2:]).flatten(2).transpose(1, 2)  # (B, N, D)


def _tokens_by_matrix(images: Tensor, kernel: Tensor) -> Tensor:
    return patchify(images, tuple(kernel.shape[2:])) @ kernel.flatten(1).T  # (B, N, D)


def _tokens_channels_last(images: Tensor, kernel: Tensor) -> Tensor:
    """Tokens of patches flattened as row, column, channel, one reading of the paper's P^2 C."""
    patches = patchify(images, tuple(kernel.shape[2:])).unflatten(2, (images.shape[1], -1))  # (B, N, C, P P)
    return patches.transpose(2, 3).flatten(2) @ kernel.flatten(1).T


def _relative_difference(tokens: Tensor, expected: Tensor) -> float:
    return ((tokens - expected).abs().max() / expected.abs().max()).item()


def _with_three_channels(images: Tensor) -> Tensor:
    """Gray images with three different channels; with one channel, both orders would be the same."""
    return torch.cat([images, 1 - images, images**2], dim=1) if images.shape[1] == 1 else images


@styled
def draw(images: Tensor, tokens: Tensor) -> Figure:
    """An image, its patches and its tokens."""
    figure = new_figure(7.2, 2.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.6])
    # Gray images have two made-up channels more, which are not shown.
    left.imshow(images[0, 0].numpy(), cmap="gray")
    left.set_title("image")
    left.axis("off")
    patches = patchify(images[:1, :1], (2, 2))[0].unflatten(1, (2, 2))  # (N, 2, 2)
    side = images.shape[3] // 2
    separated = np.full((3 * (len(patches) // side), 3 * side), np.nan)
    for n, patch in enumerate(patches):
        y, x = 3 * (n // side), 3 * (n % side)
        separated[y : y + 2, x : x + 2] = patch.numpy()
    middle.imshow(separated, cmap="gray")
    middle.set_title("patches of 2 x 2")
    middle.axis("off")
    token_map = show_map(right, tokens[0].abs().numpy(), title="tokens, by convolution or by E")
    token_map.set_cmap(SEQUENTIAL)
    right.set_aspect("auto")
    add_colorbar(figure, token_map, right, "absolute value")
    return figure
