"""Mixup and CutMix: both of a pair get the same parameters, however the batch is split."""

import math

import pytest
import torch

from vitrail.base.errors import ConfigError
from vitrail.images.augment.mixing import Mixing, beta, mix_batch, sample_mixing
from vitrail.images.rng import random_uniform

BOTH = Mixing(mixup=0.8, cutmix=1.0, probability=0.8)
SIZE = (20, 30)


def batch(count, channels=3, classes=7):
    targets = torch.rand(count, classes)
    return torch.rand(count, channels, *SIZE), targets / targets.sum(1, keepdim=True), torch.arange(count)


def run(images, targets, indices, settings, seed=0, epoch=0):
    return mix_batch(images, targets, indices, settings, seed=seed, epoch=epoch)


@pytest.mark.parametrize("settings", [Mixing(), Mixing(mixup=0.8, cutmix=1.0, probability=0)])
def test_no_mixing_is_the_identity(settings):
    images, targets, indices = batch(6)
    mixed, mixed_targets = run(images, targets, indices, settings)
    assert torch.equal(mixed, images)
    assert torch.equal(mixed_targets, targets)


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_a_pair_is_the_same_in_any_even_slice(channels):
    images, targets, _ = batch(24, channels)
    indices = torch.randperm(1000)[:24]
    batch_result = run(images, targets, indices, BOTH)
    orders = [torch.arange(a, b) for a, b in ((0, 2), (2, 12), (12, 24), (6, 8))]
    for order in [*orders, torch.tensor([10, 11, 2, 3, 20, 21])]:
        part = run(images[order], targets[order], indices[order], BOTH)
        assert torch.equal(part[0], batch_result[0][order])
        assert torch.equal(part[1], batch_result[1][order])


def test_weights_have_the_same_bits_in_any_slice():
    """A power would not: its rounding depends on the position in the batch."""
    quantiles = random_uniform([0, torch.arange(300)], 1)[:, 0].double()
    for alpha in (0.2, 0.8, 3.0):
        batch_result = beta(quantiles, alpha)
        for first in range(9):
            for end in range(first + 1, first + 40):
                assert torch.equal(beta(quantiles[first:end].clone(), alpha), batch_result[first:end])


def test_seed_epoch_and_pair_change_the_result():
    images, targets, indices = batch(40)
    images, targets, always = images[:2].repeat(20, 1, 1, 1), targets[:2].repeat(20, 1), Mixing(mixup=1.0)
    one = run(images, targets, indices, always)[0]
    others = [
        run(images, targets, indices, always, seed=1)[0],
        run(images, targets, indices, always, epoch=1)[0],
        run(images, targets, indices + 40, always)[0],
        one.roll(2, 0),
    ]
    for other in others:
        assert (one != other).flatten(1).any(1).all()


def test_the_sum_of_the_targets_stays():
    images, targets, indices = batch(200)
    _, mixed_targets = run(images, targets, indices, BOTH)
    assert torch.allclose(mixed_targets.sum(1), torch.ones(200), atol=1e-6)
    many = (targets > 0.1).float()  # multi-label
    _, mixed_targets = run(images, many, indices, BOTH)
    pairs = many.unflatten(0, (100, 2)).sum(1)
    assert torch.allclose(mixed_targets.unflatten(0, (100, 2)).sum(1), pairs, atol=1e-6)
    assert not torch.equal(mixed_targets, many)


def test_mixup_is_symmetric_and_targets_follow():
    images, targets, indices = batch(40)
    mixed, mixed_targets = run(images, targets, indices, Mixing(mixup=0.8))
    own, _ = sample_mixing(indices[::2], Mixing(mixup=0.8), SIZE, 0, 0)
    assert own.unique().numel() == 20
    for pair, share in enumerate(own.float()):
        a, b = 2 * pair, 2 * pair + 1
        assert torch.allclose(mixed[a], share * images[a] + (1 - share) * images[b], atol=1e-6)
        assert torch.allclose(mixed[b], share * images[b] + (1 - share) * images[a], atol=1e-6)
        assert torch.allclose(mixed_targets[a], share * targets[a] + (1 - share) * targets[b], atol=1e-6)
        assert torch.allclose(mixed_targets[b], share * targets[b] + (1 - share) * targets[a], atol=1e-6)


