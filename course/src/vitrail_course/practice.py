"""The digits of the practice exercise of note 002 (docs/notebooks/002_practice.ipynb)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail_course.labs.datasets import load_dataset, resize_dataset

_MEAN, _STD = 0.1307, 0.3081  # of MNIST


@dataclass(frozen=True, eq=False)
class Digits:
    """Images (n, 1, H, W), normalized, and their labels (n,)."""

    name: str
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def __repr__(self) -> str:
        return f"{self.name}: {len(self.images):,} training and {len(self.test_images):,} test digits"


def load_digits(path: str | Path | None = None, count: int = 60_000, size: int = 28) -> Digits:
    """MNIST from a folder with its files; by default the digits of scikit-learn, enlarged to 28 x 28.

    Args:
        count: at most this many training digits, and a sixth as many test digits.
        size: the side of the images in pixels.
    """
    data = resize_dataset(load_dataset(path, count, math.ceil(count / 6)), size)
    splits = []
    for split in (data.train, data.eval_split):
        assert split.images is not None
        pixels = torch.from_numpy(np.ascontiguousarray(split.images)).permute(0, 3, 1, 2).float() / 255
        splits += [(pixels - _MEAN) / _STD, torch.as_tensor(split.labels)]
    return Digits("MNIST" if path else "the digits of scikit-learn", *splits)
