"""Whether two images are the same one, re-encoded, brightened or slightly cropped: by their pixels.

Features find images that show the same thing; that they are the same image only pixels tell. Gray thumbnails
are compared by their correlation, which does not change with brightness and contrast, as a whole and with one
of the two cropped to the center or to a corner.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 40  # pixels of a thumbnail
_COMPARED = 24  # pixels of what is compared
_CROPS = (0.92, 0.84, 0.76)  # sides, as fractions
_WORTH_CROPPING = 0.5  # the correlation of the whole images below which crops are not tried
_MIN_SPREAD = 1e-3  # of a thumbnail; below, it is of one color and like any other
_BLOCK = 4096  # pairs at a time


def thumbnails(images: Tensor) -> Tensor:
    """Gray thumbnails (B, 1, SIDE, SIDE) of normalized images (B, C, H, W)."""
    gray = images.float().mean(dim=1, keepdim=True)
    return F.interpolate(gray, (SIDE, SIDE), mode="bilinear", antialias=True)


def correlations(images: Tensor, pairs: Tensor) -> Tensor:
    """The largest correlation of each pair (P, 2) of thumbnails, over crops of either: (P,)."""
    return torch.cat([_compare(*images[block.T]) for block in pairs.split(_BLOCK)] or [torch.zeros(0)])


def _compare(first: Tensor, second: Tensor) -> Tensor:
    whole = [_unit(_resize(one.float())) for one in (first, second)]
    best = (whole[0] * whole[1]).sum(dim=1)
    rows = torch.nonzero(best > _WORTH_CROPPING)[:, 0]
    for top, left, side in _boxes():
        for one, other in ((first, whole[1]), (second, whole[0])):
            crop = one[rows, :, top : top + side, left : left + side].float()
            found = (_unit(_resize(crop)) * other[rows]).sum(dim=1)
            best[rows] = torch.maximum(best[rows], found)
    return best


def _boxes() -> Iterator[tuple[int, int, int]]:
    for fraction in _CROPS:
        side = round(fraction * SIDE)
        rest = SIDE - side
        yield from ((top, left, side) for top, left in ((rest // 2, rest // 2), (0, 0), (0, rest), (rest, 0)))
        yield rest, rest, side


def _resize(images: Tensor) -> Tensor:
    return F.interpolate(images, (_COMPARED, _COMPARED), mode="bilinear", antialias=True)


def _unit(images: Tensor) -> Tensor:
    """Rows of mean 0 and length 1; zeros for an image of one color."""
    rows = images.flatten(1)
    rows = rows - rows.mean(dim=1, keepdim=True)
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length > _MIN_SPREAD * _COMPARED, rows / length.clamp(min=1e-12), 0.0)
