"""Batches in a fixed order: which pictures a step sees depends on the seed and the step, on nothing else.

A global batch is one row of indices. Ranks take consecutive parts of it, and accumulation cuts these
again, so that the pictures of a step are the same however many processes work on them. Files are
decoded by threads (Pillow lets go of the interpreter while it decodes), a few batches ahead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.data.chance import shuffle, uniform
from vitrail.data.decode import open_picture, quiet
from vitrail.data.sources import Split
from vitrail.errors import InputError, printable
from vitrail.preprocess import Preprocess, resized, upright

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from vitrail.data.augment import Augment

AHEAD = 3  # batches that are decoded before they are asked for

Policy = Literal["error", "skip", "warn"]


@dataclass(frozen=True)
class Batch:
    """Pictures of one step, or of a part of one."""

    indices: Tensor
    """(b,) their places in the split."""
    images: Tensor
    """(b, C, S, S) levels, uint8."""
    kept: Tensor
    """(b,) 1 where the picture could be read; a corrupt one is grey and counts for nothing."""


@dataclass
class Corrupt:
    """Files that could not be read, each named once, and what to do about them."""

    policy: Policy = "error"
    names: dict[str, str] = field(default_factory=dict)
    """Why, by name."""


def epoch_order(split: Split, *, seed: int, epoch: int, balanced: bool = False) -> Tensor:
    """The order in which an epoch sees the pictures.

    Balanced, every class comes equally often: rare ones again and again, frequent ones not all.
    """
    order = shuffle([seed, epoch], len(split))
    if not balanced:
        return order
    labels = torch.from_numpy(split.labels)[order]
    counts = labels.bincount()
    most = int(counts.max())
    pool = [order[labels == label] for label in range(len(counts)) if counts[label]]
    wide = torch.stack([one[torch.arange(most) % len(one)] for one in pool])  # (classes, most)
    return wide.T.flatten()[: len(order)]


def steps_in_epoch(count: int, batch: int) -> int:
    """Whole batches; what is left over comes in another epoch."""
    return max(1, count // batch)


def batch_indices(order: Tensor, step: int, batch: int) -> Tensor:
    """The global batch of a step of the epoch. A set smaller than a batch comes round again."""
    places = torch.arange(step * batch, (step + 1) * batch) % len(order)
    return order[places]


class Reader:
    """Reads pictures of a split as levels, all of one size.

    Args:
        size: (H, W) of what is read. Arrays keep the size they have.
        augment: where it has a random crop and the pictures are files, the crop is cut while
            decoding, from the picture's full resolution.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        *,
        augment: Augment | None = None,
        seed: int = 0,
        workers: int = 0,
        corrupt: Corrupt | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.split, self.preprocess, self.augment, self.seed = split, preprocess, augment, seed
        self.corrupt = Corrupt() if corrupt is None else corrupt
        self.pool = ThreadPoolExecutor(workers) if workers and split.paths is not None else None
        self.stored = None
        if split.images is not None:  # small sets stay on the device
            self.stored = torch.from_numpy(split.images).permute(0, 3, 1, 2).to(device)

    def batches(self, wanted: Iterator[tuple[int, Tensor]]) -> Iterator[Batch]:
        """A batch for each (epoch, indices), in their order, some decoded ahead."""
        if self.stored is not None:
            for _, indices in wanted:
                there = indices.to(self.stored.device)
                yield Batch(indices, self.stored[there], torch.ones(len(indices)))
            return
        waiting: deque[tuple[Tensor, list[Future[NDArray[np.uint8] | str]]]] = deque()
        for epoch, indices in wanted:
            chance = uniform([self.seed, epoch, indices, 1], 4).tolist()
            futures = [self.submit(*one) for one in zip(indices.tolist(), chance, strict=True)]
            waiting.append((indices, futures))
            if len(waiting) > AHEAD:
                yield self.collect(*waiting.popleft())
        while waiting:
            yield self.collect(*waiting.popleft())

    def submit(self, index: int, chance: list[float]) -> Future[NDArray[np.uint8] | str]:
        if self.pool is not None:
            return self.pool.submit(self.read, index, chance)
        done: Future[NDArray[np.uint8] | str] = Future()
        try:
            done.set_result(self.read(index, chance))
        except Exception as error:
            done.set_exception(error)
        return done

    def read(self, index: int, chance: list[float]) -> NDArray[np.uint8] | str:
        """One picture (H, W, C), or a part of it that four numbers of chance decide; the reason for one
        that cannot be read, if the policy allows it."""
        assert self.split.paths is not None
        try:
            with quiet():
                path = self.split.paths[index]
                if self.augment is None:
                    return self.preprocess.pixels(open_picture(path))
                if self.augment.crop is None:
                    H, W = self.preprocess.target
                    return self.preprocess.pixels(open_picture(path, (2 * H, 2 * W)))
                return read_part(path, self.preprocess, self.augment, chance)
        except (ValueError, OSError) as error:  # InputError is a ValueError; so is a name with a zero in it
            if self.corrupt.policy != "error":
                return printable(error)
            raise InputError(
                "Every picture must be readable.",
                f"{printable(self.split.paths[index])}: {printable(error, 400).rstrip('.')}",
                "Repair or remove it, or use --set corrupt=skip.",
            ) from error

    def collect(self, indices: Tensor, futures: list[Future[NDArray[np.uint8] | str]]) -> Batch:
        """A batch of what was read. Corrupt ones are named here: in the order of the run, not of threads."""
        arrays = [future.result() for future in futures]
        for index, found in zip(indices.tolist(), arrays, strict=True):
            if isinstance(found, str):
                self.corrupt.names.setdefault(printable(self.split.names[index]), found)
        H, W = self.preprocess.target
        grey = np.full((H, W, self.preprocess.channels), 128, dtype=np.uint8)
        images = np.stack([grey if isinstance(array, str) else array for array in arrays])
        kept = torch.tensor([0.0 if isinstance(array, str) else 1.0 for array in arrays])
        return Batch(indices, torch.from_numpy(images).permute(0, 3, 1, 2), kept)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def read_part(path: Path, preprocess: Preprocess, augment: Augment, chance: list[float]) -> NDArray[np.uint8]:
    """A random part of a picture file, resized (Szegedy et al. 2014).

    The part is drawn before the picture is decoded: a JPEG is decoded at the smallest size in which
    the part has as many pixels as it is to get. It is cut at whole pixels, and torch resizes it where it
    can, faster than Pillow. Not to the bit what Pillow would give, which training can do without.
    """
    H, W = preprocess.target

    def near(high: int, wide: int) -> tuple[int, int]:
        _, _, h, w = draw_box(high, wide, augment, chance)
        return math.ceil(H * high / h), math.ceil(W * wide / w)

    image = upright(open_picture(path, near), preprocess.channels)
    top, left, h, w = draw_box(image.height, image.width, augment, chance)
    first, upper = min(round(left), image.width - 1), min(round(top), image.height - 1)
    end, lower = max(round(left + w), first + 1), max(round(top + h), upper + 1)
    part = np.asarray(image.crop((first, upper, end, lower)))
    part = part.reshape(lower - upper, end - first, preprocess.channels)
    backend = "torch" if preprocess.interpolation in ("bilinear", "bicubic") else "pillow"
    return resized(part, H, W, preprocess.interpolation, backend)


def draw_box(
    high: int, wide: int, augment: Augment, chance: list[float]
) -> tuple[float, float, float, float]:
    """Top, left, height and width of a part, of random area and shape, of a picture."""
    assert augment.crop is not None
    area, shape, down, across = chance
    share = augment.crop + (1 - augment.crop) * area
    ratio = augment.crop_ratio ** (2 * shape - 1)  # as likely to be wide as to be high
    w = min(wide, (high * wide * share * ratio) ** 0.5)
    h = min(high, (high * wide * share / ratio) ** 0.5)
    return down * (high - h), across * (wide - w), h, w
