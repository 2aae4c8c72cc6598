"""The order of an epoch: a function of (seed, epoch), evaluated for the images of one step at a time.

Below `LARGE` images it is a sorted list of random numbers. From there on it is a keyed permutation: no list,
no memory, and the next epoch costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError, setting
from vitrail.images.formats.lazy import LARGE
from vitrail.images.formats.sources import Split
from vitrail.images.rng import random_integer, random_permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BALANCED = 1 << 25  # images: balanced sampling needs their whole order in memory
GROUP = 16  # blocks that are shuffled together
_ROUNDS = 8


class Order(Protocol):
    """The images of an epoch: a tensor of indices, or something that computes them."""

    def __len__(self) -> int: ...
    def __getitem__(self, positions: Tensor, /) -> Tensor: ...


class KeyedPermutation:
    """A random order of the integers from 0 to count - 1, at any positions, without computing the others.

    A Feistel network permutes the smallest power of two that is large enough; numbers that are too large are
    permuted again until they fit, less than twice on average (Black and Rogaway 2002).

    Args:
        keys: other keys give another order.
    """

    def __init__(self, keys: Sequence[int], count: int) -> None:
        self.count = count
        bits = max(2, (count - 1).bit_length())
        self.low_bits = np.uint64(bits // 2)
        self.low, self.high = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
        numbers = [random_integer([*keys, number]) for number in range(_ROUNDS)]
        self.round_keys = [np.uint64(number & (2**64 - 1)) for number in numbers]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Tensor) -> Tensor:
        x = self._scramble(positions.numpy().astype(np.uint64))
        while len(outside := np.flatnonzero(x >= self.count)):
            x[outside] = self._scramble(x[outside])
        return torch.from_numpy(x.astype(np.int64))

    def _scramble(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = x & self.low, x >> self.low_bits
        for even, odd in zip(self.round_keys[::2], self.round_keys[1::2], strict=True):
            high ^= _mix_bits(low ^ even) & self.high
            low ^= _mix_bits(high ^ odd) & self.low
        return high << self.low_bits | low


def _mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, as in rng.py, on arrays of NumPy: faster for the few numbers of a step."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BlockOrder:
    """Blocks of consecutive images in random order, and the images of 16 blocks at a time in random order.

    So a disk or an object store reads long runs: an epoch reads each block once. The blocks start at another
    image in every epoch.
    """

    def __init__(self, keys: Sequence[int], count: int, block: int) -> None:
        self.keys, self.count, self.block = list(keys), count, min(block, count)
        self.whole = count // self.block * self.block  # the images in complete blocks; the others come last
        self.blocks = KeyedPermutation([*keys, 1], self.whole // self.block)
        self.start = (random_integer([*keys, 2]) & (2**62 - 1)) % count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Tensor) -> Tensor:
        rows = torch.empty_like(positions, dtype=torch.int64)
        size = self.block * GROUP
        groups = torch.where(positions < self.whole, positions // size, -1)  # -1: what is left
        for group in groups.unique().tolist():
            chosen = groups == group
            first = self.whole if group < 0 else group * size
            last = self.count if group < 0 else min(first + size, self.whole)
            inner = KeyedPermutation([*self.keys, 3, group], last - first)
            place = first + inner[positions[chosen] - first]
            if group >= 0:
                place = self.blocks[place // self.block] * self.block + place % self.block
            rows[chosen] = place
        return (rows + self.start) % self.count


def epoch_order(
    split: Split, *, seed: int, epoch: int, balanced_batch: int | None = None, block: int | None = None
) -> Order:
    """The order in which an epoch sees the images, as indices.

    Args:
        balanced_batch: every class comes equally often in each batch of this size: images of rare classes are
            repeated, and some of the frequent classes are omitted.
        block: shuffle blocks of this many consecutive images (`BlockOrder`).
    """
    if balanced_batch is not None:
        return _balanced(split, seed, epoch, balanced_batch)
    if block is not None:
        return BlockOrder([seed, epoch], len(split), block)
    if len(split) < LARGE:
        return random_permutation([seed, epoch], len(split))
    return KeyedPermutation([seed, epoch], len(split))


def _balanced(split: Split, seed: int, epoch: int, batch: int) -> Tensor:
    """One image of each class, again and again, in random order within a batch or, if that is more, a cycle.

    Mixup and cutmix mix neighbors: in the order of the cycle every class would have two partners at most.
    """
    if len(split) > MAX_BALANCED:
        raise InputError(
            f"sampling=balanced is for at most {MAX_BALANCED:,} images, and these are {len(split):,}; use "
            f"{setting('class_weights', 'balanced')}."
        )
    order = random_permutation([seed, epoch], len(split))
    labels = torch.from_numpy(split.labels).long()[order]
    counts = labels.bincount()
    largest = int(counts.max())
    by_class = [order[labels == label] for label in range(len(counts)) if counts[label]]
    repeated = torch.stack([indices[torch.arange(largest) % len(indices)] for indices in by_class])
    cycles = repeated.T.flatten()[: len(order)]  # (classes, largest) read by columns
    places = random_permutation([seed, epoch, 1], len(order))
    groups = places // max(batch, len(by_class))
    return cycles[places[groups.sort(stable=True).indices]]
