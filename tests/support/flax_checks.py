"""Helpers for tests of npz files: writing them, images in Flax's layout, comparing logits."""

import numpy as np
import torch


def save_npz(arrays, path):
    np.savez(path, **arrays)
    return path


def make_images(flax, count=2):
    """Random images (B, H, W, C) of a model's size."""
    return np.random.default_rng(7).normal(size=(count, *flax.size, flax.channels)).astype(np.float32)


def run_torch(model, images):
    """The logits of a PyTorch model for images (B, H, W, C)."""
    with torch.no_grad():
        return model(torch.from_numpy(images).movedim(-1, 1)).numpy()


def agree(got, expected, tolerance=1e-5):
    assert got.shape == expected.shape
    assert np.abs(expected).max() > 0.1
    assert np.abs(got - expected).max() < tolerance
