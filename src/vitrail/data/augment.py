"""Pictures changed at random for training: a batch at a time, on the device it lies on.

A sample's changes are a function of (seed, epoch, its index), see `chance`: the same picture comes
out whatever the workers, ranks, accumulation and restarts. Always in this order:

1. place: cropped, mirrored, sheared, turned, zoomed, shifted, then moved by the policy. All of it is
   one matrix and one bilinear sampling. A policy works in pixels of the output, and beyond a crop's
   edge it finds the rest of the picture. Outside the picture its border is repeated, which suits
   data of any kind. Shrunk by up to 2, a picture is sampled as it is; by more, at points closer
   together, which are then averaged.
2. level: posterize, solarize, autocontrast and equalize of a policy, as one table of 8-bit levels
   for each channel; then its sharpness, where several draws multiply.
3. colour: the policy's, then brightness, contrast, saturation, hue and grey: one matrix and one
   offset, cut to 0..1 once, at the end. Saturation, hue and grey are for three channels.
4. a box erased: set to mid grey.

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

from vitrail.data.chance import uniform
from vitrail.data.policy import LAST, Step, beside, draw_steps, map_levels, sharpen
from vitrail.errors import ConfigError, InputError
from vitrail.fields import Config, choice, number, whole

STREAM = 1  # apart from the numbers that other parts draw for the same sample
NAMES = (
    *("area", "ratio", "left", "top", "flip", "turn", "across", "down", "zoom", "shear_x", "shear_y"),
    *("brightness", "contrast", "saturation", "hue", "grey"),
    *("erase", "erase_area", "erase_ratio", "erase_left", "erase_top"),
)
MOST_STEPS = 14

LEAST_ERASED, WIDEST_ERASED = 0.02, 3.3  # of the area; of one side over the other (Zhong et al. 2017)
MID_GREY = 0.5

GREY = [0.299, 0.587, 0.114]  # what red, green and blue add to it
YIQ = torch.tensor(  # grey and the plane of colours
    [GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]], dtype=torch.float64
)
QUARTER = torch.tensor([[0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64)  # from red towards green
TO_GREY = YIQ[:1].expand(3, 3)
TWIST = torch.linalg.inv(YIQ) @ QUARTER @ YIQ  # colours turned by 90 degrees, without their grey


def share(doc: str, most: float = 1.0) -> Any:
    return number(doc, f"from 0 to {most:g}", lambda x: 0 <= x <= most, 0.0)


@dataclass(frozen=True, kw_only=True)
class Augment(Config):
    """How training pictures are changed at random. Nothing is, unless asked for."""

    # ---- place
    crop: float | None = number(
        "The smallest share of the area that a random crop keeps; no crop when not given",
        *("above 0 and at most 1", lambda a: 0 < a <= 1),
        default=None,
    )
    crop_ratio: float = number(
        "The most that a crop is stretched, one side against the other",
        *("from 1 to 10", lambda r: 1 <= r <= 10),
        default=4 / 3,
    )
    flip: float = share("Probability that left and right change places")
    turn: float = share("The largest turn either way, in degrees", 180)
    shift: float = share("The largest shift along each axis, as a share of the side")
    zoom: float = number(
        "The largest zoom: 1.1 is from 1/1.1 to 1.1", "from 1 to 10", lambda z: 1 <= z <= 10, 1.0
    )
    shear: float = share("The largest shear along each axis, in degrees", 80)

    # ---- colour
    brightness: float = share("0.4: levels are multiplied with 0.6 to 1.4")
    contrast: float = share("0.4: distances from the picture's mean grey, with 0.6 to 1.4")
    saturation: float = share("0.4: distances from each pixel's grey, with 0.6 to 1.4")
    hue: float = share("The largest turn of the colours, as a share of the circle", 0.5)
    grey: float = share("Probability that the colours go")

    # ---- a policy
    policy: Literal["none", "randaugment", "trivial"] = choice(
        "Operations drawn from a list of 14: policy_count of them with policy_strength (RandAugment), "
        "or one with any strength in wider ranges (TrivialAugment)",
        default="none",
    )
    policy_count: int = whole("How many operations RandAugment draws", default=2)
    policy_strength: int = whole("How strong they are, from 0 to 30", least=0, default=9)

    # ---- erasing
    erase: float = share("Probability that a box is erased")
    erase_area: float = number(
        "The largest share of the area that is erased",
        *(f"from {LEAST_ERASED} to 1", lambda a: LEAST_ERASED <= a <= 1),
        default=1 / 3,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("policy_count", MOST_STEPS), ("policy_strength", LAST)):
            if (value := getattr(self, name)) > most:
                got = f"{name}={value}"
                raise ConfigError(f"{name} must be at most {most}.", got, f"Set {name} to {most} or less.")

    @property
    def moves(self) -> bool:
        """Whether the place changes by more than a flip, the policy aside."""
        return self.crop is not None or self.zoom > 1 or any((self.turn, self.shift, self.shear))

    @property
    def colours(self) -> bool:
        return any((self.brightness, self.contrast, self.saturation, self.hue, self.grey))

    @property
    def steps(self) -> int:
        """How many operations the policy draws for each picture."""
        return {"none": 0, "randaugment": self.policy_count, "trivial": 1}[self.policy]


Draws = Mapping[str, Tensor]  # for each of NAMES, the samples' numbers from 0 up to 1, (B,) float64


def augment(
    images: Tensor, indices: Tensor, settings: Augment, *, seed: int, epoch: int, size: tuple[int, int]
) -> Tensor:
    """The pictures changed as `settings` says, float32 (B, C, *size) from 0 to 1, on their device.

    Args:
        images: (B, C, H, W), levels from 0 to 255 (uint8) or from 0 to 1 (floats).
        indices: (B,) int64, which sample of the dataset each is. Best left on the CPU: parameters
            are made where they lie, in float64, and are then the same for every device.
        size: (height, width) of the output. A picture of that size that is not moved keeps its bits.
    """
    check(images, indices, size)
    x = images.to(torch.float32) / 255 if images.dtype == torch.uint8 else images.to(torch.float32)
    chance = uniform([seed, epoch, STREAM, indices], len(NAMES) + 3 * settings.steps).to(torch.float64)
    draws = dict(zip(NAMES, chance.unbind(1), strict=False))
    steps = draw_steps(chance[:, len(NAMES) :], settings, size)
    x = move(x, draws, steps, settings, size)
    if steps:
        x = sharpen(map_levels(x, steps), reduce(torch.mul, [1 + step.amount("sharpness") for step in steps]))
    if steps or settings.colours:
        x = recolour(x, draws, steps, settings)
    return erase(x, draws, settings) if settings.erase else x


def check(images: Tensor, indices: Tensor, size: tuple[int, int]) -> None:
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        must, got = "Pictures must be (B, C, H, W), uint8 or floats.", f"{images.dtype} {tuple(images.shape)}"
        raise InputError(must, got, "Stack them, with levels from 0 to 255 or from 0 to 1.")
    if indices.shape != images.shape[:1] or indices.dtype != torch.int64:
        must = f"Indices must be {len(images)} whole numbers (int64), one for each picture."
        got = f"{indices.dtype} {tuple(indices.shape)}"
        raise InputError(must, got, "Give each sample's place in the dataset.")
    if len(size) != 2 or min(*size, *images.shape[1:]) < 1:
        must, got = "Pictures must have pixels, before and after.", f"{tuple(images.shape)} to {size}"
        raise InputError(must, got, "Give size as (height, width), both at least 1.")


def even(draw: Tensor, most: float | Tensor) -> Tensor:
    """From -most to most."""
    return (2 * draw - 1) * most


# ---- place --------------------------------------------------------------------------------------


def move(x: Tensor, draws: Draws, steps: list[Step], settings: Augment, size: tuple[int, int]) -> Tensor:
    """Everything about place. Samples that stay where they are, or are only mirrored, keep their bits."""
    H, W = x.shape[-2:]
    exact = tuple(size) == (H, W) and not settings.moves  # some samples, if not all, need no sampling
    kept = x
    if exact and settings.flip:
        kept = torch.where(beside(draws["flip"] < settings.flip, x, 3), x.flip(-1), x)
    if exact and not steps:
        return kept
    matrix = places(draws, steps, settings, (H, W), size)
    moved = resample(x, matrix, size, math.ceil(max(H / size[0], W / size[1]) * settings.zoom / 2))
    still = (matrix.abs() == torch.eye(3, device=matrix.device)).all(2).all(1)
    return torch.where(beside(still, x, 3), kept, moved) if exact else moved


def places(
    draws: Draws, steps: list[Step], settings: Augment, source: tuple[int, int], size: tuple[int, int]
) -> Tensor:
    """From (x, y, 1) in the output to the picture, (B, 3, 3): in pixels, from the centre of each."""
    (H, W), (h, w) = source, size
    wide, high = crop_sides(draws, settings, (W / H) / (w / h))
    left, top = (draws["left"] - 0.5) * (1 - wide) * W, (draws["top"] - 0.5) * (1 - high) * H
    mirror = torch.where(draws["flip"] < settings.flip, -1.0, 1.0)
    skew_x, skew_y = (
        even(draws[name], math.radians(settings.shear)).tan() for name in ("shear_x", "shear_y")
    )
    turn, zoom = (
        even(draws["turn"], math.radians(settings.turn)),
        even(draws["zoom"], math.log(settings.zoom)),
    )
    cos, sin = turn.cos() / zoom.exp(), turn.sin() / zoom.exp()
    across, down = even(draws["across"], settings.shift * w), even(draws["down"], settings.shift * h)
    matrices = [
        rows(wide * W / w, 0, left, 0, high * H / h, top),
        rows(mirror, 0, 0, 0, 1, 0),
        rows(1 + skew_x * skew_y, skew_x, 0, skew_y, 1, 0),
        rows(cos, -sin, 0, sin, cos, 0),
        rows(1, 0, -across, 0, 1, -down),
    ]
    for step in steps:  # of what follows at most one is not 0
        turn, skew_x, skew_y = step.amount("turn").deg2rad(), step.amount("shear-x"), step.amount("shear-y")
        across = skew_x * h / 2 - step.amount("shift-x").trunc()  # sheared about the upper left corner
        down = skew_y * w / 2 - step.amount("shift-y").trunc()
        cos, sin = turn.cos(), turn.sin()
        matrices.append(rows(cos, skew_x - sin, across, skew_y + sin, cos, down))
    return reduce(chain, matrices)


def crop_sides(draws: Draws, settings: Augment, aspect: float) -> tuple[Tensor, Tensor]:
    """Width and height of the crop as shares of the picture, whose shape is `aspect` times the output's.

    The shape is drawn first, then the area, from `crop` to the largest that fits: no second tries.
    """
    if settings.crop is None:
        return torch.ones_like(draws["area"]), torch.ones_like(draws["area"])
    shape = even(draws["ratio"], math.log(settings.crop_ratio)).exp() / aspect
    most = torch.minimum(shape, 1 / shape)
    least = most.clamp(max=settings.crop)
    area = least + draws["area"] * (most - least)
    return (area * shape).sqrt(), (area / shape).sqrt()


def rows(*entries: float | Tensor) -> Tensor:
    """A matrix for each sample, (B, 3, 3), from the entries of its first two rows; the third is 0, 0, 1."""
    like = next(entry for entry in entries if isinstance(entry, Tensor))
    all_nine = [torch.zeros_like(like) + entry for entry in (*entries, 0, 0, 1)]
    return torch.stack(all_nine, dim=1).unflatten(1, (3, 3))


def chain(a: Tensor, b: Tensor) -> Tensor:
    """a b, written out: what a matrix product rounds may depend on the size of the batch."""
    return a[:, :, :1] * b[:, :1] + a[:, :, 1:2] * b[:, 1:2] + a[:, :, 2:] * b[:, 2:]


def resample(x: Tensor, matrix: Tensor, size: tuple[int, int], finer: int = 1) -> Tensor:
    """The picture at the places of the matrix, from `finer` times as many points along each axis."""
    (H, W), (h, w) = x.shape[-2:], size
    across = (torch.arange(w * finer, device=x.device) + 0.5) / finer - w / 2
    down = (torch.arange(h * finer, device=x.device)[:, None] + 0.5) / finer - h / 2
    to_x, to_y = beside(matrix[:, 0] * (2 / W), x), beside(matrix[:, 1] * (2 / H), x)  # grid_sample's -1..1
    grid = [one[:, :1, None] * across + one[:, 1:2, None] * down + one[:, 2:, None] for one in (to_x, to_y)]
    found = F.grid_sample(x, torch.stack(grid, dim=-1), padding_mode="border", align_corners=False)
    return F.avg_pool2d(found, finer) if finer > 1 else found


# ---- level and colour ---------------------------------------------------------------------------


def recolour(x: Tensor, draws: Draws, steps: list[Step], settings: Augment) -> Tensor:
    """All colour at once. Turning or weakening colours keeps each grey: one matrix, in any order.

    Brightness and contrast are gain * x + lift * the picture's mean grey.
    """
    names = ("brightness", "contrast", "saturation")
    factors = [[1 + step.amount(name) for name in names] for step in steps]
    factors += [[1 + even(draws[name], getattr(settings, name)) for name in names]]
    gain = strength = torch.ones_like(draws["hue"])
    lift = torch.zeros_like(gain)
    for brightness, contrast, saturation in factors:
        gain, lift, strength = gain * brightness, lift * brightness, strength * saturation
        gain, lift = gain * contrast, lift + (1 - contrast) * gain
    if x.shape[1] == 3:
        strength = torch.where(draws["grey"] < settings.grey, 0.0, strength)[:, None, None]
        turn = even(draws["hue"], 2 * math.pi * settings.hue)[:, None, None]
        grey, twist = (one.to(turn.device, non_blocking=True) for one in (TO_GREY, TWIST))
        chroma = torch.eye(3, device=turn.device) - grey
        matrix = grey + strength * (turn.cos() * chroma + turn.sin() * twist)
        red, green, blue = beside(matrix * gain[:, None, None], x, 2).unbind(2)  # (B, 3, 1, 1)
        out = (x[:, :1] * red).add_(x[:, 1:2] * green).add_(x[:, 2:] * blue)
    else:
        out = x * beside(gain, x, 3)
    if steps or settings.contrast:
        out += beside(lift, x, 3) * mean_grey(x)
    return out.clamp_(0, 1)


def mean_grey(x: Tensor) -> Tensor:
    """(B, 1, 1, 1), from sums in whole numbers: those do not depend on their order."""
    scale = 2**24 // x.shape[3]  # so that a row's sum is exact in float32
    sums = (x * scale).round_().sum(3).long().sum(2)  # (B, C)
    weights = GREY if x.shape[1] == 3 else [1 / x.shape[1]] * x.shape[1]
    channels = [weight * one for weight, one in zip(weights, sums.to(x.dtype).unbind(1), strict=True)]
    return sum(channels[1:], channels[0])[:, None, None, None] / (scale * x.shape[2] * x.shape[3])


# ---- erasing ------------------------------------------------------------------------------------


def erase(x: Tensor, draws: Draws, settings: Augment) -> Tensor:
    """A box of whole pixels set to mid grey, in the samples that drew it."""
    H, W = x.shape[-2:]
    area = LEAST_ERASED + draws["erase_area"] * (settings.erase_area - LEAST_ERASED)
    widest = (-area.log()).clamp(max=math.log(WIDEST_ERASED))  # wider than that it would not fit
    shape = even(draws["erase_ratio"], widest).exp()
    boxed = []
    for side, share, name in (
        (H, (area / shape).sqrt(), "erase_top"),
        (W, (area * shape).sqrt(), "erase_left"),
    ):
        length = (share * side).round().clamp(1, side)
        first = (draws[name] * (side - length + 1)).floor()
        boxed.append(inside(first, first + length, side, x))
    hit = (
        boxed[0][:, None, :, None]
        & boxed[1][:, None, None, :]
        & beside(draws["erase"] < settings.erase, x, 3)
    )
    return torch.where(hit, MID_GREY, x)


def inside(first: Tensor, end: Tensor, side: int, x: Tensor) -> Tensor:
    """Which pixels of a side lie from `first` up to, not including, `end`, (B, side)."""
    pixels = torch.arange(side, device=x.device)
    return (pixels >= beside(first.long(), x, 1)) & (pixels < beside(end.long(), x, 1))