def test_cutmix_pastes_one_box_in_both_and_weights_targets_by_its_area():
    count, (H, W) = 200, SIZE
    first = torch.tensor([0.0, 1.0]).repeat(count // 2)
    images = first[:, None, None, None].expand(count, 2, H, W)
    targets = torch.stack([1 - first, first], dim=1)
    mixed, mixed_targets = run(images, targets, torch.arange(count), Mixing(cutmix=1.0))
    assert set(mixed.unique().tolist()) == {0.0, 1.0}
    pasted = mixed[0::2, 0].bool()
    assert torch.equal(pasted, ~mixed[1::2, 0].bool())
    assert torch.equal(pasted, mixed[0::2, 1].bool())
    rows, columns, area = pasted.any(2).sum(1), pasted.any(1).sum(1), pasted.flatten(1).sum(1)
    assert torch.equal(rows * columns, area)  # a box
    share = area / (H * W)
    assert torch.allclose(mixed_targets[0::2], torch.stack([1 - share, share], dim=1), atol=1e-6)
    assert torch.allclose(mixed_targets[1::2], torch.stack([share, 1 - share], dim=1), atol=1e-6)


def test_boxes_match_torchvision():
    H, W = SIZE
    firsts = torch.arange(500)
    own, boxes = sample_mixing(firsts, Mixing(cutmix=1.0), SIZE, 3, 4)
    assert (own == 1).all()
    numbers = random_uniform([3, 4, 2, firsts], 5).double()
    for share, row, column, box in zip(numbers[:, 2], numbers[:, 3], numbers[:, 4], boxes, strict=True):
        half = 0.5 * math.sqrt(1 - share)  # with alpha = 1 the quantile is lambda
        y, x, down, across = int(row * H), int(column * W), int(half * H), int(half * W)
        assert box.tolist() == [max(y - down, 0), min(y + down, H), max(x - across, 0), min(x + across, W)]


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.8, 1.0, 4.0, 100.0])
def test_weights_have_the_moments_of_beta(alpha):
    """Mean 1/2, variance 1 / (4 (2a + 1)), fourth moment 3 (1 / 16) / ((2a + 1)(2a + 3)): both exact."""
    uniform = (torch.arange(200_000).double() + 0.5) / 200_000
    x = beta(uniform, alpha) - 0.5
    assert abs(x.mean()) < 1e-9
    assert x.square().mean() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=1e-4)
    assert x.pow(4).mean() == pytest.approx(3 / 16 / ((2 * alpha + 1) * (2 * alpha + 3)), rel=1e-3)
    assert (x.diff() >= 0).all()
    assert x.abs().max() <= 0.5


def test_beta_of_1_is_uniform_and_of_a_half_the_arcsine():
    uniform = (torch.arange(1000).double() + 0.5) / 1000
    assert torch.allclose(beta(uniform, 1.0), uniform, atol=1e-12)
    assert torch.allclose(beta(uniform, 0.5), (uniform * math.pi / 2).sin().square(), atol=1e-6)
    ends = beta(torch.tensor([0.0, 0.5, 1.0]).double(), 0.3)
    assert ends.tolist() == pytest.approx([0, 0.5, 1])


def test_sampled_weights_are_beta():
    own, _ = sample_mixing(torch.arange(0, 100_000, 2), Mixing(mixup=0.2), SIZE, 0, 0)
    assert abs(own.mean() - 0.5) < 5 * math.sqrt(1 / 5.6 / 50_000)
    assert abs(own.var() - 1 / 5.6) < 0.003


def test_probabilities_of_mixing_and_of_cutmix():
    firsts, count = torch.arange(0, 40_000, 2), 20_000
    settings = Mixing(mixup=1.0, cutmix=1.0, probability=0.7, cutmix_probability=0.2)
    own, boxes = sample_mixing(firsts, settings, (200, 200), 0, 0)
    cut = ((boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2])).double().mean()
    mixed = (own < 1).double().mean()
    assert abs(mixed - 0.7 * 0.8) < 5 * math.sqrt(0.25 / count)
    assert abs(cut - 0.7 * 0.2) < 0.015


def test_an_empty_batch_and_half_precision():
    images, targets, indices = batch(4)
    assert run(images[:0], targets[:0], indices[:0], BOTH)[0].shape == (0, 3, *SIZE)
    mixed, mixed_targets = run(images.bfloat16(), targets, indices, Mixing(mixup=1.0))
    assert mixed.dtype == torch.bfloat16
    assert mixed_targets.dtype == torch.float32
    wide = torch.zeros(40, 1, 1, 1000, dtype=torch.bfloat16)  # which has no 999
    wide[1::2] = 1
    pasted = run(wide, wide[:, 0, 0, :1].float(), torch.arange(40), Mixing(cutmix=1.0))
    assert torch.allclose(pasted[0][0::2].float().mean((1, 2, 3)), pasted[1][0::2, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(mixup=-1), "mixup must be from 0 to 100, not -1"),
        (dict(cutmix=101), "cutmix must be from 0 to 100"),
        (dict(probability=1.1), "probability must be from 0 to 1"),
        (dict(cutmix_probability=-0.1), "cutmix_probability must be from 0 to 1"),
    ],
)
def test_invalid_settings(fields, message):
    with pytest.raises(ConfigError, match=message):
        Mixing(**fields)


IMAGES, TARGETS, INDICES = torch.zeros(2, 3, 4, 4), torch.zeros(2, 5), torch.arange(2)
