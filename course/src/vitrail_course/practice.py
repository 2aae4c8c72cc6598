"""The practice exercise of note 002 for a notebook: digits, a plain training loop, and the solutions.

from vitrail_course import practice

digits = practice.load_digits("mnist/")
find_E = practice.solution("find_E")  # prints the solution and returns it
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import InputError, suggest
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail_course import practice_solutions
from vitrail_course.labs.datasets import load_dataset, resize_dataset

_MEAN, _STD = 0.1307, 0.3081  # of MNIST
SOLUTIONS = ("find_E", "draw_E", "draw_positions", "make_positions_trainable", "drop_class_token", "improve")


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


def accuracy(model: ViT, digits: Digits) -> float:
    """The fraction of the test digits that the model predicts correctly."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in _fitted(digits.test_images, model).split(500)])
    return float((found == digits.test_labels).float().mean())


def train(
    config: ViTConfig, digits: Digits, *, epochs: int, lr: float, batch: int = 256, weight_decay: float = 0.0,
    warmup: float = 0.0, seed: int = 0,
) -> ViT:  # fmt: skip
    """Train a new model with AdamW, and print its accuracy after every epoch.

    The learning rate rises over the fraction `warmup` of the steps and then falls to 0 (cosine); without
    warm-up it is constant, as in the notebook of the lecture.
    """
    torch.manual_seed(seed)
    model = ViT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, betas=(0.9, 0.99))
    images, steps = _fitted(digits.images, model), epochs * math.ceil(len(digits.images) / batch)
    step = 0
    for epoch in range(epochs):
        model.train()
        for index in torch.randperm(len(images)).split(batch):
            done = step / steps
            factor = min(done / warmup, 0.5 + 0.5 * math.cos(math.pi * done)) if warmup else 1.0
            optimizer.param_groups[0]["lr"] = lr * factor
            loss = F.cross_entropy(model(images[index]), digits.labels[index])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        print(f"epoch {epoch + 1:2}: loss {loss.item():.3f}, test accuracy {accuracy(model, digits):.2%}")
    return model


def _fitted(images: Tensor, model: ViT) -> Tensor:
    """Images in the size that the model takes."""
    size = model.config.pixels
    return images if images.shape[2:] == size else F.interpolate(images, size, mode="bilinear")


def solution(name: str) -> Callable[..., Any]:
    """Print the solution of an exercise of the notebook 002_practice, and return it."""
    if name not in SOLUTIONS:
        raise InputError(f"Unknown exercise {name!r}. {suggest(str(name), SOLUTIONS)}")
    function: Callable[..., Any] = getattr(practice_solutions, name)
    print(inspect.getsource(function))
    return function
