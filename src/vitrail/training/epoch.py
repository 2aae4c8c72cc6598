"""What happens after an epoch: the held-out images are evaluated, and a run may stop early."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import VitrailError, printable
from vitrail.evaluation.forward import BATCH, run_model
from vitrail.evaluation.trained_images import fit_statistics
from vitrail.images.formats.sources import Dataset, Split
from vitrail.images.loader import CorruptFiles
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import Workers
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice
from vitrail.training.objective import correct_predictions
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.own_shape import reading_preprocess
from vitrail.weights.bundle.scores import DEFAULT_THRESHOLD, Scores, choose_thresholds

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


# ---- training metrics -----------------------------------------------------------------------

LOG_EVERY = 10  # steps between reads of what is on the device
LOG_SECONDS = 10  # a slow step is reported when this much time has passed since the last report
_MAX_SKIPPED = 3  # steps in a row
_MAX_SKIPPED_FP16 = 20  # where each skipped step halves the scale of the loss, at first 2^16


class Diverged(VitrailError):
    """The gradient was NaN or infinite for several steps in a row."""


class EpochMetrics:
    """Loss, correct predictions and images of an epoch, and the steps that were skipped."""

    def __init__(self, compute: ComputeDevice, ranks: ProcessGroup) -> None:
        device, self.ranks = compute.device, ranks
        self.max_skipped = _MAX_SKIPPED_FP16 if compute.dtype == torch.float16 else _MAX_SKIPPED
        # loss, correct, images, skipped steps
        self.sums = torch.zeros(4, dtype=compute.sum_dtype, device=device)
        self.in_a_row = torch.zeros((), device=device)
        self.worst = torch.zeros((), device=device)
        self.recent: deque[tuple[int, Tensor, Tensor]] = deque(maxlen=2 * LOG_EVERY)  # step, images, skipped

    def add_images(self, losses: Tensor, correct: Tensor, valid: Tensor) -> None:
        """Add each image's loss, whether it was classified correctly, and whether it counts; all (b,)."""
        with torch.no_grad():
            counts = valid * losses.isfinite()  # NaN and infinity do not count: their step is skipped
            loss = losses.where(counts > 0, 0.0).sum()
            self.sums[:3] += torch.stack([loss, (correct * counts).sum(), counts.sum()]).to(self.sums.dtype)

    def add_step(self, skipped: Tensor) -> None:
        """Add a step; `skipped` is 1 where it changed no weight. In place, so that it can be captured."""
        self.in_a_row.add_(skipped).mul_(skipped)
        torch.maximum(self.worst, self.in_a_row, out=self.worst)
        self.sums[3] += skipped

    def totals(self) -> tuple[float, float, int, int]:
        """Mean loss, accuracy, images and skipped steps, over all processes."""
        loss, correct, images, skipped = self.ranks.sum(self.sums.clone()).tolist()
        count = max(images, 1)
        return loss / count, correct / count, int(images), int(skipped / self.ranks.count)

    def check_divergence(self, names: Sequence[str]) -> None:
        """Raise Diverged after too many skipped steps in a row; `names` are those of the images."""
        if self.worst < self.max_skipped:
            return
        bad = [(step, images) for step, images, skipped in self.recent if skipped][:_MAX_SKIPPED]
        steps = ", ".join(str(step) for step, _ in bad)
        some = [names[int(i)] for _, images in bad for i in images[:2]]
        more = " and more" * (self.max_skipped > len(bad) == _MAX_SKIPPED)
        raise Diverged(
            f"training diverged: the gradient was NaN or infinite {self.max_skipped} times in a row, at "
            f"steps {steps}{more}, whose images include {printable(', '.join(some))}. The last checkpoint is "
            "unchanged; use a lower learning rate, a longer warm-up, or fp32."
        )

    def start_epoch(self) -> None:
        self.sums.zero_()

    # ---- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The sums of every process (ranks, 4): added up now, they would be rounded differently later."""
        rows = self.sums.new_zeros(self.ranks.count, len(self.sums))
        rows[self.ranks.rank] = self.sums
        return {"sums": self.ranks.sum(rows), "in_a_row": self.in_a_row.clone(), "worst": self.worst.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        rows = state["sums"]
        if len(rows) != self.ranks.count:  # another number of processes than before: the first takes all
            rows = torch.cat([rows.sum(0, keepdim=True), rows.new_zeros(self.ranks.count, rows.shape[1])])
        self.sums.copy_(rows[self.ranks.rank])
        self.in_a_row.copy_(state["in_a_row"])
        self.worst.copy_(state["worst"])


# ---- what goes into the model file at the end -----------------------------------------------

MAX_IMAGES = 5000  # of the training set, whose features are computed
MAX_FRACTION = 0.05  # of the bytes of the weights, for the feature statistics


def initial_scores(data: Dataset, settings: TrainConfig) -> Scores:
    """Softmax, or sigmoid with binary cross-entropy; multi-label models start with thresholds of 0.5."""
    if settings.loss != "bce":
        return Scores()
    thresholds = (DEFAULT_THRESHOLD,) * len(data.classes) if data.multilabel else None
    return Scores(activation="sigmoid", thresholds=thresholds)


def complete_bundle(
    bundle: Bundle, plan: RunPlan, workers: Workers, on_batch: Callable[[int], None]
) -> Bundle:
    """The bundle of a finished run with thresholds of multi-label scores, and statistics of its features.

    Both need a validation set: the test set must not choose anything.

    Args:
        on_batch: called with the number of images done; it may raise to stop.
    """
    data = plan.data
    if data.val is None:
        return bundle
    train = data.train  # at most MAX_IMAGES, evenly spaced, so that sorted classes keep their fractions
    if len(train) > MAX_IMAGES:
        train = train.take(np.linspace(0, len(train) - 1, MAX_IMAGES).astype(np.int64))
    features, _, labels = _outputs(bundle, train, plan, workers, on_batch)
    val_features, val_logits, val_labels = _outputs(bundle, data.val, plan, workers, on_batch)
    size = sum(tensor.nbytes for tensor in bundle.model.state_dict().values())
    statistics = fit_statistics(features, labels, val_features, int(MAX_FRACTION * size))
    scores = _choose_scores(bundle.scores, val_logits, val_labels)
    return replace(bundle, scores=scores, statistics=statistics)


def with_thresholds(
    bundle: Bundle, plan: RunPlan, workers: Workers, on_batch: Callable[[int], None]
) -> Bundle:
    """The bundle of the last weights, with thresholds of multi-label scores of its own."""
    if plan.data.val is None:
        return bundle
    _, logits, labels = _outputs(bundle, plan.data.val, plan, workers, on_batch)
    return replace(bundle, scores=_choose_scores(bundle.scores, logits, labels))


def _choose_scores(scores: Scores, logits: NDArray[np.float32], labels: NDArray[np.int64]) -> Scores:
    return (
        scores if scores.thresholds is None else replace(scores, thresholds=choose_thresholds(logits, labels))
    )


def _outputs(
    bundle: Bundle, split: Split, plan: RunPlan, workers: Workers, on_batch: Callable[[int], None]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Pooled vectors (N, D), logits (N, K) and labels of the images that can be read.

    In the precision of the run, and equal in all processes, whatever their number.
    """
    device, ranks = plan.compute, plan.ranks
    model = copy.deepcopy(bundle.model).to(device.device)
    width, classes = model.config.pooled_width, model.config.classes

    def compute(images: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        with device.autocast():
            pooled = model.pool_images(images)
            return torch.cat([pooled, model.head(pooled)], dim=1).float()

    rows, valid = run_model(
        model,
        split,
        reading_preprocess(bundle, model),
        compute=compute,
        rank=ranks.rank,
        ranks=ranks.count,
        workers=workers,
        corrupt=CorruptFiles("skip"),
        progress=on_batch,
    )
    if rows.shape[1] != width + classes:  # there was no batch for this process
        rows = torch.zeros(len(split), width + classes)
    rows, valid = (ranks.sum(part.to(device.device)).cpu() for part in (rows, valid))
    kept = valid.numpy() > 0
    return rows.numpy()[kept, :width], rows.numpy()[kept, width:], split.labels[kept]
