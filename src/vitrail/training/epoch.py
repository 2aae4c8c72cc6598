"""Evaluation after an epoch: loss and accuracy on the held-out images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from vitrail.evaluation.forward import run_model
from vitrail.images.formats.sources import Split
from vitrail.images.loader import CorruptFiles
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import Workers
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice
from vitrail.training.objective import correct_predictions
from vitrail.training.parallel import ProcessGroup

_ONE_PROCESS = ProcessGroup()
_GPU_TOKENS = 2**18  # in a batch, about


def evaluate_epoch(
    model: ViT,
    split: Split,
    preprocess: Preprocess,
    compute: ComputeDevice,
    *,
    ranks: ProcessGroup = _ONE_PROCESS,
    workers: int | Literal["auto"] | Workers = "auto",
    corrupt: CorruptFiles | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Loss and accuracy on a split, equal to the last digit for any number of processes.

    Args:
        corrupt: what to do about unreadable files; their names are added to it, in all processes.
        on_batch: called with the number of images done; it may raise to stop.
    """
    corrupt = CorruptFiles() if corrupt is None else corrupt
    how: dict[str, Any] = {"rank": ranks.rank, "ranks": ranks.count, "workers": workers}
    if compute.device.type == "cuda":  # small models would wait for the launches of their kernels
        how["batch"] = min(4096, max(128, 2 ** (_GPU_TOKENS // model.config.tokens).bit_length() // 2))
    with compute.autocast():
        logits, valid = run_model(model, split, preprocess, corrupt=corrupt, progress=on_batch, **how)
    corrupt.reasons = ranks.union(corrupt.reasons)
    if logits.shape[1] != model.config.classes:  # there was no batch for this process
        logits = torch.zeros(len(split), model.config.classes)
    logits, valid = ranks.sum(logits), ranks.sum(valid)  # on the CPU, where they are
    labels = torch.from_numpy(split.labels).long()
    if labels.ndim == 2:
        losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
    else:
        losses = F.cross_entropy(logits, labels, reduction="none")
    correct = correct_predictions(logits, labels)
    count = valid.sum().clamp(min=1)
    return {
        "val_loss": ((losses * valid).double().sum() / count).item(),
        "val_accuracy": ((correct * valid).double().sum() / count).item(),
        "val_images": int(valid.sum()),
    }
