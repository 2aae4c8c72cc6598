"""Batches in a fixed order: the images of a step depend on the seed and the step, and on nothing else.

A global batch is one row of indices. Ranks take consecutive parts of it, and gradient accumulation splits
these again, so that the images of a step are the same for any number of processes. Files are decoded by
workers ahead of their use, arrays taken from memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError, printable, setting
from vitrail.images.augment.pipeline import Augment, crop_numbers
from vitrail.images.crop import propose_crops, read_crop
from vitrail.images.decode import LoadImage, read_or_reason, read_pixels
from vitrail.images.order import Order, epoch_order
from vitrail.images.workers import Task, Workers, choose_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.formats.sources import Split
    from vitrail.images.preprocess import Preprocess

__all__ = ["Batch", "CorruptFiles", "Reader", "batch_indices", "epoch_order", "steps_in_epoch"]

AHEAD = 3  # batches that are decoded before they are needed
MID_GRAY = 128  # the pixel value of an image that could not be read

Policy = Literal["error", "skip", "warn"]


@dataclass(frozen=True)
class Batch:
    """Images of one step, or of a part of one."""

    indices: Tensor
    """(b,) int64, their positions in the source."""
    images: Tensor
    """(b, C, H, W) uint8; with `shapes`, the pixels of all images, (bytes,)."""
    valid: Tensor
    """(b,) 1 where the image could be read, 0 where it could not; such an image is gray."""
    shapes: Sequence[tuple[int, ...]] | None = None
    """(H, W, C) of each image, if they differ in shape."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, without waiting for it."""
        parts = (self.indices, self.images, self.valid)
        indices, images, valid = (part.to(device, non_blocking=True) for part in parts)
        return Batch(indices, images, valid, self.shapes)

    def clone(self) -> Batch:
        return Batch(self.indices.clone(), self.images.clone(), self.valid.clone(), self.shapes)

    def unpack(self) -> list[Tensor]:
        """The images of different shapes, (C, H, W) each."""
        assert self.shapes is not None
        parts = self.images.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape).permute(2, 0, 1) for part, shape in zip(parts, self.shapes, strict=True)]

    def copy_(self, other: Batch) -> None:
        """Copy another batch of the same shape into this one, without waiting for it."""
        self.indices.copy_(other.indices, non_blocking=True)
        self.images.copy_(other.images, non_blocking=True)
        self.valid.copy_(other.valid, non_blocking=True)


