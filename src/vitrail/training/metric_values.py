"""Running sums of an epoch's training metrics. They stay on the device: reading them makes it wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitrail.base.errors import VitrailError, printable
from vitrail.model.device import ComputeDevice
from vitrail.training.parallel import ProcessGroup

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

    def remember_step(self, step: int, images: Tensor, skipped: Tensor) -> None:
        """Remember the indices of a step's images, for the message of `check_divergence`."""
        self.recent.append((step, images, skipped))

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
