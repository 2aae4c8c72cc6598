"""Recipes as published, for a user's own data. We have run none of them to the end: what each gave is
what its authors say, on their data. Where ours cannot do what theirs did, the docstring says so.
"""

from __future__ import annotations

import math
from typing import Literal

from vitrail.config import ViTConfig
from vitrail.data.augment import Augment
from vitrail.data.loader import steps_in_epoch
from vitrail.data.mixing import Mixing
from vitrail.data.sources import Dataset
from vitrail.preprocess import Preprocess
from vitrail.presets import preset
from vitrail.published import IMAGENET, published
from vitrail.training.settings import Recipe, TrainConfig
from vitrail.weights.preprocessing import fitted

IMAGENET_PICTURES = 1_281_167
BIG_VISION_DECAY = 1e-4 / 1e-3
"""big_vision adds its decay after the rate has been multiplied in, AdamW before: theirs over the rate."""
INCEPTION_CROP, TIMM_CROP = 0.05, 0.08  # the smallest share of the area that a crop keeps
FULL = 30  # our strength for what big_vision and timm call 10 of 10


def paper_finetune(data: Dataset) -> Recipe:
    """Fine-tuning as in the ViT paper: SGD at 384 pixels, for `--from` a weight file.

    Source: Dosovitskiy et al. 2020, Table 4 and B.1.1: momentum 0.9, batch 512, clip 1, cosine, no
    weight decay, a zero head. Its rates are grids (ImageNet 0.003 to 0.06, others 0.001 to 0.03): 0.01
    lies in all of them and is VTAB's only one. Steps are 20,000 for ImageNet, 10,000 for CIFAR, 500
    for Pets and Flowers, after a warm-up of 500; the limits between these, a million pictures and
    twenty thousand, are ours. A run of 500 steps warms up over 100, as Google's AugReg configs do. Steps
    become whole epochs of your data, rounded up. Crops and flips are those of Google's code (vit_jax),
    which the paper does not name.

    Published: B/16 from ImageNet-21k to CIFAR-10 99.02 %, to CIFAR-100 92.06 %, to ImageNet 84.53 % (by
    Google's code, in its README). Not run by us.

    Differs: the average of the last weights that the paper's best ImageNet rows have is left out.
    """
    steps, warm = steps_for(len(data.train))
    epochs = epochs_for(steps, len(data.train), 512)
    model = model_for("B/16@384", data)
    train = TrainConfig(
        epochs=epochs,
        batch=512,
        optimizer="sgd",
        momentum=0.9,
        lr=0.01,
        weight_decay=0.0,
        warmup=warm / steps,
        clip=1.0,
        loss=loss_for(data),
        augment=Augment(crop=INCEPTION_CROP, flip=0.5),
        evaluate_every=max(1, epochs // 20),
        save_every=max(1, epochs // 20),
    )
    note = (
        f"{steps:,} steps of 512 pictures, as published, are {epochs:,} epochs of these {len(data.train):,}."
    )
    return Recipe(model, fitted(published("google", 384), model), train, tuned={"size": 384}, notes=(note,))


def augreg(data: Dataset) -> Recipe:
    """S/16 from scratch on a million pictures, with the augmentation of "How to train your ViT".

    Source: Steiner et al. 2021, and big_vision's configs/vit_i1k.py, whose level for S/16 on ImageNet is
    medium2: RandAugment(2, 15) and mixup 0.5. Its weight decay of 1e-4 is added after the rate: AdamW's
    is 1e-4 / 1e-3 = 0.1. The warm-up of 10,000 steps is as large a share of your run as it was of theirs.

    Published: 83.73 % on ImageNet by the best S/16 of the paper, which saw ImageNet-21k first, with less
    augmentation, and was fine-tuned at 384 pixels. We know of no figure for this very run. Not run by us.

    Differs: their 15 goes beyond their own scale of 10, and ours ends there, at 30; their RandAugment
    also inverts, cuts out and adds below a threshold, which ours does not have. Mixup is drawn for
    each pair, not for a whole batch.
    """
    model = model_for("S/16", data, head="tanh")
    train = big_vision(data, epochs=300, batch=4096, mixup=0.5)
    return Recipe(model, short_side_256(model), train)


def simple_vit(data: Dataset) -> Recipe:
    """S/16 from scratch on a million pictures: fixed positions, a mean pool, ninety epochs.

    Source: Beyer, Zhai and Kolesnikov 2022 ("Better plain ViT baselines"), and big_vision's
    configs/vit_s16_i1k.py. Units of the decay and the warm-up are as in `augreg`.

    Published: 76.5 % on ImageNet after 90 epochs, in 6 to 7 hours on a TPUv3-8. Not run by us.

    Differs: their RandAugment also inverts, cuts out and adds below a threshold, which ours does not
    have. Mixup is drawn for each pair, not for a whole batch.
    """
    model = model_for("S/16", data, position="sincos2d", class_token=False, pool="mean", head="tanh")
    train = big_vision(data, epochs=90, batch=1024, mixup=0.2)
    return Recipe(model, short_side_256(model), train)


def deit3(data: Dataset) -> Recipe:
    """B/16 from scratch on a million pictures, 800 epochs at 192 pixels, after DeiT III.

    Source: Touvron, Cord and Jégou 2022, and README_revenge.md beside their code: batch 2048, decay
    0.05, binary cross-entropy, drop path 0.2, LayerScale 1e-4, mixup 0.8, cutmix 1, colour jitter 0.3.

    Published: 83.8 % on ImageNet at 224 pixels, after 20 epochs more at that size, which are not part
    of this recipe. Not run by us.

    Differs, so do not expect that figure. We have no LAMB: AdamW takes its place, and as LAMB's rate
    of 3e-3 means nothing to it, the rate is that of DeiT's own AdamW, 5e-4 for every 512 pictures. No
    repeated augmentation (each step saw a third as many pictures, three times each). 3-Augment makes
    every picture grey, solarized or blurred; ours makes a third of them grey, and leaves the rest.
    Where pictures are mixed, theirs counts every class in them as there; ours, by its share. Their
    drop path is 0.2 in every block; ours rises to it.
    """
    model = model_for("B/16@192", data, rows="patches", layer_scale=1e-4, drop_path=0.2, init="timm")
    mean, std = IMAGENET
    preprocess = Preprocess(size=192, resize="shortest", interpolation="bicubic", mean=mean, std=std)
    train = TrainConfig(
        epochs=800,
        batch=2048,
        lr=2e-3,
        weight_decay=0.05,
        warmup=5 / 800,
        last_lr=1e-5 / 2e-3,
        clip=0.0,
        loss="bce",
        augment=Augment(crop=TIMM_CROP, flip=0.5, brightness=0.3, contrast=0.3, saturation=0.3, grey=1 / 3),
        mixing=Mixing(mixup=0.8, cutmix=1.0),
    )
    return Recipe(model, fitted(preprocess, model), train, scaled=(5e-4, 512))


def mae_finetune(data: Dataset) -> Recipe:
    """Fine-tuning a B that a masked autoencoder has trained, for `--from` its weight file.

    Source: He et al. 2021, and FINETUNE.md beside their code: AdamW, decay 0.05, batch 1024, rate
    5e-4 for every 256 pictures, each block 0.65 of the rate of the next, 100 epochs, drop path 0.1,
    the mean of the patches, mixup 0.8, cutmix 1, erasing 0.25, smoothing 0.1. For L the rate is 1e-3,
    layer_decay 0.75, drop path 0.2 and 50 epochs.

    Published: 83.66 % on ImageNet by B/16. Not run by us.

    Differs: the last norm begins with the encoder's weights, not anew. Their RandAugment
    (rand-m9-mstd0.5-inc1) draws two operations, applies each with probability 1/2 and varies its
    strength; ours draws one, of strength 9 in 10. An erased box is grey, not noise.
    """
    tuned = dict(drop_path=0.1, pool="mean", pool_norm="after")
    model = model_for("B/16", data, init="timm", **tuned)
    train = TrainConfig(
        epochs=100,
        batch=1024,
        lr=2e-3,
        weight_decay=0.05,
        warmup=5 / 100,
        last_lr=1e-6 / 2e-3,
        clip=0.0,
        tune="llrd",
        layer_decay=0.65,
        loss=loss_for(data),
        smoothing=0.1,
        augment=Augment(
            crop=TIMM_CROP,
            flip=0.5,
            policy="randaugment",
            policy_count=1,
            policy_strength=FULL * 9 // 10,
            erase=0.25,
        ),
        mixing=Mixing(mixup=0.8, cutmix=1.0),
    )
    preprocess = fitted(published("imagenet"), model)
    return Recipe(model, preprocess, train, scaled=(5e-4, 256), tuned=tuned)


# ---- what they share ------------------------------------------------------------------------


def model_for(name: str, data: Dataset, **fields: object) -> ViTConfig:
    return preset(name, classes=len(data.classes), channels=data.channels or 3, **fields)


def loss_for(data: Dataset) -> Literal["bce", "cross-entropy"]:
    return "bce" if data.several else "cross-entropy"


def big_vision(data: Dataset, *, epochs: int, batch: int, mixup: float) -> TrainConfig:
    """What big_vision's ImageNet configs have in common."""
    return TrainConfig(
        epochs=epochs,
        batch=batch,
        lr=1e-3,
        weight_decay=BIG_VISION_DECAY,
        warmup=10_000 / (epochs * IMAGENET_PICTURES / batch),
        clip=1.0,
        loss=loss_for(data),
        augment=Augment(
            crop=INCEPTION_CROP, flip=0.5, policy="randaugment", policy_count=2, policy_strength=FULL
        ),
        mixing=Mixing(mixup=mixup),
    )


def short_side_256(model: ViTConfig) -> Preprocess:
    """As big_vision evaluates: the centre of a picture whose short side is 256, levels from -1 to 1."""
    half = (0.5,) * model.channels
    return Preprocess(size=224, resize="shortest", resize_to=256, mean=half, std=half)


def steps_for(pictures: int) -> tuple[int, int]:
    """Steps and warm-up of `paper_finetune` for so many pictures."""
    if pictures >= 1_000_000:
        return 20_000, 500
    return (10_000, 500) if pictures >= 20_000 else (500, 100)


def epochs_for(steps: int, pictures: int, batch: int) -> int:
    """Epochs that hold at least so many steps; few pictures make one small batch."""
    return math.ceil(steps / steps_in_epoch(pictures, batch))
