"""Recipes for MNIST: the one of the lecture notes as they give it, and one that reads better."""

from __future__ import annotations

from vitrail.config import ViTConfig
from vitrail.data.augment import Augment
from vitrail.data.sources import Dataset
from vitrail.preprocess import Preprocess
from vitrail.training.settings import Recipe, TrainConfig

MEAN, STD = (0.1307,), (0.3081,)  # of its 60,000 training pictures


def mnist_notes(data: Dataset) -> Recipe:
    """MNIST as the notes' practice solves it: 105,098 parameters, two blocks, ten epochs.

    The notes say "add dropout to self-attention" and "use weight decay" without a number: here 0.1 and
    0.05. Positions are learned, which is one of the practice's tasks.

    96.63, 96.81 and 96.76 % of the 10,000 test digits after the last epoch (seeds 0 to 2), on one H200 (torch
    2.11, bf16) that had other runs beside it:

        vitrail train mnist/ --recipe mnist-notes --seed 0

    The notes report 98, and we do not reach it: ten epochs of this rate leave the model short of what it can
    learn. With `--lr 0.003` it was 97.79, with `--set model.position=sincos1d` 97.22 (seed 0 each). First
    positions as large as the patches' tokens help (`--set model.position_sigma=1`): 97.64, with
    `--lr 0.003` 98.30, 98.12 and 98.45 (seeds 0 to 2), with `--lr 0.006` 98.59 (seed 0).
    """
    model = ViTConfig(
        width=64,
        depth=2,
        heads=4,
        patch=4,
        size=28,
        channels=1,
        classes=len(data.classes),
        attention_dropout=0.1,
    )
    train = TrainConfig(epochs=10, batch=256, lr=1e-3, weight_decay=0.05)
    return Recipe(model, Preprocess(size=28, mean=MEAN, std=STD), train)


def mnist(data: Dataset) -> Recipe:
    """MNIST by a ViT of 1.2 million parameters with rotary positions and jiggled digits.

    99.63, 99.50 and 99.53 % of the 10,000 test digits after the last epoch (seeds 0 to 2, mean 99.55), on one
    H200 (torch 2.11, bf16) that had other runs beside it, so that the time says nothing:

        vitrail train mnist/ --recipe mnist --seed 0 --set compile=true

    Its settings are a first guess, and no other was tried.
    """
    model = ViTConfig(
        width=128,
        depth=6,
        heads=4,
        patch=4,
        size=28,
        channels=1,
        classes=len(data.classes),
        position="rotary",
        drop_path=0.1,
    )
    train = TrainConfig(
        epochs=30,
        batch=256,
        lr=1e-3,
        weight_decay=0.05,
        smoothing=0.1,
        ema=0.999,
        augment=Augment(turn=15, zoom=1.15, shift=0.1, shear=10),
    )
    return Recipe(model, Preprocess(size=28, mean=MEAN, std=STD), train)
