"""Mixing: partners share what they get, whoever cuts the batch."""

import math

import pytest
import torch

from vitrail.data.chance import uniform
from vitrail.data.mixing import Mixing, beta, draw, mix
from vitrail.errors import ConfigError, InputError

BOTH = Mixing(mixup=0.8, cutmix=1.0, share=0.8)
SIZE = (20, 30)


def batch(count, channels=3, classes=7):
    targets = torch.rand(count, classes)
    return torch.rand(count, channels, *SIZE), targets / targets.sum(1, keepdim=True), torch.arange(count)


def run(images, targets, indices, settings, seed=0, epoch=0):
    return mix(images, targets, indices, settings, seed=seed, epoch=epoch)


@pytest.mark.parametrize("settings", [Mixing(), Mixing(mixup=0.8, cutmix=1.0, share=0)])
def test_off_is_identity(settings):
    images, targets, indices = batch(6)
    mixed, shares = run(images, targets, indices, settings)
    assert torch.equal(mixed, images)
    assert torch.equal(shares, targets)


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_a_pair_is_the_same_in_any_even_slice(channels):
    images, targets, _ = batch(24, channels)
    indices = torch.randperm(1000)[:24]
    whole = run(images, targets, indices, BOTH)
    orders = [torch.arange(a, b) for a, b in ((0, 2), (2, 12), (12, 24), (6, 8))]
    for order in [*orders, torch.tensor([10, 11, 2, 3, 20, 21])]:
        part = run(images[order], targets[order], indices[order], BOTH)
        assert torch.equal(part[0], whole[0][order])
        assert torch.equal(part[1], whole[1][order])


def test_shares_have_the_same_bits_in_any_slice():
    """A power would not: it is rounded differently in the last few of a batch."""
    quantiles = uniform([0, torch.arange(300)], 1)[:, 0].double()
    for alpha in (0.2, 0.8, 3.0):
        whole = beta(quantiles, alpha)
        for first in range(9):
            for end in range(first + 1, first + 40):
                assert torch.equal(beta(quantiles[first:end].clone(), alpha), whole[first:end])


def test_another_seed_epoch_or_pair_differs():
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


def test_targets_keep_their_sum():
    images, targets, indices = batch(200)
    _, shares = run(images, targets, indices, BOTH)
    assert torch.allclose(shares.sum(1), torch.ones(200), atol=1e-6)
    many = (targets > 0.1).float()  # several classes at once
    _, shares = run(images, many, indices, BOTH)
    pairs = many.unflatten(0, (100, 2)).sum(1)
    assert torch.allclose(shares.unflatten(0, (100, 2)).sum(1), pairs, atol=1e-6)
    assert not torch.equal(shares, many)


def test_mixup_is_symmetric_and_targets_follow():
    images, targets, indices = batch(40)
    mixed, shares = run(images, targets, indices, Mixing(mixup=0.8))
    own, _ = draw(indices[::2], Mixing(mixup=0.8), SIZE, 0, 0)
    assert own.unique().numel() == 20
    for pair, share in enumerate(own.float()):
        a, b = 2 * pair, 2 * pair + 1
        assert torch.allclose(mixed[a], share * images[a] + (1 - share) * images[b], atol=1e-6)
        assert torch.allclose(mixed[b], share * images[b] + (1 - share) * images[a], atol=1e-6)
        assert torch.allclose(shares[a], share * targets[a] + (1 - share) * targets[b], atol=1e-6)
        assert torch.allclose(shares[b], share * targets[b] + (1 - share) * targets[a], atol=1e-6)


def test_cutmix_pastes_one_box_for_both_and_targets_know_its_area():
    count, (H, W) = 200, SIZE
    first = torch.tensor([0.0, 1.0]).repeat(count // 2)
    images = first[:, None, None, None].expand(count, 2, H, W)
    targets = torch.stack([1 - first, first], dim=1)
    mixed, shares = run(images, targets, torch.arange(count), Mixing(cutmix=1.0))
    assert set(mixed.unique().tolist()) == {0.0, 1.0}
    pasted = mixed[0::2, 0].bool()
    assert torch.equal(pasted, ~mixed[1::2, 0].bool())
    assert torch.equal(pasted, mixed[0::2, 1].bool())
    rows, columns, area = pasted.any(2).sum(1), pasted.any(1).sum(1), pasted.flatten(1).sum(1)
    assert torch.equal(rows * columns, area)  # a box
    share = area / (H * W)
    assert torch.allclose(shares[0::2], torch.stack([1 - share, share], dim=1), atol=1e-6)
    assert torch.allclose(shares[1::2], torch.stack([share, 1 - share], dim=1), atol=1e-6)


def test_boxes_follow_the_rule_of_torchvision():
    H, W = SIZE
    firsts = torch.arange(500)
    own, boxes = draw(firsts, Mixing(cutmix=1.0), SIZE, 3, 4)
    assert (own == 1).all()
    chance = uniform([3, 4, 2, firsts], 5).double()
    for share, row, column, box in zip(chance[:, 2], chance[:, 3], chance[:, 4], boxes, strict=True):
        half = 0.5 * math.sqrt(1 - share)  # with alpha = 1 the quantile is the share
        y, x, down, across = int(row * H), int(column * W), int(half * H), int(half * W)
        assert box.tolist() == [max(y - down, 0), min(y + down, H), max(x - across, 0), min(x + across, W)]


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.8, 1.0, 4.0, 100.0])
def test_shares_have_the_moments_of_beta(alpha):
    """Mean 1/2, variance 1 / (4 (2a + 1)), fourth moment 3 (1 / 16) / ((2a + 1)(2a + 3)): both exact."""
    even = (torch.arange(200_000).double() + 0.5) / 200_000
    x = beta(even, alpha) - 0.5
    assert abs(x.mean()) < 1e-9
    assert x.square().mean() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=1e-4)
    assert x.pow(4).mean() == pytest.approx(3 / 16 / ((2 * alpha + 1) * (2 * alpha + 3)), rel=1e-3)
    assert (x.diff() >= 0).all()
    assert x.abs().max() <= 0.5


