"""What the steps of an epoch add up to, counted on the device, where looking makes it wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitrail.errors import VitrailError, printable
from vitrail.training.parallel import Ranks

LOOK_EVERY = 10  # steps between looks at what is on the device
MOST_BAD = 3


class Diverged(VitrailError):
    """The loss or the gradient was no number, several times in a row."""


class Tally:
    """Losses, right answers and pictures of an epoch, and the steps that were left out."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.device, self.ranks = device, ranks
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, right, seen, steps left out
        self.in_a_row = torch.zeros((), device=device)
        self.worst = torch.zeros((), device=device)
        self.recent: deque[tuple[int, Tensor, Tensor]] = deque(maxlen=2 * LOOK_EVERY)  # step, pictures, bad

    def add_pictures(self, each: Tensor, right: Tensor, kept: Tensor) -> None:
        """Loss of each picture, whether it is right, and whether it counts; all (b,)."""
        with torch.no_grad():
            counts = kept * each.isfinite()  # what is no number is left out, as its step is
            loss = each.where(counts > 0, 0.0).sum()
            self.sums[:3] += torch.stack([loss, (right * counts).sum(), counts.sum()]).double()

    def add_step(self, step: int, pictures: Tensor, bad: Tensor) -> None:
        """A step that was taken, or left out where `bad` is 1."""
        self.recent.append((step, pictures, bad))
        self.in_a_row = (self.in_a_row + bad) * bad
        self.worst = torch.maximum(self.worst, self.in_a_row)
        self.sums[3] += bad

    def totals(self) -> tuple[float, float, int, int]:
        """Mean loss, share that is right, pictures, and steps left out, of all processes."""
        loss, right, seen, left_out = self.ranks.add(self.sums.clone()).tolist()
        most = max(seen, 1)
        return loss / most, right / most, int(seen), int(left_out / self.ranks.count)

    def check(self, names: Sequence[str]) -> None:
        """Stop a run that has gone wrong; `names` are those of the pictures."""
        if self.worst < MOST_BAD:
            return
        found = [(step, pictures) for step, pictures, bad in self.recent if bad][:MOST_BAD]
        steps = ", ".join(str(step) for step, _ in found)
        some = [names[int(i)] for _, pictures in found for i in pictures[:2]]
        raise Diverged(
            f"The gradient must be a number; it was none {MOST_BAD} times in a row.",
            f"none at steps {steps}, among whose pictures are {printable(', '.join(some))}",
            "The last checkpoint is untouched. Use a lower learning rate, a longer warm-up, or fp32.",
        )

    def start_epoch(self) -> None:
        self.sums.zero_()

    # ---- saving and going on ----------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The sums of every process (ranks, 4): added up now, they would be rounded differently later."""
        rows = self.sums.new_zeros(self.ranks.count, len(self.sums))
        rows[self.ranks.rank] = self.sums
        return {"sums": self.ranks.add(rows), "in_a_row": self.in_a_row, "worst": self.worst}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        rows = saved["sums"]
        if len(rows) != self.ranks.count:  # as many processes as never before: the first carries them on
            rows = torch.cat([rows.sum(0, keepdim=True), rows.new_zeros(self.ranks.count, rows.shape[1])])
        self.sums = rows[self.ranks.rank].to(self.device)
        self.in_a_row, self.worst = (saved[name].to(self.device) for name in ("in_a_row", "worst"))
