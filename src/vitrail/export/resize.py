"""Resizing as matrix products, so that a graph can do it for sizes that are known only when it runs.

Along one side, a new pixel is a weighted sum of old ones: y = M x, where row i of M is a filter laid over
the old pixels at the place of the new one. Rows and columns are resized one after the other. M is computed
from the sizes by plain arithmetic, in float64, as Pillow does it; no runtime's own "resize" is involved,
and these differ in all that matters here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.errors import InputError
from vitrail.fields import show
from vitrail.preprocess import Preprocess

BITS = 22  # of a weight behind the point, in Pillow


def hat(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor, a: float = -0.5) -> Tensor:
    """Keys' kernel. a is -0.5 in Pillow and in torch with antialias, -0.75 in torch without."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def sinc(x: Tensor) -> Tensor:
    angle = math.pi * x
    return torch.where(x == 0, 1.0, angle.sin() / torch.where(x == 0, 1.0, angle))


def lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, sinc(x) * sinc(x / 3), 0.0)


def box(x: Tensor) -> Tensor:
    return ((x > -0.5) & (x <= 0.5)).to(x.dtype)


def hamming(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1, sinc(x) * (0.54 + 0.46 * (math.pi * x).cos()), 0.0)


FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {  # each with its reach
    "bilinear": (hat, 1.0),
    "bicubic": (cubic, 2.0),
    "lanczos": (lanczos, 3.0),
    "box": (box, 0.5),
    "hamming": (hamming, 1.0),
}


def number(value: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A side as a tensor, so that what is computed with it stays open when a graph is made."""
    return torch.full((), value, dtype=dtype)


def spread(
    places: Tensor, old: int, scale: Tensor, kernel: Callable[[Tensor], Tensor], reach: float
) -> Tensor:
    """M (places, old): where pixels fall together, the filter is as much wider (antialias).

    A box ends so abruptly that the last bit decides whether it holds a pixel. Pillow decides twice, by
    whole pixels and by the filter, and both count here, computed in its order.

    Args:
        places: numbers of the new pixels that are wanted.
        scale: how many old pixels a new one is wide.
        reach: where the filter ends.
    """
    wide = scale.clamp(min=1)
    centres, pixels = (places[:, None] + 0.5) * scale, torch.arange(old, dtype=torch.float64)
    first, end = ((centres + side * reach * wide + 0.5).floor() for side in (-1, 1))
    inside = (pixels >= first) & (pixels < end)
    weights = torch.where(inside, kernel((pixels - centres + 0.5) * (1 / wide)), 0.0)
    return weights / weights.sum(dim=1, keepdim=True)


def taps(sources: Tensor, old: int, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """M (sources, old) without antialias: four old pixels for each new one; the edge goes on outwards."""
    beside = sources.floor()[:, None] + torch.arange(-1, 3, dtype=torch.float64)  # (new, 4)
    weights = kernel(sources[:, None] - beside)
    at = torch.minimum(beside.clamp(min=0), number(old) - 1)
    hit = at[..., None] == torch.arange(old, dtype=torch.float64)  # (new, 4, old)
    return (weights[..., None] * hit).sum(dim=1)


# ---- pictures -----------------------------------------------------------------------------------


def check_resize(preprocess: Preprocess) -> None:
    """Whether a graph can do what the preprocessing says."""
    if preprocess.resize != "none" and preprocess.interpolation not in FILTERS:
        raise InputError(
            f"Preprocessing inside the graph must have interpolation {' or '.join(FILTERS)}.",
            f"interpolation={show(preprocess.interpolation)}",
            "Leave out --with-preprocess: vt.Predictor then resizes the pictures.",
        )


class Levels(nn.Module):
    """8-bit pictures (B, h, w, C) of any size to the levels that the model sees, (B, C, H, W) as floats.

    What `Preprocess.pixels` does to an array: columns, then rows, with 8 bits in between. Pillow's weights
    have 22 bits behind the point, and float64 adds them up without loss: these are its levels, to the bit.
    torch rounds its weights to 16 bits: there they are within one level.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        check_resize(preprocess)
        self.preprocess = preprocess
        self.turns = preprocess.backend == "pillow" and rows_may_come_first()

    def forward(self, pictures: Tensor) -> Tensor:
        x = pictures.permute(0, 3, 1, 2)  # (B, C, h, w)
        if self.preprocess.resize == "none":
            return x.float()
        high, wide = (number(side, torch.int64) for side in x.shape[2:])
        h, w = self.resized(high, wide)
        down, across = (
            self.weights(*sides)
            for sides in zip(x.shape[2:], (high, wide), (h, w), self.preprocess.target, strict=True)
        )
        parts = x.double(), down, across.T.contiguous()
        if not self.turns:
            return columns_first(*parts).float()  # (B, C, H, W)
        tall = (h < high) & (high - h > 2 * (wide - w))
        if torch.compiler.is_exporting():  # both ways go into the graph
            return torch.cond(tall, rows_first, columns_first, parts).float()
        return (rows_first if tall else columns_first)(*parts).float()

    def resized(self, high: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Height and width after resizing, before the crop."""
        h, w = (number(side, torch.int64) for side in self.preprocess.before_crop)
        if self.preprocess.resize == "squash":
            return h, w
        short = torch.minimum(high, wide)
        return torch.where(high == short, h, h * high // short), torch.where(
            wide == short, w, w * wide // short
        )

    def weights(self, side: int, old: Tensor, new: Tensor, cut: int) -> Tensor:
        """M along one side, (cut, side): of the new pixels only those that the crop leaves.

        Args:
            side, old: the side of the picture, as a number and as a tensor.
            new: what it is resized to.
            cut: how much of that the model gets.
        """
        half = (new - cut).double() / 2
        first = half.floor() if self.preprocess.crop_rounding == "down" else half.round()  # half to even
        places = first + torch.arange(cut, dtype=torch.float64)
        exact = spread(places, side, old.double() / new.double(), *FILTERS[self.preprocess.interpolation])
        return (exact * 2**BITS).round() / 2**BITS


def rows_may_come_first() -> bool:
    """Whether Pillow resizes tall pictures by their rows first, as it does from version 13 on.

    That is where the height loses more than twice the pixels that the width does. It changes levels:
    in between they are rounded and cut off at 0 and 255.
    """
    import PIL

    return int(PIL.__version__.split(".")[0]) >= 13


def columns_first(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    return rounded(down @ rounded(x @ across))


def rows_first(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    return rounded(rounded(down @ x) @ across)


def rounded(x: Tensor) -> Tensor:
    return (x + 0.5).floor().clamp(0, 255)


class Normalise(nn.Module):
    """(level * scale - mean) / std, as `evaluation.forward.inputs_of`."""

    mean: Tensor
    std: Tensor

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.scale = preprocess.scale
        self.register_buffer("mean", torch.tensor(preprocess.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(preprocess.std).view(1, -1, 1, 1))

    def forward(self, levels: Tensor) -> Tensor:
        return (levels * self.scale - self.mean) / self.std
