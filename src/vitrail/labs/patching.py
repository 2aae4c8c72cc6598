"""Lab `patching`: a convolution by the patch, and cutting and multiplying: are they the same?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.inspect.canvas import AMOUNT, bar, canvas, in_our_style, show_map
from vitrail.labs.lab import Result, Size, Verdict, pictures
from vitrail.model.tokens import cut

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "patching"
NOTE = '001 "Patch Embedding", 002 "Trick: combine patching and linear projection"'
CLAIM = (
    "A convolution whose kernel and stride are the patch gives the same tokens as cutting the picture into "
    "patches and multiplying each by E."
)
TAKES = "pictures"

PATCHES = [(4, 4), (2, 2), (8, 8), (2, 4), (1, 8), (8, 1), (1, 1)]
ARTICLE = 1e-5  # the tolerance that article 001 compares with
EXACT = 1e-12


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    count, width = (256, 192) if size == "full" else (8, 16)
    images = coloured(pictures(data, count))
    single, double, other = [], [], []
    for patch in PATCHES if size == "full" else PATCHES[:3]:
        kernel = torch.randn(width, images.shape[1], *patch, dtype=torch.float64)
        by_kernel = by_convolution(images, kernel)
        double.append(difference(by_matrix(images, kernel), by_kernel))
        single.append(difference(by_matrix(images.float(), kernel.float()).double(), by_kernel))
        if patch != (1, 1):  # a patch of one pixel has no order of rows and columns
            other.append(difference(pixels_first(images, kernel), by_kernel))
    verdict = judge(max(double), max(single), min(other))
    sentence = (
        f"In float64 the two differ by at most {max(double):.1e} of the largest value, in float32 by "
        f"{max(single):.1e}. With the patch flattened as row, column, channel and the kernel as it is, the "
        f"tokens are others: {min(other):.2f} at least."
    )
    numbers = {"float64": max(double), "float32": max(single), "pixels first": min(other)}
    unit = "of the largest value, the largest difference in float64"
    figure = draw(
        images, by_convolution(images, torch.randn(width, images.shape[1], 2, 2, dtype=torch.float64))
    )
    return Result(max(double), unit, len(double) * len(images), verdict, sentence, figure, numbers=numbers)


def judge(double: float, single: float, pixels_first: float) -> Verdict:
    """Equal but for rounding; and whether it matters in which order a patch is flattened."""
    if double > EXACT or single > ARTICLE:
        return Verdict("does not hold", f": they differ by {max(double, single):.1e}")
    if pixels_first > ARTICLE:
        return Verdict("holds if", "patch and kernel are flattened in the same order")
    return Verdict("holds")


def by_convolution(images: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(images, kernel, stride=kernel.shape[2:]).flatten(2).transpose(1, 2)  # (B, N, D)


def by_matrix(images: Tensor, kernel: Tensor) -> Tensor:
    return cut(images, tuple(kernel.shape[2:])) @ kernel.flatten(1).T  # (B, N, D)


def pixels_first(images: Tensor, kernel: Tensor) -> Tensor:
    """Patches flattened as the paper's (P^2 C) can be read: row, column, channel."""
    patches = cut(images, tuple(kernel.shape[2:])).unflatten(2, (images.shape[1], -1))  # (B, N, C, P P)
    return patches.transpose(2, 3).flatten(2) @ kernel.flatten(1).T


def difference(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def coloured(images: Tensor) -> Tensor:
    """Grey pictures get three channels that differ: with one, every order is the same."""
    return torch.cat([images, 1 - images, images**2], dim=1) if images.shape[1] == 1 else images


@in_our_style
def draw(images: Tensor, tokens: Tensor) -> Figure:
    """One picture, its patches, and the tokens both ways give."""
    figure = canvas(7.2, 2.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.6])
    picture = images[0, :3].permute(1, 2, 0).numpy()
    left.imshow(picture)
    left.set_title("a picture")
    left.axis("off")
    patches = cut(images[:1], (2, 2))[0].unflatten(1, (images.shape[1], 2, 2))[:, :3]  # (N, C, 2, 2)
    side = images.shape[3] // 2
    apart = np.ones((3 * (len(patches) // side), 3 * side, 3))
    for n, patch in enumerate(patches):
        y, x = 3 * (n // side), 3 * (n % side)
        apart[y : y + 2, x : x + 2] = patch.permute(1, 2, 0).numpy()
    middle.imshow(apart)
    middle.set_title("cut into patches of 2 x 2")
    middle.axis("off")
    image = show_map(right, tokens[0].abs().numpy(), title="its tokens, by convolution or by E")
    image.set_cmap(AMOUNT)
    right.set_aspect("auto")
    bar(figure, image, right, "size of each entry")
    return figure
