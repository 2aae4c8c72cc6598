"""Normalization: one function for preprocessing, evaluation, training and export, with the bits of each."""

import numpy as np
import pytest
import torch

from vitrail.images.normalize import build_normalize, channel_statistics, normalize, normalize_batch
from vitrail.images.preprocess import Preprocess
from vitrail.images.published_preprocess import CLIP, IMAGENET

SPECS = [
    Preprocess(size=16),
    Preprocess(size=16, mean=IMAGENET[0], std=IMAGENET[1]),
    Preprocess(size=16, mean=CLIP[0], std=CLIP[1], scale=1 / 128),
    Preprocess(size=16, mean=(0.1307,), std=(0.3081,)),
]


def all_pixels(channels):
    """All 256 pixel values, (16, 16, C)."""
    return np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(channels, 2)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_preprocess_rounds_the_product_from_float64(spec):
    """As torchvision, timm and transformers do."""
    pixels = all_pixels(spec.channels)
    expected = (pixels.astype(np.float64) * spec.scale).astype(np.float32)
    expected -= np.array(spec.mean, np.float32)
    expected /= np.array(spec.std, np.float32)
    result = spec.normalize(pixels)
    assert np.array_equal(result.numpy(), expected.transpose(2, 0, 1))
    assert result.is_contiguous()
    assert result.dtype == torch.float32


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluation_computes_in_float32(spec, dtype):
    pixels = torch.from_numpy(all_pixels(spec.channels)).permute(2, 0, 1)[None].expand(2, -1, -1, -1)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std))
    expected = ((pixels.float() * spec.scale - mean) / std).to(dtype)
    result = normalize_batch(pixels, spec, torch.zeros((), dtype=dtype))
    assert torch.equal(result, expected)
    assert result.dtype == dtype
    assert torch.allclose(result[0].float(), spec.normalize(all_pixels(spec.channels)), atol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_training_normalizes_values_from_0_to_1(spec):
    images = torch.rand(3, spec.channels, 16, 16)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std))
    expected = (images * (255 * spec.scale) - mean) / std
    assert torch.equal(build_normalize(spec, torch.device("cpu"))(images), expected)


def test_the_product_has_the_precision_of_the_pixels():
    """A documented difference in the last bit: float64 pixels round once, float32 pixels twice."""
    spec = SPECS[1]
    mean, std = channel_statistics(spec)
    assert mean.shape == std.shape == (3, 1, 1)
    pixels = torch.from_numpy(all_pixels(3)).permute(2, 0, 1)
    once, twice = (
        normalize(pixels.to(dtype), mean, std, spec.scale) for dtype in (torch.float64, torch.float32)
    )
    assert once.dtype == twice.dtype == torch.float32
    assert not torch.equal(once, twice)
    assert torch.allclose(once, twice, atol=1e-6)
