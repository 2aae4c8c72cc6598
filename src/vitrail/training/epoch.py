"""What happens after an epoch: the held-out images are evaluated, and a run may stop early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from vitrail.evaluation.forward import BATCH, run_model
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
    batch = BATCH
    if compute.device.type == "cuda":  # small models would wait for the launches of their kernels
        batch = min(4096, max(128, 2 ** (_GPU_TOKENS // model.config.tokens).bit_length() // 2))
    with compute.autocast():
        logits, valid = run_model(
            model,
            split,
            preprocess,
            batch=batch,
            rank=ranks.rank,
            ranks=ranks.count,
            workers=workers,
            corrupt=corrupt,
            progress=on_batch,
        )
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


def early_stop(history: Sequence[Mapping[str, Any]], patience: int | None) -> str | None:
    """Why a run stops now, as a sentence; None if it continues. A resumed run stops at the same epoch.

    Args:
        history: the rows of metrics.jsonl; those that were not evaluated have no val_accuracy.
        patience: after how many epochs without a better validation accuracy it stops.
    """
    evaluated = [row for row in history if "val_accuracy" in row]
    if patience is None or not evaluated:
        return None
    best = max(evaluated, key=lambda row: row["val_accuracy"])  # the first of equals
    last = evaluated[-1]["epoch"]
    if last - best["epoch"] < patience:
        return None
    return (
        f"Stopped early after epoch {last}: the validation accuracy was {best['val_accuracy']:.2%} after "
        f"epoch {best['epoch']}, and not higher since (patience {patience})."
    )
