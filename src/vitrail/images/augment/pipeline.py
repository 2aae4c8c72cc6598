"""Data augmentation of a batch, on the device the batch is on.

What happens to a sample is a function of (seed, epoch, its index), see `rng`: the augmented image does not
depend on workers, ranks, gradient accumulation or restarts. The order is always:

1. geometry: random resized crop, flip, shear, rotation, zoom, translation, then the geometric operations
   of the policy, as one matrix and one bilinear sampling. A policy works in pixels of the output. Outside
   the image its border is repeated. Downsampling by more than 2 samples a finer grid and averages it.
2. pixel values: posterize, solarize, autocontrast and equalize of the policy, as one lookup table per
   channel; then its sharpness.
3. color: the policy's, then brightness, contrast, saturation, hue and grayscale, as one matrix and one
   offset. Saturation, hue and grayscale apply to images with three channels.
4. random erasing: a box is set to mid gray.

Nothing here sums in an order that depends on the batch, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.fields import Config, choice, documented, integer, number
from vitrail.images.augment.color import adjust_colors
from vitrail.images.augment.per_sample import expand_to, interval_mask
from vitrail.images.augment.randaugment import (
    MAX_MAGNITUDE,
    NUMBERS,
    Operation,
    apply_pixel_operations,
    sample_operations,
    sharpen,
)
from vitrail.images.crop import CROP_NUMBERS, place_crop, propose_crops
from vitrail.images.rng import AUGMENT_STREAM, CROP_STREAM, random_uniform

_UNUSED = 4  # columns of random numbers that nothing uses, so that recorded runs stay reproducible
_NAMES = (
    *("flip", "rotate", "translate_x", "translate_y", "zoom", "shear_x", "shear_y"),
    *("brightness", "contrast", "saturation", "hue", "gray"),
    *("erase", "erase_area", "erase_ratio", "erase_left", "erase_top"),
)
_MAX_OPERATIONS = 14
_MIN_ERASED, _MAX_ERASED_RATIO = 0.02, 3.3  # fraction of the area; aspect ratio (Zhong et al. 2017)
_MID_GRAY = 0.5


def _up_to(doc: str, most: float = 1.0) -> Any:
    return number(doc, f"from 0 to {most:g}", lambda x: 0 <= x <= most, 0.0)


@documented
@dataclass(frozen=True, kw_only=True)
class Augment(Config):
    """Data augmentation for training. Everything is off by default."""

    # ---- geometry
    crop: float | None = number(
        "Random resized crop: the smallest fraction of the area that a crop covers; None is no crop",
        *("above 0 and at most 1", lambda a: 0 < a <= 1),
        default=None,
    )
    crop_ratio: float = number(
        "The largest aspect ratio of a crop; the smallest is its reciprocal",
        *("from 1 to 10", lambda r: 1 <= r <= 10),
        default=4 / 3,
    )
    flip: float = _up_to("Probability of a horizontal flip")
    rotate: float = _up_to("The largest rotation in either direction, in degrees", 180)
    translate: float = _up_to("The largest translation along each axis, as a fraction of the side")
    zoom: float = number(
        "The largest scale factor; 1.1 samples from 1/1.1 to 1.1", "from 1 to 10", lambda z: 1 <= z <= 10, 1.0
    )
    shear: float = _up_to("The largest shear along each axis, in degrees", 80)

    # ---- color
    brightness: float = _up_to("0.4 multiplies pixel values by 0.6 to 1.4")
    contrast: float = _up_to("0.4 multiplies differences from the mean gray of the image by 0.6 to 1.4")
    saturation: float = _up_to("0.4 multiplies differences from the gray value of the pixel by 0.6 to 1.4")
    hue: float = _up_to("The largest hue rotation in either direction, as a fraction of the full circle", 0.5)
    gray: float = _up_to("Probability of conversion to grayscale")

    # ---- policy
    policy: Literal["none", "randaugment", "trivialaugment"] = choice(
        "Random operations from a list of 14: policy_ops of them with policy_magnitude (randaugment), "
        "or one with a random magnitude from wider ranges (trivialaugment)",
        default="none",
        aliases={"trivial": "trivialaugment"},
    )
    policy_ops: int = integer("Operations per image of RandAugment", most=_MAX_OPERATIONS, default=2)
    policy_magnitude: int = integer(
        "Magnitude of RandAugment, from 0 to 30", least=0, most=MAX_MAGNITUDE, default=9
    )

    # ---- random erasing
    erase: float = _up_to("Probability that a box is erased")
    erase_area: float = number(
        "The largest fraction of the area that is erased",
        *(f"from {_MIN_ERASED} to 1", lambda a: _MIN_ERASED <= a <= 1),
        default=1 / 3,
    )

    @property
    def has_affine(self) -> bool:
        """Whether the geometry changes by more than a flip, the policy aside."""
        return self.crop is not None or self.zoom > 1 or any((self.rotate, self.translate, self.shear))

    @property
    def has_color(self) -> bool:
        return any((self.brightness, self.contrast, self.saturation, self.hue, self.gray))

    @property
    def operations(self) -> int:
        """How many operations of the policy each image gets."""
        return {"none": 0, "randaugment": self.policy_ops, "trivialaugment": 1}[self.policy]


Numbers = Mapping[str, Tensor]
"""The random numbers of the samples, uniform in [0, 1), (B,) float64 for each name; `crop` has
CROP_NUMBERS columns."""


def augment_batch(
    images: Tensor,
    indices: Tensor,
    settings: Augment,
    *,
    seed: int,
    epoch: int | Tensor,
    size: tuple[int, int],
) -> Tensor:
    """The augmented images, float32 (B, C, *size) with values from 0 to 1, on the device of `images`.

    Args:
        images: (B, C, H, W), uint8, or floating point with values from 0 to 1.
        indices: (B,) int64, the index of each sample in the data set. The random parameters are computed
            on the device of the indices, in float64; on the CPU they are the same for every device.
        size: (height, width) of the output. An image of that size without geometric changes keeps its bits.
    """
    x = images.to(torch.float32) / 255 if images.dtype == torch.uint8 else images.to(torch.float32)
    numbers, operations = draw_parameters(indices, settings, seed, epoch, size)
    x = _warp(x, numbers, operations, settings, size)
    if operations:
        factor = reduce(torch.mul, [1 + operation.amount("sharpness") for operation in operations])
        x = sharpen(apply_pixel_operations(x, operations), factor)
    if operations or settings.has_color:
        x = adjust_colors(x, numbers, operations, settings)
    return _erase(x, numbers, settings) if settings.erase else x


def draw_parameters(
    indices: Tensor, settings: Augment, seed: int, epoch: int | Tensor, size: tuple[int, int]
) -> tuple[Numbers, list[Operation]]:
    """The random numbers of each sample, and its operations of the policy."""
    count = _UNUSED + len(_NAMES)
    columns = random_uniform(
        [seed, epoch, AUGMENT_STREAM, indices], count + NUMBERS * settings.operations
    ).double()
    numbers = dict(zip(_NAMES, columns[:, _UNUSED:count].unbind(1), strict=True))
    if settings.crop is not None:
        numbers["crop"] = crop_numbers(seed, epoch, indices)
    return numbers, sample_operations(columns[:, count:], settings, size)


def crop_numbers(seed: int, epoch: int | Tensor, indices: Tensor) -> Tensor:
    """The random numbers of each sample's crop, (B, CROP_NUMBERS): the same for files and for arrays."""
    return random_uniform([seed, epoch, CROP_STREAM, indices], CROP_NUMBERS)


