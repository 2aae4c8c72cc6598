"""The forward pass over a split: independent of the number of processes.

The batch size changes the outputs by rounding only: matrix products of another shape add in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.fast.halving import FittingBatches
from vitrail.images.formats.sources import Split
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.normalize import normalize_batch
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import Workers
from vitrail.model.modes import eval_mode

BATCH = 128


def run_model(
    model: nn.Module,
    split: Split,
    preprocess: Preprocess,
    *,
    compute: Callable[[Any], Tensor] | None = None,
    batch: int = BATCH,
    rank: int = 0,
    ranks: int = 1,
    workers: int | Literal["auto"] | Workers = "auto",
    corrupt: CorruptFiles | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """The model's outputs (N, ...) on the CPU, and a mask (N,) that is 0 for unreadable images.

    The batches do not depend on the number of processes. Each process runs every `ranks`-th batch and leaves
    zeros in the other rows, so the sum over all processes is the complete result.

    Args:
        compute: maps a batch of images to outputs; the model itself by default. With a preprocessing that
            keeps the shape of images, a batch is a list of them.
        workers: what decodes files: a number, "auto", or running workers.
        progress: called with the number of images done so far; it may raise to stop.
    """
    parameter = next(model.parameters())
    forward = compute or model
    chunks = torch.arange(len(split)).split(batch)[rank::ranks]
    requests: Iterator[tuple[int, Tensor]] = ((0, chunk) for chunk in chunks)
    reader = Reader(
        resize_split(split, preprocess), preprocess, workers=workers, corrupt=corrupt, device=parameter.device
    )
    outputs: Tensor | None = None
    valid = torch.zeros(len(split))
    done, fitting = 0, FittingBatches()

    def compute_rows(images: Tensor | list[Tensor]) -> Tensor:
        return forward(_as_input(images, preprocess, parameter))

    try:
        with eval_mode(model):
            for part in reader.batches(requests):
                images = part.images if part.shapes is None else part.unpack()
                rows = torch.cat([one.float().cpu() for one in fitting(compute_rows, images)])
                outputs = torch.zeros(len(split), *rows.shape[1:]) if outputs is None else outputs
                outputs[part.indices], valid[part.indices] = rows, part.valid
                done += len(part.indices)
                progress(done)
    finally:
        reader.close()
    return (torch.zeros(len(split), 1) if outputs is None else outputs), valid


def _as_input(images: Tensor | list[Tensor], preprocess: Preprocess, like: Tensor) -> Tensor | list[Tensor]:
    """Images as the model takes them: one tensor, or a list of images of different shapes."""
    if isinstance(images, Tensor):
        return normalize_batch(images, preprocess, like)
    return [normalize_batch(image[None], preprocess, like)[0] for image in images]


def resize_split(split: Split, preprocess: Preprocess) -> Split:
    """Resize the arrays of a split to the model's image size, once, as image files are resized."""
    if split.images is None or split.images.shape[1:3] == preprocess.target:
        return split
    import numpy as np

    images = np.stack([preprocess.pixels(image) for image in split.images])
    return Split(split.labels, split.names, split.paths, images)
