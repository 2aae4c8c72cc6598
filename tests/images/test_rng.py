"""Counter-based random numbers: functions of their keys, and of nothing else."""

import math

import torch

from vitrail.images.rng import (
    _mix_bits,
    random_integer,
    random_integers,
    random_permutation,
    random_uniform,
)


def splitmix64(state):
    """The published generator, in Python's integers."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def signed(x):
    return x - (1 << 64) if x >= 1 << 63 else x


def test_mixing_is_splitmix64():
    for seed in (0, 1, 1234567, (1 << 62) + 17):
        step = (seed + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        assert _mix_bits(torch.tensor(signed(step))).item() == signed(splitmix64(seed))


def test_the_same_sample_gets_the_same_numbers_in_any_batch():
    batch = random_uniform([7, 3, torch.arange(100)], 5)
    assert batch.shape == (100, 5)
    for part in (torch.tensor([17]), torch.tensor([99, 17, 3]), torch.arange(10, 20)):
        assert torch.equal(random_uniform([7, 3, part], 5), batch[part])
    assert torch.equal(random_uniform([7, 3, torch.arange(100)], 2), batch[:, :2])  # more slots change none


def test_keys_are_integers_or_tensors():
    """On a GPU the epoch is a tensor, so that a captured step can read it; seeds need no tensor at all."""
    for keys in ([7, 3, 2], [2**63 - 1, 0, 1], [0, 10**12, 5]):
        want = random_integers([torch.tensor(key) for key in keys], 3)
        assert torch.equal(random_integers(keys, 3), want)
        assert torch.equal(random_integers([keys[0], torch.tensor(keys[1]), keys[2]], 3), want)
        assert random_integer(keys) == want[0]


def test_seed_epoch_and_index_change_the_numbers():
    one = random_integers([0, 0, torch.arange(50)], 4)
    assert len(one.unique()) == one.numel()
    for keys in ([1, 0, torch.arange(50)], [0, 1, torch.arange(50)], [0, 0, torch.arange(50, 100)]):
        assert not (random_integers(keys, 4) == one).any()


def test_numbers_are_uniform_and_independent():
    """Moments and neighbors over 200,000 numbers: five standard errors."""
    x = random_uniform([0, 0, torch.arange(100_000)], 2).double()
    count = x.numel()
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.mean() - 0.5) < 5 * math.sqrt(1 / 12 / count)
    assert abs(x.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    for a, b in ((x[:, 0], x[:, 1]), (x[1:, 0], x[:-1, 0])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / math.sqrt(len(a))
    fractions = torch.histc(x, bins=64, min=0, max=1) / count
    assert (fractions * 64 - 1).abs().max() < 5 * math.sqrt(64 / count)


def test_a_permutation_has_every_index_once():
    order = random_permutation([0, 2], 1000)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, random_permutation([0, 2], 1000))
    assert not torch.equal(order, random_permutation([0, 3], 1000))
    assert (order == torch.arange(1000)).sum() < 10