def _uniform(numbers: Tensor, most: float | Tensor) -> Tensor:
    """Numbers uniform in [0, 1) scaled to [-most, most)."""
    return (2 * numbers - 1) * most


# ---- geometry -----------------------------------------------------------------------------------


def _warp(
    x: Tensor, numbers: Numbers, operations: list[Operation], settings: Augment, size: tuple[int, int]
) -> Tensor:
    """All geometric changes. Samples that have none, or only a flip, keep their bits."""
    H, W = x.shape[-2:]
    exact = tuple(size) == (H, W) and not settings.has_affine  # at least some samples need no sampling
    unsampled = x
    if exact and settings.flip:
        unsampled = torch.where(expand_to(numbers["flip"] < settings.flip, x, 3), x.flip(-1), x)
    if exact and not operations:
        return unsampled
    matrix = affine_matrices(numbers, operations, settings, (H, W), size)
    sampled = resample(x, matrix, size, math.ceil(max(H / size[0], W / size[1]) * settings.zoom / 2))
    still = (matrix.abs() == torch.eye(3, device=matrix.device)).all(2).all(1)
    return torch.where(expand_to(still, x, 3), unsampled, sampled) if exact else sampled


def affine_matrices(
    numbers: Numbers,
    operations: list[Operation],
    settings: Augment,
    source: tuple[int, int],
    size: tuple[int, int],
) -> Tensor:
    """(B, 3, 3), from (x, y, 1) in the output to the image: in pixels, from the center of each."""
    (H, W), (h, w) = source, size
    box_h, box_w, center_y, center_x = _crop_boxes(numbers, settings, H, W)
    mirror = torch.where(numbers["flip"] < settings.flip, -1.0, 1.0)
    shear_x, shear_y = (
        _uniform(numbers[name], math.radians(settings.shear)).tan() for name in ("shear_x", "shear_y")
    )
    angle = _uniform(numbers["rotate"], math.radians(settings.rotate))
    scale = _uniform(numbers["zoom"], math.log(settings.zoom)).exp()
    cos, sin = angle.cos() / scale, angle.sin() / scale
    across = _uniform(numbers["translate_x"], settings.translate * w)
    down = _uniform(numbers["translate_y"], settings.translate * h)
    matrices = [
        _matrix(box_w / w, 0, center_x, 0, box_h / h, center_y),
        _matrix(mirror, 0, 0, 0, 1, 0),
        _matrix(1 + shear_x * shear_y, shear_x, 0, shear_y, 1, 0),
        _matrix(cos, -sin, 0, sin, cos, 0),
        _matrix(1, 0, -across, 0, 1, -down),
    ]
    for operation in operations:  # at most one of these amounts is not 0
        angle = operation.amount("rotate").deg2rad()
        shear_x, shear_y = operation.amount("shear-x"), operation.amount("shear-y")
        across = (
            shear_x * h / 2 - operation.amount("translate-x").trunc()
        )  # shear about the upper left corner
        down = shear_y * w / 2 - operation.amount("translate-y").trunc()
        cos, sin = angle.cos(), angle.sin()
        matrices.append(_matrix(cos, shear_x - sin, across, shear_y + sin, cos, down))
    return reduce(_multiply, matrices)


