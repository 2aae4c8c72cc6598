"""Helpers for tests of weight files: saving state dicts, comparing models, MNIST's test set."""

import gzip

import numpy as np
import safetensors.torch
import torch

from tests.support.shared_data import shared


def save_state(tensors, path):
    """Write tensors as safetensors; returns the path."""
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def same_logits(model, other):
    """Assert that a model of ours and another one give the same logits for random images."""
    images = torch.randn(2, *model.config.input_shape)
    with torch.no_grad():
        ours, expected = model(images), other(images)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def mnist_test_set():
    """Normalized images (10000, 1, 28, 28) and labels."""

    def read(name, header):
        with gzip.open(shared(f"data/mnist/t10k-{name}-ubyte.gz")) as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    pixels = torch.from_numpy(read("images-idx3", 16).reshape(-1, 1, 28, 28) / np.float32(255))
    return (pixels - 0.1307) / 0.3081, torch.from_numpy(read("labels-idx1", 8).astype(np.int64))