def test_beta_of_1_is_even_and_half_is_the_arcsine():
    even = (torch.arange(1000).double() + 0.5) / 1000
    assert torch.allclose(beta(even, 1.0), even, atol=1e-12)
    assert torch.allclose(beta(even, 0.5), (even * math.pi / 2).sin().square(), atol=1e-6)
    ends = beta(torch.tensor([0.0, 0.5, 1.0]).double(), 0.3)
    assert ends.tolist() == pytest.approx([0, 0.5, 1])


def test_shares_drawn_for_real_are_beta():
    own, _ = draw(torch.arange(0, 100_000, 2), Mixing(mixup=0.2), SIZE, 0, 0)
    assert abs(own.mean() - 0.5) < 5 * math.sqrt(1 / 5.6 / 50_000)
    assert abs(own.var() - 1 / 5.6) < 0.003


def test_rates_of_mixing_and_of_cutmix():
    firsts, count = torch.arange(0, 40_000, 2), 20_000
    settings = Mixing(mixup=1.0, cutmix=1.0, share=0.7, cutmix_share=0.2)
    own, boxes = draw(firsts, settings, (200, 200), 0, 0)
    cut = ((boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2])).double().mean()
    mixed = (own < 1).double().mean()
    assert abs(mixed - 0.7 * 0.8) < 5 * math.sqrt(0.25 / count)
    assert abs(cut - 0.7 * 0.2) < 0.015


def test_an_empty_batch_and_half_precision():
    images, targets, indices = batch(4)
    assert run(images[:0], targets[:0], indices[:0], BOTH)[0].shape == (0, 3, *SIZE)
    mixed, shares = run(images.bfloat16(), targets, indices, Mixing(mixup=1.0))
    assert mixed.dtype == torch.bfloat16
    assert shares.dtype == torch.float32
    wide = torch.zeros(40, 1, 1, 1000, dtype=torch.bfloat16)  # which has no 999
    wide[1::2] = 1
    pasted = run(wide, wide[:, 0, 0, :1].float(), torch.arange(40), Mixing(cutmix=1.0))
    assert torch.allclose(pasted[0][0::2].float().mean((1, 2, 3)), pasted[1][0::2, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(mixup=-1), "mixup must be from 0 to 100. Got mixup=-1. Set mixup to such a number."),
        (dict(cutmix=101), "cutmix must be from 0 to 100. Got cutmix=101. Set cutmix to such a number."),
        (dict(share=1.1), "share must be from 0 to 1. Got share=1.1. Set share to such a number."),
        (dict(cutmix_share=-0.1), "cutmix_share must be from 0 to 1. Got cutmix_share=-0.1. Set cutmix_share to such a number."),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(given, message):
    with pytest.raises(ConfigError) as caught:
        Mixing(**given)
    assert str(caught.value) == message


PICTURES, TARGETS, INDICES = torch.zeros(2, 3, 4, 4), torch.zeros(2, 5), torch.arange(2)


@pytest.mark.parametrize(
    ("images", "targets", "indices", "message"),
    [
        (PICTURES[0], TARGETS, INDICES, "Pictures must be (B, C, H, W), floats. Got torch.float32 (3, 4, 4). Mix them after augment."),
        (PICTURES.byte(), TARGETS, INDICES, "Pictures must be (B, C, H, W), floats. Got torch.uint8 (2, 3, 4, 4). Mix them after augment."),
        (PICTURES[:1], TARGETS[:1], INDICES[:1], "Pictures must come in pairs. Got 1 pictures. Use batches of an even size, and drop the odd one at the end."),
        (PICTURES, TARGETS[:, 0], INDICES, "Targets must be (2, K), floats. Got torch.float32 (2,). Give a share for each class: one_hot(labels, K).float()."),
        (PICTURES, TARGETS[:1], INDICES, "Targets must be (2, K), floats. Got torch.float32 (1, 5). Give a share for each class: one_hot(labels, K).float()."),
        (PICTURES, TARGETS.long(), INDICES, "Targets must be (2, K), floats. Got torch.int64 (2, 5). Give a share for each class: one_hot(labels, K).float()."),
        (PICTURES, TARGETS, INDICES.int(), "Indices must be 2 whole numbers (int64), one for each picture. Got torch.int32 (2,). Give each sample's place in the dataset."),
        (PICTURES, TARGETS, INDICES[:1], "Indices must be 2 whole numbers (int64), one for each picture. Got torch.int64 (1,). Give each sample's place in the dataset."),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit(images, targets, indices, message):
    with pytest.raises(InputError) as caught:
        mix(images, targets, indices, Mixing(mixup=1.0), seed=0, epoch=0)
    assert str(caught.value) == message