def _crop_boxes(
    numbers: Numbers, settings: Augment, height: int, width: int
) -> tuple[Tensor | float, Tensor | float, Tensor | float, Tensor | float]:
    """Height and width of each sample's crop, and its center, down and across, from that of the image."""
    if settings.crop is None:
        return torch.full_like(numbers["flip"], height), torch.full_like(numbers["flip"], width), 0.0, 0.0
    proposals = propose_crops(numbers["crop"], settings.crop, settings.crop_ratio)
    top, left, h, w = place_crop(proposals, height, width, settings.crop_ratio).double().unbind(1)
    return h, w, top + h / 2 - height / 2, left + w / 2 - width / 2


def _matrix(*entries: float | Tensor) -> Tensor:
    """A matrix for each sample, (B, 3, 3), from the entries of its first two rows; the third is 0, 0, 1."""
    like = next(entry for entry in entries if isinstance(entry, Tensor))
    all_nine = [torch.zeros_like(like) + entry for entry in (*entries, 0, 0, 1)]
    return torch.stack(all_nine, dim=1).unflatten(1, (3, 3))


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a b, written out: the rounding of a matrix product may depend on the size of the batch."""
    return a[:, :, :1] * b[:, :1] + a[:, :, 1:2] * b[:, 1:2] + a[:, :, 2:] * b[:, 2:]


def resample(x: Tensor, matrix: Tensor, size: tuple[int, int], finer: int = 1) -> Tensor:
    """The images sampled at the points of the matrices, `finer` points per output pixel along each axis."""
    (H, W), (h, w) = x.shape[-2:], size
    across = (torch.arange(w * finer, device=x.device) + 0.5) / finer - w / 2
    down = (torch.arange(h * finer, device=x.device)[:, None] + 0.5) / finer - h / 2
    # grid_sample has coordinates from -1 to 1.
    to_x, to_y = (expand_to(matrix[:, row] * (2 / side), x) for row, side in ((0, W), (1, H)))
    grid = [row[:, :1, None] * across + row[:, 1:2, None] * down + row[:, 2:, None] for row in (to_x, to_y)]
    sampled = F.grid_sample(x, torch.stack(grid, dim=-1), padding_mode="border", align_corners=False)
    return F.avg_pool2d(sampled, finer) if finer > 1 else sampled


# ---- random erasing -----------------------------------------------------------------------------


def _erase(x: Tensor, numbers: Numbers, settings: Augment) -> Tensor:
    """Set a box to mid gray, in the samples selected for it."""
    H, W = x.shape[-2:]
    area = _MIN_ERASED + numbers["erase_area"] * (settings.erase_area - _MIN_ERASED)
    limit = (-area.log()).clamp(max=math.log(_MAX_ERASED_RATIO))  # a wider box would not fit
    ratio = _uniform(numbers["erase_ratio"], limit).exp()
    masks = []
    for side, fraction, name in (
        (H, (area / ratio).sqrt(), "erase_top"),
        (W, (area * ratio).sqrt(), "erase_left"),
    ):
        length = (fraction * side).round().clamp(1, side)
        start = (numbers[name] * (side - length + 1)).floor()
        masks.append(interval_mask(start, start + length, side, x))
    selected = expand_to(numbers["erase"] < settings.erase, x, 3)
    return torch.where(masks[0][:, None, :, None] & masks[1][:, None, None, :] & selected, _MID_GRAY, x)
