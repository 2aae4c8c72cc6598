"""Counter-based random numbers: a number is a function of its keys, such as (seed, epoch, index, slot).

There is no generator with a state, so the numbers do not depend on the number of workers, on how a batch
is split, or on whether the run was interrupted: sample 17 of epoch 3 always gets the same ones. The hash
is SplitMix64 (Steele et al. 2014), in integers, so every device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer: 2^64 over the golden ratio
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_64_BITS = (1 << 64) - 1

Bits = TypeVar("Bits", int, Tensor)
_offsets: dict[tuple[int, torch.device], Tensor] = {}  # the number added for each slot

# Third keys, which keep the numbers of one sample apart by what they are for.
AUGMENT_STREAM, MIX_STREAM, CROP_STREAM = 1, 2, 3


def random_integers(keys: Sequence[int | Tensor], slots: int) -> Tensor:
    """Random int64 numbers: one row for each element of the keys, one column for each slot.

    Keys are integers, or tensors of integers that broadcast: (seed, epoch, indices). Integers are hashed
    without a tensor, so nothing is copied to the device of the tensors.
    """
    x: Any = 0  # an integer until the first tensor
    for key in keys:
        key = key.to(torch.int64) if isinstance(key, Tensor) else key
        x = _mix_bits(_signed((x ^ key) + _GOLDEN))
    x = x if isinstance(x, Tensor) else torch.tensor(x)
    if (slots, x.device) not in _offsets:  # a table: torch.compile would multiply indices in 32 bits
        numbers = [_signed(slot * _GOLDEN) for slot in range(1, slots + 1)]
        _offsets[slots, x.device] = torch.tensor(numbers, dtype=torch.int64).to(x.device)
    return _mix_bits(x[..., None] + _offsets[slots, x.device])


def random_integer(keys: Sequence[int]) -> int:
    """One random integer, from -2^63 to 2^63 - 1: the number in the first slot of `random_integers`."""
    x = 0
    for key in keys:
        x = _mix_bits(_signed((x ^ key) + _GOLDEN))
    return _mix_bits(_signed(x + _GOLDEN))


def random_uniform(keys: Sequence[int | Tensor], slots: int) -> Tensor:
    """Random numbers uniform in [0, 1): float32 with 24 random bits."""
    return _shift_right(random_integers(keys, slots), 40).to(torch.float32) / (1 << 24)


def random_permutation(keys: Sequence[int | Tensor], count: int) -> Tensor:
    """The integers from 0 to count - 1 in random order (int64)."""
    sort_keys = random_integers([*keys, torch.arange(count)], 1)[:, 0]
    return sort_keys.sort(stable=True).indices


def _mix_bits(x: Bits) -> Bits:
    """SplitMix64's finalizer: every bit of the result depends on every bit of x (64 bits, signed)."""
    x = _signed((x ^ _shift_right(x, 30)) * _FIRST)
    x = _signed((x ^ _shift_right(x, 27)) * _SECOND)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Bits, bits: int) -> Bits:
    """Logical right shift; torch's own shift and Python's are arithmetic and repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: Bits) -> Bits:
    """A Python integer wrapped to 64 bits, as int64 tensors do by themselves."""
    return x if isinstance(x, Tensor) else ((x + (1 << 63)) & _64_BITS) - (1 << 63)
