"""Images read in order as uint8 pixels: files decoded by threads ahead of use, arrays taken from memory.

Threads are enough because Pillow releases the interpreter lock while it decodes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError, printable
from vitrail.images.decode import open_image, suppress_warnings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.images.preprocess import Preprocess

AHEAD = 3  # batches that are decoded before they are needed
MID_GRAY = 128  # the pixel value of an image that could not be read

T = TypeVar("T")
Policy = Literal["error", "skip", "warn"]
LoadImage = Callable[[Path], "NDArray[np.uint8]"]
"""From the path of an image file to its pixels (H, W, C)."""


class ImageSource(Protocol):
    """Images to read: files or an array. `vitrail.data.sources.Split` is one."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def paths(self) -> Sequence[Path] | None: ...
    @property
    def images(self) -> NDArray[np.uint8] | None: ...


@dataclass(frozen=True)
class Batch:
    """Images of one step, or of a part of one."""

    indices: Tensor
    """(b,) int64, their positions in the source."""
    images: Tensor
    """(b, C, H, W) uint8."""
    valid: Tensor
    """(b,) 1 where the image could be read, 0 where it could not; such an image is gray."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, without waiting for it."""
        parts = (self.indices, self.images, self.valid)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))

    def clone(self) -> Batch:
        return Batch(self.indices.clone(), self.images.clone(), self.valid.clone())

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
        workers: threads that decode files; 0 decodes in the calling thread.
        corrupt: the error policy, and where unreadable files are recorded.
        device: where an array is stored, once, before the first batch.
    """

    def __init__(
        self,
        source: ImageSource,
        preprocess: Preprocess,
        *,
        workers: int = 0,
        corrupt: CorruptFiles | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.source, self.preprocess = source, preprocess
        self.corrupt = CorruptFiles() if corrupt is None else corrupt
        self.pool = ThreadPoolExecutor(workers) if workers and source.paths is not None else None
        self.stored = None
        if source.images is not None:
            self.stored = torch.from_numpy(source.images).permute(0, 3, 1, 2).to(device)

    def load(self, path: Path) -> NDArray[np.uint8]:
        """The pixels of an image file, exactly as prediction and evaluation see them."""
        return read_pixels(path, self.preprocess)

    def batches(self, requests: Iterable[tuple[Tensor, Sequence[LoadImage] | None]]) -> Iterator[Batch]:
        """A batch for each request, in order: indices, and how to load each file (`load` by default)."""
        if self.stored is not None:
            for indices, _ in requests:
                images = self.stored[indices.to(self.stored.device, non_blocking=True)]
                yield Batch(indices, images, torch.ones(len(indices)))
            return
        for indices, futures in look_ahead(map(self._start, requests), AHEAD):
            yield self._collect(indices, [future.result() for future in futures])

    def close(self) -> None:
        """Stop the threads without waiting for images that are no longer needed."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _start(
        self, request: tuple[Tensor, Sequence[LoadImage] | None]
    ) -> tuple[Tensor, list[Future[NDArray[np.uint8] | str]]]:
        indices, loads = request
        loads = [self.load] * len(indices) if loads is None else loads
        numbered = zip(indices.tolist(), loads, strict=True)
        return indices, [submit(self.pool, self.read, index, load) for index, load in numbered]

    def read(self, index: int, load: LoadImage) -> NDArray[np.uint8] | str:
        """The pixels of one image; if it cannot be read and the policy allows that, the reason."""
        assert self.source.paths is not None
        path = self.source.paths[index]
        try:
            with suppress_warnings():
                return load(path)
        except (ValueError, OSError) as error:  # InputError is a ValueError, and so is a NUL byte in a path
            if self.corrupt.policy != "error":
                return printable(error)
            name, reason = printable(path), printable(error, 400).rstrip(".")
            reason = reason if name in reason else f"{name} cannot be read: {reason}"
            raise InputError(f"{reason}. To skip unreadable files, use --set corrupt=skip.") from error

    def _collect(self, indices: Tensor, results: list[NDArray[np.uint8] | str]) -> Batch:
        """A batch of what was read. Unreadable files are recorded here: in the order of the requests, not
        in that of the threads."""
        H, W = self.preprocess.target
        gray = np.full((H, W, self.preprocess.channels), MID_GRAY, dtype=np.uint8)
        for index, result in zip(indices.tolist(), results, strict=True):
            if isinstance(result, str):
                self.corrupt.reasons.setdefault(printable(self.source.names[index]), result)
        images = np.stack([gray if isinstance(result, str) else result for result in results])
        valid = torch.tensor([0.0 if isinstance(result, str) else 1.0 for result in results])
        return Batch(indices, torch.from_numpy(images).permute(0, 3, 1, 2), valid)


def read_pixels(image: Any, preprocess: Preprocess, **options: Any) -> NDArray[np.uint8]:
    """The pixels that the model sees, uint8 (H, W, C), of a path, a PIL image or an array.

    Args:
        options: for `open_image`, where the image is a path.
    """
    with suppress_warnings():
        if isinstance(image, (str, os.PathLike)):
            image = open_image(os.fsdecode(image), **options)
        return preprocess.pixels(image)


# ---- reading ahead --------------------------------------------------------------------------


def submit(pool: ThreadPoolExecutor | None, function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread of the pool; without a pool, at once."""
    if pool is not None:
        return pool.submit(function, *args)
    done: Future[T] = Future()
    try:
        done.set_result(function(*args))
    except Exception as error:
        done.set_exception(error)
    return done


def look_ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """The items in order, each taken from the iterator `count` items before it is needed.

    If taking an item submits work to a pool, that work is done in the meantime.
    """
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
