"""Counter-based random numbers: a number is a function of its keys, such as (seed, epoch, index, slot).

There is no generator with a state, so the numbers do not depend on the number of workers, on how a batch
is split, or on whether the run was interrupted: sample 17 of epoch 3 always gets the same ones. The hash
is SplitMix64 (Steele et al. 2014), in integers, so every device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer: 2^64 over the golden ratio
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Third keys, which keep the numbers of one sample apart by what they are for.
AUGMENT_STREAM, MIX_STREAM, CROP_STREAM = 1, 2, 3


def random_integers(keys: Sequence[int | Tensor], slots: int) -> Tensor:
    """Random int64 numbers: one row for each element of the keys, one column for each slot.

    Keys are integers, or tensors of integers that broadcast: (seed, epoch, indices).
    """
    x = torch.zeros((), dtype=torch.int64)
    for key in keys:
        key = key if isinstance(key, Tensor) else torch.tensor(key)
        x = _mix_bits((x.to(key.device) ^ key.to(torch.int64)) + _GOLDEN)
    steps = torch.arange(1, slots + 1, device=x.device) * _GOLDEN
    return _mix_bits(x[..., None] + steps)


def random_uniform(keys: Sequence[int | Tensor], slots: int) -> Tensor:
    """Random numbers uniform in [0, 1): float32 with 24 random bits."""
    return _shift_right(random_integers(keys, slots), 40).to(torch.float32) / (1 << 24)


def random_permutation(keys: Sequence[int | Tensor], count: int) -> Tensor:
    """The integers from 0 to count - 1 in random order (int64)."""
    sort_keys = random_integers([*keys, torch.arange(count)], 1)[:, 0]
    return sort_keys.sort(stable=True).indices


def _mix_bits(x: Tensor) -> Tensor:
    """SplitMix64's finalizer: every bit of the result depends on every bit of x (int64)."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift is arithmetic and repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
