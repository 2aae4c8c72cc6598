"""Images read in order as uint8 pixels: files decoded by workers ahead of use, arrays taken from memory."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError, printable, setting
from vitrail.images.decode import MinSize, open_image, suppress_warnings
from vitrail.images.formats.packed_images import PackedImage
from vitrail.images.formats.stored_images import StoredImage
from vitrail.images.workers import Results, Task, Workers, choose_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.preprocess import Preprocess

AHEAD = 3  # batches that are decoded before they are needed
MID_GRAY = 128  # the pixel value of an image that could not be read

Policy = Literal["error", "skip", "warn"]
LoadImage = Callable[[Path | StoredImage], "NDArray[np.uint8]"]
"""From the path of an image file to its pixels (H, W, C)."""


class ImageSource(Protocol):
    """Images to read: files or an array. `vitrail.images.formats.sources.Split` is one."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def paths(self) -> Sequence[Path | StoredImage] | None: ...  # may have a `take` for many at once
    @property
    def images(self) -> NDArray[np.uint8] | None: ...


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


class ImageReader:
    """Reads the images of a source in a given order, as batches of one size.

    Args:
        source: files are resized to the size of `preprocess`; arrays keep their size.
        workers: what decodes files: a number of workers, "auto", or running ones, which are not closed.
        corrupt: the error policy, and where unreadable files are recorded.
        device: where an array is stored, once, before the first batch; and where images go on a GPU.
    """

    def __init__(
        self,
        source: ImageSource,
        preprocess: Preprocess,
        *,
        workers: int | Literal["auto"] | Workers = 0,
        corrupt: CorruptFiles | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.source, self.preprocess = source, preprocess
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

    def batches(self, requests: Iterable[tuple[Tensor, Sequence[LoadImage] | None]]) -> Iterator[Batch]:
        """A batch for each request, in order: indices, and how to load each file (by default as prediction
        does)."""
        if self.stored is not None:
            for indices, _ in requests:
                images = self.stored[indices.to(self.stored.device, non_blocking=True)]
                yield Batch(indices, images, torch.ones(len(indices)))
            return
        remaining = iter(requests)
        if (first_request := next(remaining, None)) is None:
            return
        waiting: deque[Tensor] = deque()  # the indices of batches whose tasks have been taken
        tasks = self._tasks(chain([first_request], remaining), waiting)
        ahead = AHEAD * -(-len(first_request[0]) // self.workers.chunk)
        with closing(self.workers.map(tasks, ahead)) as results:
            for first in results:
                indices = waiting.popleft()
                rest = islice(results, -(-len(indices) // self.workers.chunk) - 1)
                yield self._collect(indices, chain([first], rest))

    def close(self) -> None:
        """Stop the workers, if they are its own."""
        if self.own_workers:
            self.workers.close()

    def _tasks(
        self, requests: Iterable[tuple[Tensor, Sequence[LoadImage] | None]], waiting: deque[Tensor]
    ) -> Iterator[Task]:
        """The files of each request in tasks of a few images."""
        assert self.source.paths is not None
        plain = partial(read_pixels, preprocess=self.preprocess)
        for indices, loads in requests:
            waiting.append(indices)
            numbers = indices.tolist()
            paths = _pick(self.source.paths, numbers)
            items = list(zip(paths, loads or [plain] * len(numbers), strict=True))
            for start in range(0, len(items), self.workers.chunk):
                yield Task(read_or_reason, items[start : start + self.workers.chunk])

    def _collect(self, indices: Tensor, parts: Iterable[Results]) -> Batch:
        """A batch of what was read. Unreadable files are recorded here: in the order of the requests, not
        in that of the workers."""
        H, W = self.preprocess.target
        if self.preprocess.keeps_shape:
            return self._collect_shapes(indices, parts)
        pin = self.device.type == "cuda"  # torch keeps pinned memory, and knows when the copy has been made
        images = torch.empty(len(indices), H, W, self.preprocess.channels, dtype=torch.uint8, pin_memory=pin)
        valid, at = torch.ones(len(indices)), 0
        for part in parts:
            if (pixels := part.uniform()) is not None:
                # By NumPy, in this thread: a copy by torch wakes a thread for each core, and between two
                # copies they spin, on cores that the workers need.
                images.numpy()[at : at + len(pixels)] = pixels.numpy()
            for number, result in enumerate(() if pixels is not None else part.unpack(), at):
                if isinstance(result, str):
                    self._record(int(indices[number]), result)
                    images[number], valid[number] = MID_GRAY, 0.0
                else:
                    images[number] = torch.from_numpy(np.require(result, requirements="W"))
            at += len(part.values)
            self.workers.release(part)
        return Batch(indices, images.to(self.device, non_blocking=True).permute(0, 3, 1, 2), valid)

    def _collect_shapes(self, indices: Tensor, parts: Iterable[Results]) -> Batch:
        """The same for images that keep their shapes."""
        gray = np.full((*self.preprocess.target, self.preprocess.channels), MID_GRAY, dtype=np.uint8)
        arrays: list[NDArray[np.uint8]] = []
        valid = torch.ones(len(indices))
        for part in parts:
            for result in part.unpack():
                if isinstance(result, str):
                    self._record(int(indices[len(arrays)]), result)
                    valid[len(arrays)] = 0.0
                arrays.append(gray if isinstance(result, str) else result.copy())
            self.workers.release(part)
        flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        flat = flat.pin_memory() if self.device.type == "cuda" else flat
        shapes = [array.shape for array in arrays]
        return Batch(indices, flat.to(self.device, non_blocking=True), valid, shapes)

    def _record(self, index: int, reason: str) -> None:
        """Note a file that cannot be read, or raise, as the policy says."""
        assert self.source.paths is not None
        if self.corrupt.policy != "error":
            self.corrupt.reasons.setdefault(printable(self.source.names[index]), printable(reason))
            return
        name, reason = printable(self.source.paths[index]), reason.rstrip(".")
        reason = reason if name in reason else f"{name} cannot be read: {reason}"
        raise InputError(f"{reason}. To skip unreadable files, use {setting('corrupt', 'skip')}.")


def _pick(paths: Sequence[Path | StoredImage], numbers: list[int]) -> Sequence[Path | StoredImage]:
    """Some of the paths. A lazy sequence finds many at once in a fraction of the time."""
    take = getattr(paths, "take", None)
    return [paths[number] for number in numbers] if take is None else list(take(np.array(numbers)))


def start_workers(
    requested: int | Literal["auto"], images: int, preprocess: Preprocess, device: torch.device
) -> Workers:
    """Workers for a number of image files; the processes among them start when there is a task."""
    H, W = preprocess.target
    size = H * W * preprocess.channels
    plan = choose_workers(requested, images, image_bytes=size, busy=device.type == "cpu")
    return Workers(plan, image_bytes=size)


def read_or_reason(path: Path | StoredImage, load: LoadImage) -> NDArray[np.uint8] | str:
    """The pixels of one image file, or the reason why there are none."""
    try:
        return load(path)
    except (ValueError, OSError) as error:  # InputError is a ValueError, and so is a NUL byte in a path
        return printable(error, 400)


def read_pixels(
    image: Any, preprocess: Preprocess, *, min_size: MinSize | None = None, limit_memory: bool = False
) -> NDArray[np.uint8]:
    """The pixels that the model sees, uint8 (H, W, C), of a path, a PIL image or an array.

    Args:
        min_size: see `decode_image`; for a path only.
        limit_memory: whether the memory for resizing is limited before a file is decoded.
    """
    with suppress_warnings():
        if isinstance(image, PackedImage) and image.is_array:
            image = image.load(preprocess.channels)
        elif isinstance(image, (str, os.PathLike, StoredImage)):
            limited = preprocess if limit_memory else None
            image = open_image(_as_path(image), min_size, preprocess=limited)
        return preprocess.pixels(image)


def _as_path(image: Any) -> str | StoredImage:
    return image if isinstance(image, StoredImage) else os.fsdecode(image)
