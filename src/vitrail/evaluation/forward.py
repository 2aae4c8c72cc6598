"""The forward pass over a split: logits, features and out-of-distribution scores of every image.

The number of processes does not change the outputs, and the batch size only their rounding: matrix products
of another shape add in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.evaluation.selection import Progress
from vitrail.fast.halving import FittingBatches
from vitrail.images.formats.sources import Split
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.normalize import normalize_batch
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import Workers
from vitrail.model.device import eval_mode
from vitrail.model.model_memory import check_fits, forward_bytes
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.own_shape import reading_preprocess

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.fast.inference_routes import Accelerated

BATCH = 128
MAX_BYTES = 64 << 30  # of features in memory


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
    reader = Reader(
        resize_split(split, preprocess), preprocess, workers=workers, corrupt=corrupt, device=parameter.device
    )
    outputs: Tensor | None = None
    valid = torch.zeros(len(split))
    done, fitting = 0, FittingBatches()

    def compute_rows(images: Tensor | list[Tensor]) -> Tensor:
        if isinstance(images, Tensor):
            return forward(normalize_batch(images, preprocess, parameter))
        return forward([normalize_batch(image[None], preprocess, parameter)[0] for image in images])

    try:
        with eval_mode(model):
            for part in reader.batches((0, chunk) for chunk in chunks):
                images = part.images if part.shapes is None else part.unpack()
                rows = torch.cat([one.float().cpu() for one in fitting(compute_rows, images)])
                outputs = torch.zeros(len(split), *rows.shape[1:]) if outputs is None else outputs
                outputs[part.indices], valid[part.indices] = rows, part.valid
                done += len(part.indices)
                progress(done)
    finally:
        reader.close()
    return (torch.zeros(len(split), 1) if outputs is None else outputs), valid


def resize_split(split: Split, preprocess: Preprocess) -> Split:
    """Resize the arrays of a split to the model's image size, once, as image files are resized."""
    if split.images is None or split.images.shape[1:3] == preprocess.target:
        return split
    import numpy as np

    images = np.stack([preprocess.pixels(image) for image in split.images])
    return Split(split.labels, split.names, split.paths, images)


# ---- logits and features --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabeledFeatures:
    """Features (N, layers, parts, D) of images, and their labels (N,)."""

    features: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class SplitOutputs:
    """The outputs of a model for the N images of a split."""

    logits: Tensor
    """(N, K)"""
    features: Tensor
    """(N, layers, parts, D): the class token, if there is one, and the mean of the patches."""
    ood: NDArray[np.float32] | None
    """(N,): above 1 for images out of distribution; None if the file has no statistics of its features."""
    valid: NDArray[np.bool_]
    """(N,): False for images that could not be read."""

    def labeled(self, labels: NDArray[np.int64]) -> LabeledFeatures:
        """The features of the images that could be read, with their labels."""
        return LabeledFeatures(self.features[self.valid], torch.from_numpy(labels)[self.valid])


def run_split(
    bundle: Bundle,
    images: Split,
    *,
    layers: Sequence[int],
    name: str,
    batch: int,
    workers: int | Literal["auto"],
    corrupt: CorruptFiles,
    progress: Progress,
    accelerated: Accelerated | None = None,
) -> SplitOutputs:
    """Run the model on a split, shared among the processes of torch.distributed.

    Args:
        layers: the blocks whose features are collected; an accelerated model has none.
        name: of the split, for `progress`.
    """
    config, device = bundle.model.config, next(bundle.model.parameters()).device
    parts = 1 + config.class_token
    sizes = [config.classes, len(layers) * parts * config.width]
    sizes.append(int(bundle.statistics is not None))
    if 4 * sum(sizes) * len(images) > MAX_BYTES:
        raise InputError(
            f"Features of {sum(sizes):,} numbers for each of {len(images):,} images do not fit in memory; "
            "probe fewer layers or fewer images."
        )
    if device.type == "cpu":
        count = min(batch, len(images))
        do = "use a smaller batch or image size"
        check_fits(forward_bytes(config, count), config, count, "An evaluation", do)
    distributed = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    collects = accelerated is not None or layers or bundle.statistics is not None
    rows, valid = run_model(
        bundle.model,
        images,
        reading_preprocess(bundle),
        compute=_build_collector(bundle, layers, accelerated) if collects else None,
        batch=batch,
        rank=rank,
        ranks=ranks,
        workers=workers,
        corrupt=corrupt,
        progress=lambda done: progress(name, min(done * ranks, len(images)), len(images)),
    )
    if ranks > 1:
        rows, valid = _all_reduce(rows, valid, sum(sizes), corrupt, device)
    logits, flat, scores = rows.split([*sizes[:2], rows.shape[1] - sum(sizes[:2])], dim=1)
    features = flat.reshape(len(rows), len(layers), parts, config.width)
    ood = scores[:, 0].numpy() if bundle.statistics is not None else None
    return SplitOutputs(logits, features, ood, valid.numpy() > 0)


def _build_collector(
    bundle: Bundle, layers: Sequence[int], accelerated: Accelerated | None
) -> Callable[[Any], Tensor]:
    """A function from images to rows: logits, features, and the score of images out of distribution."""
    model, config, statistics = bundle.model, bundle.model.config, bundle.statistics

    def collect(images: Tensor | list[Tensor]) -> Tensor:
        if isinstance(images, list):  # of different shapes
            return torch.cat([collect(image[None]) for image in images])
        columns: list[Tensor] = []
        if accelerated is not None:
            pooled, logits = accelerated.outputs(images)
            columns += [logits.float()] if config.classes else []
        else:
            encoded = model.encode(images, layers=layers)
            pooled = encoded.pooled
            columns += [model.logits(model.head(pooled))] if config.classes else []
            for tokens in (encoded.layers[layer] for layer in layers):
                columns += [tokens.prefix[:, :1].flatten(1)] if config.class_token else []
                columns.append(tokens.patches.flatten(1, -2).mean(dim=1))
        if statistics is not None:
            scores = torch.from_numpy(statistics.scores(pooled.float().cpu().numpy()))
            columns.append(scores.float()[:, None].to(pooled.device))
        return torch.cat(columns, dim=1) if columns else pooled[:, :0].float()

    return collect


def _all_reduce(
    rows: Tensor, valid: Tensor, columns: int, corrupt: CorruptFiles, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sum the results of all processes, and merge their lists of corrupt files."""
    if rows.shape[1] != columns:  # a process without a batch does not know the width of a row
        rows = torch.zeros(len(rows), columns)
    sums = []
    for tensor in (rows, valid):
        on_device = tensor.to(device)
        dist.all_reduce(on_device)
        sums.append(on_device.cpu())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, corrupt.reasons)
    for names in gathered:
        corrupt.reasons |= names
    return sums[0], sums[1]