@dataclass
class CorruptFiles:
    """The files that could not be read, and what to do about them."""

    policy: Policy = "error"
    """error: raise; skip and warn: go on without the image."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The reason for each file, by its name."""


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
        workers: what decodes files: a number of workers, "auto", or running ones, which are not closed.
        corrupt: the error policy, and where unreadable files are recorded.
        device: where an array is stored, once, before the first batch; and where images go on a GPU.
    """

    def __init__(
        self,
        source: Split,
        preprocess: Preprocess,
        *,
        augment: Augment | None = None,
        seed: int = 0,
        workers: int | Literal["auto"] | Workers = 0,
        corrupt: CorruptFiles | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.source, self.preprocess, self.augment, self.seed = source, preprocess, augment, seed
        self.corrupt = CorruptFiles() if corrupt is None else corrupt
        self.device = torch.device(device)
        self.stored = None
        if source.images is not None:
            self.stored = torch.from_numpy(source.images).permute(0, 3, 1, 2).to(device)
        self.own_workers = not isinstance(workers, Workers)
        self.workers = (
            workers
            if isinstance(workers, Workers)
            else start_workers(workers, len(source.paths or ()), preprocess, self.device)
        )

    def batches(self, requests: Iterable[tuple[int, Tensor]]) -> Iterator[Batch]:
        """A batch for each (epoch, indices), in order; files are decoded some batches ahead."""
        if self.stored is not None:
            for _, indices in requests:
                images = self.stored[indices.to(self.stored.device, non_blocking=True)]
                yield Batch(indices, images, torch.ones(len(indices)))
            return
        remaining = iter(requests)
        if (first_request := next(remaining, None)) is None:
            return
        waiting: deque[Tensor] = deque()  # the indices of batches whose tasks have been taken
        tasks = self._tasks(chain([first_request], remaining), waiting)
        ahead = AHEAD * -(-len(first_request[1]) // self.workers.chunk)
        with closing(self.workers.map(tasks, ahead)) as results:
            for first in results:
                indices = waiting.popleft()
                rest = islice(results, -(-len(indices) // self.workers.chunk) - 1)
                yield self._collect(indices, chain([first], rest))

    def close(self) -> None:
        """Stop the workers, if they are its own."""
        if self.own_workers:
            self.workers.close()

    def _tasks(self, requests: Iterable[tuple[int, Tensor]], waiting: deque[Tensor]) -> Iterator[Task]:
        """The files of each request in tasks of a few images."""
        paths = self.source.paths
        assert paths is not None
        take = getattr(paths, "take", None)  # a lazy sequence finds many at once in a fraction of the time
        for epoch, indices in requests:
            waiting.append(indices)
            chosen = [paths[i] for i in indices.tolist()] if take is None else list(take(indices.numpy()))
            items = list(zip(chosen, self._loaders(epoch, indices), strict=True))
            for start in range(0, len(items), self.workers.chunk):
                yield Task(read_or_reason, items[start : start + self.workers.chunk])

    def _loaders(self, epoch: int, indices: Tensor) -> Sequence[LoadImage]:
        """How each of the files is loaded in an epoch: by default as for evaluation and prediction."""
        augment, plain = self.augment, partial(read_pixels, preprocess=self.preprocess)
        if augment is not None and augment.crop is not None:
            proposals = propose_crops(
                crop_numbers(self.seed, epoch, indices), augment.crop, augment.crop_ratio
            )
            crop = partial(read_crop, preprocess=self.preprocess, max_ratio=augment.crop_ratio)
            return [partial(crop, proposals=one) for one in proposals.tolist()]
        if augment is not None and not self.preprocess.keeps_shape:
            # Twice the size is enough for training, and a JPEG can be decoded at that size.
            H, W = self.preprocess.target
            plain = partial(plain, min_size=(2 * H, 2 * W))
        return [plain] * len(indices)

    def _collect(self, indices: Tensor, parts: Iterable[list[NDArray[np.uint8] | str]]) -> Batch:
        """A batch of what was read. Unreadable files are recorded here: in the order of the requests, not
        in that of the workers."""
        size, pin = (*self.preprocess.target, self.preprocess.channels), self.device.type == "cuda"
        gray = np.full(size, MID_GRAY, dtype=np.uint8)
        valid = torch.ones(len(indices))
        arrays = []
        for number, result in enumerate(chain.from_iterable(parts)):
            if isinstance(result, str):
                self._record(int(indices[number]), result)
                valid[number] = 0.0
            arrays.append(gray if isinstance(result, str) else result)
        # By NumPy, in this thread: a copy by torch wakes a thread for each core, and between two copies they
        # spin, on cores that the workers need.
        if self.preprocess.keeps_shape:
            images = torch.empty(sum(array.size for array in arrays), dtype=torch.uint8, pin_memory=pin)
            np.concatenate([array.reshape(-1) for array in arrays], out=images.numpy())
            shapes = [array.shape for array in arrays]
            return Batch(indices, images.to(self.device, non_blocking=True), valid, shapes)
        images = torch.empty(len(indices), *size, dtype=torch.uint8, pin_memory=pin)
        np.stack(arrays, out=images.numpy())
        return Batch(indices, images.to(self.device, non_blocking=True).permute(0, 3, 1, 2), valid)

    def _record(self, index: int, reason: str) -> None:
        """Note a file that cannot be read, or raise, as the policy says."""
        assert self.source.paths is not None
        if self.corrupt.policy != "error":
            self.corrupt.reasons.setdefault(printable(self.source.names[index]), printable(reason))
            return
        name, reason = printable(self.source.paths[index]), reason.rstrip(".")
        reason = reason if name in reason else f"{name} cannot be read: {reason}"
        raise InputError(f"{reason}. To skip unreadable files, use {setting('corrupt', 'skip')}.")


def start_workers(
    requested: int | Literal["auto"], images: int, preprocess: Preprocess, device: torch.device
) -> Workers:
    """Workers for a number of image files; the processes among them start when there is a task."""
    H, W = preprocess.target
    size = H * W * preprocess.channels
    plan = choose_workers(requested, images, image_bytes=size, busy=device.type == "cpu")
    return Workers(plan, image_bytes=size)
