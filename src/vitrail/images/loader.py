"""Batches in a fixed order: the images of a step depend on the seed and the step, and on nothing else.

A global batch is one row of indices. Ranks take consecutive parts of it, and gradient accumulation splits
these again, so that the images of a step are the same for any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from vitrail.images.augment.pipeline import Augment, crop_numbers
from vitrail.images.crop import propose_crops, read_crop
from vitrail.images.order import Order, epoch_order
from vitrail.images.preprocess import Preprocess
from vitrail.images.reader import Batch, CorruptFiles, ImageReader, ImageSource, LoadImage, read_pixels
from vitrail.images.workers import Workers

__all__ = ["Batch", "CorruptFiles", "Reader", "batch_indices", "epoch_order", "steps_in_epoch"]


def steps_in_epoch(count: int, batch: int) -> int:
    """How many complete batches an epoch has; the images that remain come in another epoch."""
    return max(1, count // batch)


def batch_indices(order: Order, step: int, batch: int) -> Tensor:
    """The global batch of a step of the epoch. A data set smaller than a batch is repeated."""
    return order[torch.arange(step * batch, (step + 1) * batch) % len(order)]


class Reader:
    """Reads the images of a data set as uint8 pixels of one size, with random crops for training.

    Args:
        source: files are resized to the size of `preprocess`; arrays keep their size.
        augment: the augmentation of a training set; None reads the pixels that evaluation needs. Only the
            random crop of files is done here, from the full resolution; the rest is `augment_batch`'s.
        seed: the seed of the crops.
        workers, corrupt, device: see `ImageReader`.
    """

    def __init__(
        self,
        source: ImageSource,
        preprocess: Preprocess,
        *,
        augment: Augment | None = None,
        seed: int = 0,
        workers: int | Literal["auto"] | Workers = 0,
        corrupt: CorruptFiles | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.preprocess, self.augment, self.seed = preprocess, augment, seed
        self.reader = ImageReader(source, preprocess, workers=workers, corrupt=corrupt, device=device)

    def batches(self, requests: Iterable[tuple[int, Tensor]]) -> Iterator[Batch]:
        """A batch for each (epoch, indices), in order; files are decoded some batches ahead."""
        return self.reader.batches((indices, self.loaders(epoch, indices)) for epoch, indices in requests)

    def loaders(self, epoch: int, indices: Tensor) -> Sequence[LoadImage] | None:
        """How each of the files is loaded in an epoch; None: as for evaluation."""
        if self.augment is None or self.reader.source.paths is None:
            return None
        if self.augment.crop is None and self.preprocess.keeps_shape:
            return None
        if self.augment.crop is None:
            # Twice the size is enough for training, and a JPEG can be decoded at that size.
            H, W = self.preprocess.target
            return [partial(read_pixels, preprocess=self.preprocess, min_size=(2 * H, 2 * W))] * len(indices)
        proposals = propose_crops(
            crop_numbers(self.seed, epoch, indices), self.augment.crop, self.augment.crop_ratio
        )
        crop = partial(read_crop, preprocess=self.preprocess, max_ratio=self.augment.crop_ratio)
        return [partial(crop, proposals=one) for one in proposals.tolist()]

    def close(self) -> None:
        """Stop the workers, if they are its own."""
        self.reader.close()
