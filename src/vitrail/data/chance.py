"""Chance that can be asked again: a random number is a function of (seed, epoch, index, slot).

Nothing is drawn from a stream, so it does not matter who asks first, how many workers there are, how
a batch is cut up, or whether the run was stopped in between: sample 17 of epoch 3 gets the same
numbers. The mixing is that of SplitMix64 (Steele et al. 2014), in whole numbers, so that every
device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2^64 over the golden ratio
FIRST, SECOND = -4658895280553007687, -7723592293110705685  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finish: every bit of the result depends on every bit of x (int64)."""
    x = (x ^ shifted(x, 30)) * FIRST
    x = (x ^ shifted(x, 27)) * SECOND
    return x ^ shifted(x, 31)


def shifted(x: Tensor, places: int) -> Tensor:
    """x >> places without the sign: torch's own shift would fill up with it."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def numbers(keys: Sequence[int | Tensor], slots: int) -> Tensor:
    """Random whole numbers (int64): one row for each element of the keys, one column for each slot.

    Keys are whole numbers or tensors of them that broadcast: (seed, epoch, indices).
    """
    x = torch.zeros((), dtype=torch.int64)
    for key in keys:
        key = key if isinstance(key, Tensor) else torch.tensor(key)
        x = mix((x.to(key.device) ^ key.to(torch.int64)) + GOLDEN)
    steps = torch.arange(1, slots + 1, device=x.device) * GOLDEN
    return mix(x[..., None] + steps)


def uniform(keys: Sequence[int | Tensor], slots: int) -> Tensor:
    """Random numbers from 0 up to, not including, 1 (float32, 24 bits)."""
    return shifted(numbers(keys, slots), 40).to(torch.float32) / (1 << 24)


def shuffle(keys: Sequence[int | Tensor], count: int) -> Tensor:
    """The numbers from 0 to count - 1 in a random order (int64)."""
    keyed = numbers([*keys, torch.arange(count)], 1)[:, 0]
    return keyed.sort(stable=True).indices
