"""From the pixels of a batch to what a step trains on: augmentation, mixing, normalization and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vitrail.images.augment.mixing import Mixing, mix_batch
from vitrail.images.augment.pipeline import Augment, augment_batch
from vitrail.images.formats.sources import Dataset
from vitrail.images.normalize import build_normalize
from vitrail.images.preprocess import Preprocess
from vitrail.training.objective import build_targets
from vitrail.training.recipes.settings import TrainConfig


@dataclass(frozen=True)
class InputPipeline:
    """What happens to the images of a batch before the model sees them; all of it on their device.

    Args:
        labels: (N,) or (N, K), of the whole training set, on the device.
        targets: from the labels of a batch to its targets (B, K).
        size: (height, width) of the model's images.
    """

    augment: Augment
    mixing: Mixing
    labels: Tensor
    targets: Callable[[Tensor], Tensor]
    normalize: Callable[[Tensor], Tensor]
    size: tuple[int, int]
    seed: int

    def __call__(
        self, images: Tensor, indices: Tensor, epoch: int | Tensor, *, mixes: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Augmented and mixed images with values from 0 to 1, the same normalized, and their targets."""
        targets = self.targets(self.labels[indices])
        if images.device.type == "mps":  # it has no float64, in which the random parameters are computed
            indices = indices.cpu()
        x = augment_batch(images, indices, self.augment, seed=self.seed, epoch=epoch, size=self.size)
        if mixes:
            x, targets = mix_batch(x, targets, indices, self.mixing, seed=self.seed, epoch=epoch)
        return x, self.normalize(x), targets


@dataclass(frozen=True)
class NativeInputs:
    """Input pipeline for images of different shapes, which keep them; nothing is mixed."""

    pipeline: InputPipeline

    def __call__(
        self, images: list[Tensor], indices: Tensor, epoch: int | Tensor, *, mixes: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Equal shapes are augmented together; what is drawn for an image depends on none of the others."""
        p, shapes = self.pipeline, [image.shape for image in images]
        augmented = list(images)
        for shape in dict.fromkeys(shapes):
            same = [number for number, other in enumerate(shapes) if other == shape]
            stacked = torch.stack([images[number] for number in same])
            some, size = indices[torch.tensor(same, device=indices.device)], (shape[1], shape[2])
            new = augment_batch(stacked, some, p.augment, seed=p.seed, epoch=epoch, size=size)
            for number, image in zip(same, new, strict=True):
                augmented[number] = image
        return augmented, [p.normalize(image) for image in augmented], p.targets(p.labels[indices])


def build_inputs(
    data: Dataset, settings: TrainConfig, preprocess: Preprocess, labels: Tensor
) -> InputPipeline | NativeInputs:
    """The pipeline of a run; files are cropped where they are decoded."""
    crop_in_decode = data.train.paths is not None
    pipeline = InputPipeline(
        augment=replace(settings.augment, crop=None) if crop_in_decode else settings.augment,
        mixing=settings.mixing,
        labels=labels,
        targets=partial(build_targets, classes=len(data.classes), smoothing=settings.smoothing),
        normalize=build_normalize(preprocess, labels.device),
        size=preprocess.target,
        seed=settings.seed,
    )
    return NativeInputs(pipeline) if preprocess.keeps_shape else pipeline
