"""What the lab `towers` shows and says: pictures put together from digits, and texts that describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = ("on the left", "on the right", "at the top", "at the bottom")
SIZES = ("small", "large")


@dataclass(frozen=True)
class Kind:
    """What a picture shows."""

    digit: int
    place: int
    size: int

    @property
    def text(self) -> str:
        return f"a {SIZES[self.size]} {DIGITS[self.digit]} {PLACES[self.place]}"

    @property
    def new(self) -> bool:
        """Whether it is kept from training: each digit is never seen at one of the places, in any size.

        Every digit is seen at three places, and every place with seven digits or eight.
        """
        return (self.digit + self.place) % len(PLACES) == 0


KINDS = [Kind(d, p, s) for d in range(10) for p in range(len(PLACES)) for s in range(len(SIZES))]
NEW = torch.tensor([kind.new for kind in KINDS])


def check_digits(data: Dataset) -> None:
    if data.train.images is None or data.channels != 1 or len(data.classes) != 10 or data.several:
        raise InputError(
            "This lab takes the ten digits as grey pictures in arrays, or recordings of them.",
            f"{len(data.classes)} classes with {data.channels or 'files of any'} channel(s)",
            "Give MNIST as IDX files, or leave --data out.",
        )
    for split in (data.train, data.held_out):
        lacking = sorted(set(range(10)) - set(split.labels.tolist()))
        if lacking:
            raise InputError(
                "Every digit must be there, to learn from and to judge by.",
                f"none of {', '.join(map(str, lacking))} in one of the two",
                "Add some.",
            )


class Drawn:
    """A split to draw from by digit, from -1 to 1."""

    def __init__(self, split: Split) -> None:
        assert split.images is not None
        self.images = torch.from_numpy(split.images).permute(0, 3, 1, 2).float() / 127.5 - 1  # (N, 1, H, W)
        self.labels = torch.from_numpy(split.labels)
        self.places = [torch.nonzero(self.labels == digit)[:, 0] for digit in range(10)]

    def draw(self, digits: Tensor, chance: torch.Generator) -> Tensor:
        """A picture of each digit, by chance."""
        share = torch.rand(len(digits), generator=chance).tolist()
        own = [self.places[digit] for digit in digits.tolist()]
        return self.images[
            torch.stack([some[int(x * len(some))] for some, x in zip(own, share, strict=True)])
        ]


def digit_of(kinds: Tensor) -> Tensor:
    return kinds // (len(PLACES) * len(SIZES))


def small_side(split: Split) -> int:
    """Of a small digit: 8 of the smallest pictures' pixels, half the side of larger ones."""
    assert split.images is not None
    side = split.images.shape[1]
    return 8 if side < 16 else side // 4 * 2


def resized(pictures: Tensor, side: int) -> Tensor:
    return F.interpolate(pictures, (side, side), mode="bilinear", antialias=True)


def compose(pictures: Tensor, kinds: Tensor, small: int, chance: torch.Generator) -> Tensor:
    """Each digit at its place on a dark ground, a pixel or so off: (B, 1, 3 small, 3 small)."""
    ground = torch.full((len(kinds), 1, 3 * small, 3 * small), -1.0)
    sizes = [resized(pictures, (1 + size) * small) for size in range(len(SIZES))]
    off = torch.randint(-(small // 8), small // 8 + 1, (len(kinds), 2), generator=chance).tolist()
    for n, number in enumerate(kinds.tolist()):
        kind = KINDS[number]
        digit = sizes[kind.size][n]
        room = 3 * small - digit.shape[-1]
        place = PLACES[kind.place].split()[-1]
        left = {"left": 0, "right": room}.get(place, room // 2) + off[n][0]
        top = {"top": 0, "bottom": room}.get(place, room // 2) + off[n][1]
        left, top = min(max(left, 0), room), min(max(top, 0), room)
        ground[n, :, top : top + digit.shape[1], left : left + digit.shape[2]] = digit
    return ground


def shifted(pictures: Tensor, chance: torch.Generator) -> Tensor:
    """Spectrograms a little earlier or later, higher or lower: no word is said twice alike."""
    padded = F.pad(pictures, (6, 6, 3, 3), value=-1.0)
    H, W = pictures.shape[2:]
    tops, lefts = (
        torch.randint(2 * most + 1, (len(pictures),), generator=chance).tolist() for most in (3, 6)
    )
    cut = [one[:, top : top + H, left : left + W] for one, top, left in zip(padded, tops, lefts, strict=True)]
    return torch.stack(cut)


def spell(texts: Sequence[str]) -> Tensor:
    """Characters as numbers, 0 for a space and for what is behind the end: (texts, length)."""
    length = max(map(len, texts))
    return torch.tensor([[max(0, ord(c) - ord("a") + 1) for c in text.ljust(length)] for text in texts])


def codes() -> list[str]:
    """Letters by chance for every text, as long: names that say nothing about what they are parts of."""
    chance = np.random.default_rng(0)
    return ["".join(chance.choice(list("abcdefghijklmnopqrstuvwxyz"), len(kind.text))) for kind in KINDS]
