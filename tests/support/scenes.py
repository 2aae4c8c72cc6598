"""Images composed of digits, and captions that describe them: for a tiny CLIP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.images.formats.sources import Split

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_POSITIONS = ("on the left", "on the right", "at the top", "at the bottom")
_SIZES = ("small", "large")


@dataclass(frozen=True)
class Scene:
    """A digit of one of two sizes at one of four positions."""

    digit: int
    position: int
    size: int

    @property
    def caption(self) -> str:
        return f"a {_SIZES[self.size]} {_DIGITS[self.digit]} {_POSITIONS[self.position]}"

    @property
    def is_unseen(self) -> bool:
        """Whether the scene is excluded from training: each digit is never shown at one position.

        Every digit is shown at three positions, and every position with seven or eight digits.
        """
        return (self.digit + self.position) % len(_POSITIONS) == 0


SCENES = [Scene(d, p, s) for d in range(10) for p in range(len(_POSITIONS)) for s in range(len(_SIZES))]
UNSEEN = torch.tensor([scene.is_unseen for scene in SCENES])


class DigitSampler:
    """Random images of given digits from a split, with values from -1 to 1."""

    def __init__(self, split: Split) -> None:
        assert split.images is not None
        self.images = torch.from_numpy(split.images).permute(0, 3, 1, 2).float() / 127.5 - 1  # (N, 1, H, W)
        self.labels = torch.from_numpy(split.labels)
        self.indices_by_digit = [torch.nonzero(self.labels == digit)[:, 0] for digit in range(10)]

    def sample(self, digits: Tensor, rng: torch.Generator) -> Tensor:
        """A random image of each digit."""
        fractions = torch.rand(len(digits), generator=rng).tolist()
        candidates = [self.indices_by_digit[digit] for digit in digits.tolist()]
        return self.images[
            torch.stack(
                [indices[int(x * len(indices))] for indices, x in zip(candidates, fractions, strict=True)]
            )
        ]


def scene_digits(scenes: Tensor) -> Tensor:
    return scenes // (len(_POSITIONS) * len(_SIZES))


def small_digit_side(split: Split) -> int:
    """The side of a small digit: 8 pixels for tiny images, otherwise half the image, a multiple of 2."""
    assert split.images is not None
    side = split.images.shape[1]
    return 8 if side < 16 else side // 4 * 2


def resize_digits(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True)


def compose_scenes(images: Tensor, scenes: Tensor, small: int, rng: torch.Generator) -> Tensor:
    """Each digit at its position on black, with a small random offset: (B, 1, 3 small, 3 small)."""
    canvas = torch.full((len(scenes), 1, 3 * small, 3 * small), -1.0)
    sizes = [resize_digits(images, (1 + size) * small) for size in range(len(_SIZES))]
    offsets = torch.randint(-(small // 8), small // 8 + 1, (len(scenes), 2), generator=rng).tolist()
    for n, index in enumerate(scenes.tolist()):
        scene = SCENES[index]
        digit = sizes[scene.size][n]
        margin = 3 * small - digit.shape[-1]
        position = _POSITIONS[scene.position].split()[-1]
        left = {"left": 0, "right": margin}.get(position, margin // 2) + offsets[n][0]
        top = {"top": 0, "bottom": margin}.get(position, margin // 2) + offsets[n][1]
        left, top = min(max(left, 0), margin), min(max(top, 0), margin)
        canvas[n, :, top : top + digit.shape[1], left : left + digit.shape[2]] = digit
    return canvas
