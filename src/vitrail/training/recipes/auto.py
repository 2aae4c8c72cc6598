"""The default recipe: model, image size, length and augmentation chosen by the data, the device and the time.

The model is a ViT with the cures known for little data: a convolutional stem instead of a linear patch
embedding (Xiao et al. 2021, "Early convolutions help transformers see better"), fixed 2-D positions and mean
pooling (Beyer et al. 2022), small batches, and augmentation that grows with the number of epochs.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple

from vitrail.base.errors import VitrailError
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import Dataset
from vitrail.model.config import STEM_STRIDES, ViTConfig
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.recipes.small import SIMPLE, choose_patch, cifar10, mnist, preprocess_for, small


@dataclass(frozen=True)
class RunContext:
    """What decides besides the data: the device, and what the user has asked for."""

    gpu: bool = False
    from_file: bool = False
    size: int | tuple[int, ...] | None = None
    epochs: int | None = None
    minutes: float | None = None
    model: bool = False
    """Whether the user changes the model, so that the recipe does not speak of its own."""


class _Shape(NamedTuple):
    width: int
    depth: int
    heads: int
    seen: int
    """The fewest images, over all epochs, that it is for: in a short run a large model learns less."""


class _Machine(NamedTuple):
    """Round numbers for a kind of machine. A wrong guess costs time or accuracy, never the run.

    Its speed is in multiplications per second; epochs and batch are the fewest and the most; sides are those
    of image files.
    """

    name: str
    speed: float
    minutes: float
    images_seen: int
    """In all epochs together: few images get more epochs."""
    epochs: tuple[int, int]
    batch: tuple[int, int]
    steps: int
    """As many as this are wanted; the batch size follows."""
    sides: tuple[int, ...]
    shapes: tuple[_Shape, ...]


_SMALL = (_Shape(64, 4, 2, 0), _Shape(96, 4, 3, 0), _Shape(128, 6, 4, 20_000), _Shape(192, 6, 3, 100_000))
_CPU = _Machine("a CPU", 2.4e10, 15, 60_000, (10, 200), (16, 64), 1500, (32, 64, 96, 128), _SMALL)
_GPU = _Machine(
    *("a GPU", 2e13, 10, 3_000_000, (30, 300), (64, 512), 6000, (32, 64, 96, 128, 160, 224)),
    shapes=(*_SMALL, _Shape(384, 10, 6, 1_000_000)),
)
_MANY = 10_000  # training images from which a CPU gets no more than _SIDE_OF_MANY pixels
_SIDE_OF_MANY = 64
_MOST_PATCHES = 14  # along a side
_HEADERS = 16  # files whose size is read
MAX_SIDE = 2**16  # larger images are not planned for; the config refuses them, or memory does
_LR, _MAX_LR = 1e-3, 2e-3  # the first for a batch of 16; it grows with the square root of the batch


def auto(data: Dataset, context: RunContext | None = None) -> Recipe:
    """The default: model, image size, epochs and augmentation by the data, the device and the time.

    - Image size: that of arrays. For files, the largest of 32, 64, 96 and 128 pixels (on a GPU up to 224)
      that is no larger than their typical short side; on a CPU at most 64 for 10,000 images or more.
    - Patches: seven or more along a side, with a convolutional stem where their side is a multiple of its
      stride, 4.
    - Epochs: yours; or as many as make 60,000 images (on a GPU 3 million), from 10 to 200 (30 to 300).
    - Model: the largest of width 64, 96, 128 and 192 (on a GPU also 384) that should be done in 15 minutes on
      two cores, or 10 on a GPU; if none is, the smallest one and fewer epochs. Width 128 is for 20,000
      images seen or more, in all epochs, 192 for 100,000, and 384 for a million.
    - Batch: small enough for 1,500 steps, from 16 to 64 (on a GPU 6,000 steps, 64 to 512). The learning rate
      is 0.001 for 16 images and grows with the square root of the batch, to 0.002.
    - Augmentation: crops, flips and colors for files, small movements for arrays (flips only in color);
      stronger, and with mixup, for more than 20 epochs.

    A run that starts from a weight file (`--from`) has the settings of `small`. On a GPU, 20,000 or more
    color images of 32 x 32 get `cifar10-small`, and gray ones of 28 x 28 get `mnist`.

    The ten largest classes of Oxford Flowers at 64 pixels (1,505 training images, 368 held out): 67.9 and
    70.1 % after the last of 8 epochs (seeds 0 and 1; width 96, 0.5 million parameters; one thread of a busy
    AMD EPYC, torch 2.13). A CNN of 280 thousand parameters had 75.8 and 67.1 %. Pretrained weights have
    97.6 % after 10 epochs and are the better choice:

        vitrail train flowers10/ --epochs 8 --seed 0

    The size of the model, the batch and the learning rate were chosen on these images. Width 128 and depth 4
    gave 65.5 % (learning rate 0.0015, batch 16) and 61.4 % (0.002, batch 32).
    """
    context = context or RunContext()
    machine, images = _GPU if context.gpu else _CPU, len(data.train)
    if context.from_file:
        why = "the fine-tuning settings of the recipe small, because the run starts from weights."
        return replace(small(data), notes=(f"Recipe auto: {why}",))
    size = _image_size(data, context, machine)
    if context.gpu and images >= 20_000 and not data.multilabel:
        like_these = f"measured on images like these ({images:,} of"
        if size == (32, 32) and data.channels == 3:
            why = f"Recipe auto: cifar10-small, {like_these} 32x32 in color)."
            return replace(cifar10(data), notes=(why,))
        if size == (28, 28) and data.channels == 1:
            why = f"Recipe auto: mnist, {like_these} 28x28 in gray)."
            return replace(mnist(data), notes=(why,))
    seconds = 60 * (context.minutes or machine.minutes)
    fewest, most = machine.epochs
    epochs = context.epochs or min(most, max(fewest, round(machine.images_seen / images)))
    models = [_model(data, size, shape) for shape in machine.shapes if shape.seen <= epochs * images]
    costs = [epochs * images * _multiplications(model) / machine.speed for model in models]
    model, cost = max(
        (pair for pair in zip(models, costs, strict=True) if pair[1] <= seconds),
        key=lambda pair: pair[1],
        default=(models[0], costs[0]),
    )
    if cost > seconds and context.epochs is None:  # the smallest model: fewer epochs, but no less than three
        epochs = max(3, int(epochs * seconds / cost))
    train = _train_config(data, machine, epochs)
    notes = (_reason(data, context, machine, model, epochs),)
    return Recipe(model, preprocess_for(data, model), train, notes=notes)


# ---- the model ------------------------------------------------------------------------------


def _image_size(data: Dataset, context: RunContext, machine: _Machine) -> tuple[int, ...]:
    """(H, W): as given, as the arrays are, or what suits the files."""
    if context.size is not None:
        return (context.size,) * 2 if isinstance(context.size, int) else context.size
    if data.train.images is not None:
        sides = data.train.images.shape[1:3]  # where one only divides into very many patches: multiples of 8
        return tuple(s if s // _patch(s) <= _MOST_PATCHES else -(-s // 8) * 8 for s in sides)
    most = _SIDE_OF_MANY if len(data.train) >= _MANY and not context.gpu else machine.sides[-1]
    side = max((s for s in machine.sides if s <= min(most, _typical_side(data))), default=machine.sides[0])
    return side, side


def _patch(side: int) -> int:
    return choose_patch(side, 7 if side >= 24 else 4)


def _typical_side(data: Dataset) -> float:
    """The median short side of some of the files, in pixels; only their headers are read."""
    from vitrail.images.decode import read_size

    paths, sides = data.train.paths or [], []
    for path in paths[:: max(1, len(paths) // _HEADERS)]:
        try:
            sides.append(min(read_size(path)))
        except (VitrailError, OSError):
            continue  # training reports it
    return statistics.median(sides) if sides else math.inf


def _model(data: Dataset, size: tuple[int, ...], shape: _Shape) -> ViTConfig:
    patch = tuple(_patch(side) for side in size)
    stem = not any(side % STEM_STRIDES["conv"] for side in patch)
    return ViTConfig(
        **SIMPLE,
        width=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        patch=patch,
        size=size,
        channels=data.channels or 3,
        classes=len(data.classes),
        embedding="conv" if stem else "linear",
    )


def _multiplications(model: ViTConfig) -> float:
    """Of one image in training, about: forward, and twice that backward."""
    D, tokens = model.width, model.tokens
    blocks = model.depth * (tokens * 12 * D * D + 2 * tokens**2 * D)
    pixels = math.prod(model.pixels)
    stem = pixels / 4 * 9 * model.channels * D / 2 + pixels / 16 * 9 * D * D / 2
    return 3 * (blocks + (stem if model.embedding == "conv" else 0))


# ---- the run --------------------------------------------------------------------------------


def _train_config(data: Dataset, machine: _Machine, epochs: int) -> TrainConfig:
    least, most = machine.batch
    batch = 2 ** round(math.log2(max(1, epochs * len(data.train) / machine.steps)))
    batch = min(most, max(least, batch))
    steps = max(1, epochs * len(data.train) // batch)
    augment, mixing = _augmentation(data, epochs)
    return TrainConfig(
        epochs=epochs,
        batch=batch,
        lr=round(min(_MAX_LR, _LR * math.sqrt(batch / 16)), 5),
        betas=(0.9, 0.98),
        weight_decay=0.05,
        smoothing=0.1,
        ema=min(0.999, max(0.9, round(1 - 15 / steps, 3))),
        loss="bce" if data.multilabel else "cross-entropy",
        augment=augment,
        mixing=mixing,
    )


def _augmentation(data: Dataset, epochs: int) -> tuple[Augment, Mixing]:
    """More of it where each image is seen more often. Arrays with one channel may be digits: no flips."""
    color = 0.3 if data.channels in (None, 3) else 0.0
    mixing = Mixing(mixup=0.2, probability=0.5) if epochs > 20 else Mixing()
    if data.train.images is None:
        jitter = 0.3 if epochs > 20 else 0.2
        crop = 0.3 if epochs > 20 else 0.5
        return Augment(crop=crop, flip=0.5, brightness=jitter, contrast=jitter, saturation=jitter), mixing
    flip = 0.5 if data.channels == 3 else 0.0
    return (
        Augment(rotate=10, zoom=1.1, translate=0.1, flip=flip, brightness=color, contrast=color),
        mixing if flip else Mixing(),
    )


def _reason(data: Dataset, context: RunContext, machine: _Machine, model: ViTConfig, epochs: int) -> str:
    H, W = model.pixels
    stem = "with a convolutional stem" if model.embedding == "conv" else "without a stem"
    own = f"a ViT of width {model.width} and depth {model.depth} {stem} at {H}x{W} pixels, "
    where = "on a GPU" if context.gpu else "on two idle cores"
    meant = "minutes" if context.minutes is None else f"{context.minutes:g} minutes"
    given = "as given" if context.epochs is not None else f"meant for {meant} {where}"
    return (
        f"Recipe auto: for {len(data.train):,} training images on {machine.name}, "
        f"{'' if context.model else own}{epochs} epoch{'s' * (epochs != 1)} ({given})."
    )
