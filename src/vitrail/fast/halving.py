"""Forward passes that fit in the memory of a GPU: half the batch where it runs out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from vitrail.base.errors import DeviceWarning, InputError, option
from vitrail.base.machine import is_out_of_memory

T = TypeVar("T")


class FittingBatches:
    """Calls a forward pass with as many images as fit, and remembers how many these are."""

    def __init__(self) -> None:
        self.limit: int | None = None
        """The most images at once; None as long as memory has not run out."""
        self._told = False

    def __call__(self, forward: Callable[[Any], T], images: Sequence[Any] | torch.Tensor) -> Iterator[T]:
        """The results for consecutive parts of a batch; for all of it at once, if that fits.

        A GPU without memory for a single image is an error. On a CPU torch's own error passes.
        """
        at = 0
        while at < len(images):
            part = images[at : at + (self.limit or len(images))]
            result = self._attempt(forward, part)
            if result is not None:
                yield result[0]
                at += len(part)
                continue
            torch.cuda.empty_cache()
            if len(part) == 1:
                raise InputError(
                    "The GPU's memory ran out with a single image; use a smaller size or model, close other "
                    f"programs on the GPU, or use {option('device', 'cpu')}."
                )
            self.limit = len(part) // 2

    def _attempt(self, forward: Callable[[Any], T], part: Any) -> tuple[T] | None:
        """The result; None if the GPU's memory ran out. What the error kept alive is freed by then."""
        try:
            result = (forward(part),)
        except (RuntimeError, MemoryError) as error:
            if not is_gpu_out_of_memory(error):
                raise
            return None
        if self.limit is not None and not self._told:
            self._told = True
            warnings.warn(
                f"The GPU's memory ran out: it computes {self.limit:,} image{'s' * (self.limit > 1)} at once "
                "from now on.",
                DeviceWarning,
                stacklevel=4,
            )
        return result


def is_gpu_out_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU's memory ran out, also while a CUDA graph was captured, which raises another error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or ("CU" in str(error) and is_out_of_memory(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
