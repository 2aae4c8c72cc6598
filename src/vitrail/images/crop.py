"""Random resized crops for training (Szegedy et al. 2014), with the distribution of torchvision's
RandomResizedCrop: up to ten tries of a random area and aspect ratio, then the central crop.

The random numbers are an argument, so that a crop can be a function of (seed, epoch, index).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.images.decode import open_image
from vitrail.images.formats.packed import PackedImage
from vitrail.images.formats.stored_images import StoredImage
from vitrail.images.pixels import apply_orientation, resize_array

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from vitrail.images.preprocess import Preprocess

TRIES = 10
CROP_NUMBERS = 2 * TRIES + 2
"""Random numbers that a crop takes: an area and a ratio for each try, and the position."""

Box = tuple[int, int, int, int]  # top, left, height, width


def propose_crops(numbers: Tensor, min_area: float, max_ratio: float) -> Tensor:
    """The tries of random crops, for images of any size; `place_crop` makes boxes of them.

    A try is an area, uniform from `min_area` to 1 of the image, and the logarithm of width / height,
    uniform from -log(max_ratio) to log(max_ratio).

    Args:
        numbers: (..., CROP_NUMBERS), uniform in [0, 1).

    Returns:
        (..., TRIES + 1, 2) float64: height and width of each try, in units of the square root of the
        image's area; and last the position, down and across, as a fraction of the free space.
    """
    areas, ratios, position = numbers.double().split([TRIES, TRIES, 2], dim=-1)
    area = min_area + (1 - min_area) * areas
    ratio = ((2 * ratios - 1) * math.log(max_ratio)).exp()
    tries = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], dim=-1)  # (..., TRIES, 2)
    return torch.cat([tries, position[..., None, :]], dim=-2)


def place_crop(proposals: Tensor, height: int, width: int, max_ratio: float) -> Tensor:
    """The boxes of random crops in an image: (..., 4) int64, (top, left, height, width).

    The first try that fits into the image is taken. If none does, the box is the largest central one
    whose aspect ratio lies within the limits.
    """
    image = _pair(proposals, height, width)
    central = _pair(proposals, min(height, round(width * max_ratio)), min(width, round(height * max_ratio)))
    tries, position = proposals[..., :TRIES, :], proposals[..., TRIES, :]
    sides = (tries * math.sqrt(height * width)).round()
    sides = torch.cat([sides, central.expand_as(sides[..., :1, :])], dim=-2)  # (..., TRIES + 1, 2)
    fits = ((sides >= 1) & (sides <= image)).all(-1)
    first = fits.byte().argmax(-1)[..., None]  # of several maxima, the first
    box = sides.gather(-2, first[..., None].expand(*first.shape, 2)).squeeze(-2)
    free = image - box
    start = torch.where(first == TRIES, free / 2, position * (free + 1)).floor()
    return torch.cat([start, box], dim=-1).long()


def _pair(like: Tensor, height: int, width: int) -> Tensor:
    """(height, width) as a tensor; on a GPU without a copy from the host, which a CUDA graph refuses."""
    if like.is_cuda:
        return torch.stack([like.new_full((), height), like.new_full((), width)])
    return like.new_tensor([height, width])


def place_one_crop(
    proposals: Sequence[Sequence[float]], height: int, width: int, max_ratio: float, *, native: bool = False
) -> Box:
    """The box of one random crop: the same numbers as `place_crop`, without its dozen small tensors.

    Those took a quarter of the time of reading a JPEG of 500 x 375.

    Args:
        native: whether the ratios of the tries are those to the image's own, so that crops of wide images
            are wide.
    """
    unit = math.sqrt(height * width)
    tall, wide = (height, width) if native else (unit, unit)
    *tries, (down, across) = proposals
    for try_h, try_w in tries:
        h, w = round(try_h * tall), round(try_w * wide)
        if 1 <= h <= height and 1 <= w <= width:
            return math.floor(down * (height - h + 1)), math.floor(across * (width - w + 1)), h, w
    if native:
        return 0, 0, height, width
    h, w = min(height, round(width * max_ratio)), min(width, round(height * max_ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def read_crop(
    path: Path | StoredImage, preprocess: Preprocess, proposals: Sequence[Sequence[float]], max_ratio: float
) -> NDArray[np.uint8]:
    """A random crop of an image file as uint8 pixels (H, W, C) in the size that `preprocess` gives it.

    The box is placed by the size in the file's header. A JPEG is then decoded at the smallest scale at
    which the box has at least as many pixels as the output. torch resizes where it can, because it is
    faster than Pillow: for training, the pixels need not be the same to the bit.

    Args:
        proposals: TRIES + 1 pairs of numbers, see `propose_crops`.
    """
    native = preprocess.keeps_shape
    backend = "torch" if preprocess.interpolation in ("bilinear", "bicubic") else "pillow"
    if isinstance(path, PackedImage) and path.is_array and path.channels == preprocess.channels:
        top, left, h, w = place_one_crop(proposals, path.height, path.width, max_ratio, native=native)
        H, W = preprocess.crop_size(h, w)
        pixels = path.read_rows(top, h)[:, left : left + w]
        return resize_array(pixels, H, W, preprocess.interpolation, backend)
    placed: list[tuple[int, int, Box]] = []

    def min_size(height: int, width: int) -> tuple[int, int]:
        """Place the box in the upright image; return the smallest size at which that may be decoded."""
        top, left, h, w = place_one_crop(proposals, height, width, max_ratio, native=native)
        H, W = preprocess.crop_size(h, w)
        placed.append((height, width, (top, left, h, w)))
        return math.ceil(H * height / h), math.ceil(W * width / w)

    image = apply_orientation(open_image(path, min_size), preprocess.channels)
    if not placed:  # only JPEGs can be decoded smaller
        min_size(image.height, image.width)
    height, width, box = placed[0]
    H, W = preprocess.crop_size(*box[2:])
    top, left, h, w = _scale_box(box, (height, width), (image.height, image.width))
    pixels = np.asarray(image.crop((left, top, left + w, top + h))).reshape(h, w, preprocess.channels)
    return resize_array(pixels, H, W, preprocess.interpolation, backend)


def _scale_box(box: Box, old: tuple[int, int], new: tuple[int, int]) -> Box:
    """A box of an image of the size `old` in its copy of the size `new`, in whole pixels, never empty."""
    starts, sides = [], []
    for start, side, before, after in zip(box[:2], box[2:], old, new, strict=True):
        starts.append(min(round(start * after / before), after - 1))
        sides.append(max(1, round((start + side) * after / before) - starts[-1]))
    return starts[0], starts[1], sides[0], sides[1]
