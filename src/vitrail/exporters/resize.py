"""Resize images by matrix products, so that a graph can do it for sizes known only at run time.

Along one side, a new pixel is a weighted sum of old ones: y = M x, where row i of M is a filter laid over
the old pixels at the position of the new one. Rows and columns are resized one after the other. M is computed
from the sizes in float64, as Pillow does it. The resize operators of the runtimes are not used: they
differ from Pillow and from each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitrail.base.errors import InputError, option
from vitrail.base.fields import short_repr
from vitrail.images.normalize import channel_statistics, normalize
from vitrail.images.preprocess import Preprocess
from vitrail.model import resample
from vitrail.model.resample import Filter, antialias_weights, scalar_tensor

BITS = 22  # fractional bits of a weight in Pillow


def _lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Tensor) -> Tensor:
    angle = math.pi * x
    return torch.where(x == 0, 1.0, angle.sin() / torch.where(x == 0, 1.0, angle))


FILTERS: dict[str, Filter] = resample.FILTERS | {"lanczos": (_lanczos, 3.0)}


# ---- images -----------------------------------------------------------------------------------


def check_resize(preprocess: Preprocess) -> None:
    """Raise an error if a graph cannot do this preprocessing."""
    if preprocess.resize != "none" and preprocess.interpolation not in FILTERS:
        raise InputError(
            f"{option('with-preprocess', True)} supports interpolation {', '.join(FILTERS)}, not "
            f"{short_repr(preprocess.interpolation)}; export without it, and vt.Predictor resizes the images."
        )


class ResizeToInput(nn.Module):
    """uint8 images (B, h, w, C) of any size to pixels of the model's size, (B, C, H, W) as floats 0 to 255.

    The same as `Preprocess.pixels` for an array: columns, then rows, rounded to 8 bits in between. Pillow's
    weights have 22 fractional bits and float64 sums them without loss, so the pixels are bit-equal to its.
    torch rounds its weights to 16 bits, so with that backend they are within 1.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess = preprocess
        self.rows_may_come_first = preprocess.backend == "pillow" and rows_may_come_first()

    def forward(self, images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2)  # (B, C, h, w)
        if self.preprocess.resize == "none":
            return x.float()
        high, wide = (scalar_tensor(side, torch.int64) for side in x.shape[2:])
        h, w = self.resized(high, wide)
        down, across = (
            self.weights(*sides)
            for sides in zip(x.shape[2:], (high, wide), (h, w), self.preprocess.target, strict=True)
        )
        parts = x.double(), down, across.T.contiguous()
        if not self.rows_may_come_first:
            return columns_first(*parts).float()  # (B, C, H, W)
        tall = (h < high) & (high - h > 2 * (wide - w))
        if torch.compiler.is_exporting():  # the graph gets both branches
            return torch.cond(tall, rows_first, columns_first, parts).float()
        return (rows_first if tall else columns_first)(*parts).float()

    def resized(self, high: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Height and width after resizing, before the crop."""
        h, w = (scalar_tensor(side, torch.int64) for side in self.preprocess.before_crop)
        if self.preprocess.resize == "squash":
            return h, w
        short = torch.minimum(high, wide)
        return torch.where(high == short, h, h * high // short), torch.where(
            wide == short, w, w * wide // short
        )

    def weights(self, side: int, old: Tensor, new: Tensor, cut: int) -> Tensor:
        """M along one side, (cut, side): of the new pixels only those that the crop keeps.

        Args:
            side, old: the side of the image, as a number and as a tensor.
            new: what it is resized to.
            cut: how much of that the crop keeps.
        """
        half = (new - cut).double() / 2
        first = half.floor() if self.preprocess.crop_rounding == "down" else half.round()  # half to even
        positions = first + torch.arange(cut, dtype=torch.float64)
        exact = antialias_weights(
            positions, side, old.double() / new.double(), *FILTERS[self.preprocess.interpolation]
        )
        return (exact * 2**BITS).round() / 2**BITS


def rows_may_come_first() -> bool:
    """Whether Pillow resizes tall images by their rows first, as it does from version 13 on.

    It does so if the height shrinks by more than twice as many pixels as the width. The order matters,
    because pixels are rounded and clipped to 0..255 in between.
    """
    import PIL

    return int(PIL.__version__.split(".")[0]) >= 13


def columns_first(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    return rounded(down @ rounded(x @ across))


def rows_first(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    return rounded(rounded(down @ x) @ across)


def rounded(x: Tensor) -> Tensor:
    return (x + 0.5).floor().clamp(0, 255)


class Normalize(nn.Module):
    """Normalization inside the exported graph, see `images.normalize`."""

    mean: Tensor
    std: Tensor

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.scale = preprocess.scale
        mean, std = channel_statistics(preprocess)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, pixels: Tensor) -> Tensor:
        return normalize(pixels, self.mean, self.std, self.scale)
