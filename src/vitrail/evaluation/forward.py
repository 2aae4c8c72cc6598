"""Every picture of a split through a model, once, the same whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from vitrail.data.loader import Corrupt, Reader
from vitrail.data.sources import Split
from vitrail.model.modes import evaluating
from vitrail.preprocess import Preprocess

BATCH = 128


def outputs_of(
    model: nn.Module,
    split: Split,
    preprocess: Preprocess,
    *,
    compute: Callable[[Tensor], Tensor] | None = None,
    batch: int = BATCH,
    rank: int = 0,
    ranks: int = 1,
    workers: int = 2,
    corrupt: Corrupt | None = None,
    ahead: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """The model's output for every picture, (N, ...) on the CPU, and which pictures could be read (N,).

    Batches are the same for any number of processes; each takes every `ranks`-th of them, and its rows
    of the result are filled in, the others zero: adding up the processes' results gives the whole.

    Args:
        compute: what is wanted of a batch, instead of the model's logits.
        ahead: told how many pictures are done; it may raise to stop.
    """
    parameter = next(model.parameters())
    run = compute or model
    chunks = torch.arange(len(split)).split(batch)[rank::ranks]
    wanted: Iterator[tuple[int, Tensor]] = ((0, chunk) for chunk in chunks)
    reader = Reader(
        sized(split, preprocess), preprocess, workers=workers, corrupt=corrupt, device=parameter.device
    )
    out: Tensor | None = None
    kept = torch.zeros(len(split))
    done = 0
    try:
        with evaluating(model):
            for part in reader.batches(wanted):
                rows = run(inputs_of(part.images, preprocess, parameter)).float().cpu()
                out = torch.zeros(len(split), *rows.shape[1:]) if out is None else out
                out[part.indices], kept[part.indices] = rows, part.kept
                done += len(part.indices)
                ahead(done)
    finally:
        reader.close()
    return (torch.zeros(len(split), 1) if out is None else out), kept


def inputs_of(levels: Tensor, preprocess: Preprocess, like: Tensor) -> Tensor:
    """8-bit levels (B, C, H, W) as a model takes them, on the device and in the dtype of a parameter."""
    mean, std = (
        torch.tensor(values, device=like.device).view(1, -1, 1, 1)
        for values in (preprocess.mean, preprocess.std)
    )
    return ((levels.to(like.device).float() * preprocess.scale - mean) / std).to(like.dtype)


def sized(split: Split, preprocess: Preprocess) -> Split:
    """Arrays of another size than the model's are brought to it once, as pictures of files are."""
    if split.images is None or split.images.shape[1:3] == preprocess.target:
        return split
    import numpy as np

    images = np.stack([preprocess.pixels(image) for image in split.images])
    return Split(split.labels, split.names, split.paths, images)
