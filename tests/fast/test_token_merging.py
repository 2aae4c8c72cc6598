"""Token merging: the matching by NumPy, no merging is the model itself, and prefix tokens are left alone."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.fast.gate import GateError
from vitrail.fast.merge import Merged, MergedForward, match


def merge_by_numpy(tokens, keys, sizes, prefix, r):
    """ToMe as its paper describes it, one token after the other."""
    first, tokens, keys = tokens[:prefix], tokens[prefix:], keys[prefix:]
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    odd, even = range(1, len(tokens), 2), range(0, len(tokens), 2)
    best = {a: max(even, key=lambda b: unit[a] @ unit[b]) for a in odd}
    moving = sorted(odd, key=lambda a: -(unit[a] @ unit[best[a]]))[:r]
    stay = [a for a in odd if a not in moving]
    groups = [[a] for a in stay] + [[b, *(a for a in moving if best[a] == b)] for b in even]
    means = [np.average(tokens[group], axis=0, weights=sizes[group]) for group in groups]
    return np.array([*first, *means]), np.array([sizes[group].sum() for group in groups]), groups


@pytest.mark.parametrize(("patches", "prefix", "r"), [(16, 1, 5), (17, 0, 8), (9, 3, 1), (6, 1, 3)])
def test_merging_is_that_of_numpy(patches, prefix, r):
    rng = np.random.default_rng(0)
    tokens, keys = rng.normal(size=(2, 3, prefix + patches, 7))
    merged = Merged(3, patches, torch.device("cpu"))
    merged.sizes = torch.from_numpy(rng.integers(1, 4, (3, patches, 1)).astype(np.float64))
    sizes = merged.sizes[..., 0].numpy()
    found = merged.merge(torch.from_numpy(tokens), torch.from_numpy(keys), r).numpy()
    for image in range(3):
        means, total, groups = merge_by_numpy(tokens[image], keys[image], sizes[image], prefix, r)
        np.testing.assert_allclose(found[image], means, rtol=1e-5, atol=1e-6)  # sums are in fp32
        np.testing.assert_allclose(merged.sizes[image, :, 0], total)
        for index, group in enumerate(groups):
            assert (merged.where[image, group] == index).all()
        np.testing.assert_array_equal(found[image, :prefix], tokens[image, :prefix])


def test_more_tokens_than_there_are_pairs_of():
    merged = Merged(1, 5, torch.device("cpu"))
    z = torch.randn(1, 6, 4)
    for left in (3, 2, 1, 1):
        z = merged.merge(z, z, 100)
        assert z.shape[1] == 1 + left
    assert merged.sizes.flatten().tolist() == [5]
    assert merged.restore(z).shape == (1, 6, 4)


@pytest.mark.parametrize("fields", [{}, {"pool": "mean", "class_token": False}, {"registers": 2}], ids=str)
def test_none_merged_is_bit_equal(fields):
    torch.manual_seed(0)
    model = add_noise(vt.create("mu/4", depth=3, classes=5, **fields)).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(MergedForward(model, 0, torch.float32)(images)[1], model(images))
        assert not torch.equal(MergedForward(model, 6, torch.float32)(images)[1], model(images))


def test_equal_tokens_can_be_merged_without_a_change():
    """Without positions, an image of two patterns has two kinds of tokens: proportional attention is exact."""
    torch.manual_seed(0)
    model = add_noise(vt.create("mu/4", depth=3, classes=5, position="none")).eval()
    patches = torch.randn(2, 3, 4, 4)
    rows = [torch.cat([patches[int(x + y > 6)] for x in range(8)], dim=-1) for y in range(8)]
    image = torch.cat(rows, dim=-2)[None]
    with torch.no_grad():
        found = MergedForward(model, 3, torch.float32)(image)[1]
        torch.testing.assert_close(found, model(image), atol=1e-5, rtol=1e-5)


def test_a_merged_model_must_pass_the_gate():
    torch.manual_seed(0)
    model = add_noise(vt.create("mu/4", depth=3, classes=5)).eval()
    images = torch.randn(24, 3, 32, 32)
    fast = vt.accelerate(model, merge=4, calibrate=images, min_agreement=0.0)
    assert fast.report.gate.images == 24
    assert "4 tokens are merged in each of" in str(fast.report)
    with torch.no_grad():
        same = (fast(images).argmax(1) == model(images).argmax(1)).double().mean()
    assert fast.report.gate.agreement == pytest.approx(same)
    with pytest.raises(GateError, match="merge fewer tokens, or lower"):
        vt.accelerate(model, merge=31, calibrate=images, min_agreement=1.0)


@pytest.mark.parametrize(
    ("fields", "arguments", "words"),
    [
        ({}, {"merge": -1}, "merge must be"),
        ({}, {"merge": 2, "calibrate": None}, "merge is lossy"),
        ({}, {"merge": 2, "precision": "int8"}, "not for int8"),
        ({"position": "rotary"}, {"merge": 2}, "position='rotary'"),
        ({"position_at": "every"}, {"merge": 2}, "position='learned'"),
        ({"position": "relative"}, {"merge": 2}, "position='relative'"),
        ({"block": "parallel"}, {"merge": 2}, "block='parallel'"),
    ],
)
def test_what_cannot_be_merged_is_said(fields, arguments, words):
    model = vt.create("mu/4", depth=3, classes=5, **fields)
    with pytest.raises(vt.VitrailError, match=words):
        vt.accelerate(model, **{"calibrate": torch.zeros(2, 3, 32, 32)} | arguments)


def test_the_most_alike_are_matched():
    keys = torch.eye(6)[None].clone()
    keys[0, 3] = keys[0, 4] + 0.01
    kept, moved, targets = match(keys, 1)
    assert moved.tolist() == [[1]]
    assert targets.tolist() == [[2]]
    assert kept.tolist() == [[0, 2]]
