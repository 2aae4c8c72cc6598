"""The training loop. A run is a function of its settings: stopped anywhere and gone on with, it ends in
the same bits (on one kind of machine), because nothing is drawn from a stream of chance: the order of
the pictures, their changes, and what dropout leaves out are functions of (seed, step, index).
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.augment import augment
from vitrail.data.chance import numbers
from vitrail.data.loader import Batch, Corrupt, Reader, batch_indices, epoch_order, steps_in_epoch
from vitrail.data.mixing import mix
from vitrail.data.sources import Dataset
from vitrail.errors import ConfigError, InputError, VitrailError, printable
from vitrail.model import ViT
from vitrail.preprocess import Preprocess
from vitrail.training import checkpoint as files
from vitrail.training.objective import loss_of, targets_of, weights_of
from vitrail.training.optim import build_optimizer, rate_at, set_rate
from vitrail.training.parallel import Ranks, shared
from vitrail.training.precision import Machine
from vitrail.training.settings import TrainConfig

LOOK_EVERY = 10  # steps between looks at what is on the device: each makes it wait
MOST_BAD = 3


class Diverged(VitrailError):
    """The loss or the gradient was no number, several times in a row."""


class Stopped(Exception):
    """A signal came; everything is saved."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


@dataclass
class Progress:
    """Where a run stands, for whoever shows it."""

    step: int
    steps: int
    epoch: int
    loss: float
    accuracy: float
    rate: float
    images_per_second: float


@dataclass
class Trainer:
    """A model in training."""

    model: ViT
    preprocess: Preprocess
    data: Dataset
    settings: TrainConfig
    machine: Machine
    ranks: Ranks
    out: Path
    show: Callable[[Progress], None] = lambda progress: None
    signal: int | None = None
    """Set from outside, by a signal handler: save and stop."""
    step: int = 0
    pending: bool = False
    """Whether an epoch is over and has not been judged yet."""
    history: list[dict[str, Any]] = field(default_factory=list)
    corrupt: Corrupt = field(default_factory=Corrupt)
    saved: tuple[int, bool] | None = None
    """Step and pending of the last checkpoint."""
    damaged: list[Path] = field(default_factory=list)
    """Checkpoints that could not be gone on from; the next one takes their place."""

    def __post_init__(self) -> None:
        s, device = self.settings, self.machine.device
        self.batch = min(s.batch, len(self.data.train) // 2 * 2 or 1)
        parts = self.ranks.count * s.accumulate
        mixes = bool(s.mixing.mixup or s.mixing.cutmix)
        if self.batch % (parts * (2 if mixes else 1)):
            raise ConfigError(
                "A batch must fall into equal parts for every process and every part of a step"
                + (", pairs in each." if mixes else "."),
                f"batch={self.batch}, {self.ranks.count} processes, accumulate={s.accumulate}",
                "Change batch or accumulate.",
            )
        if s.sampling == "balanced" and self.data.several:
            raise ConfigError(
                "Balanced sampling needs one class for each picture.",
                "pictures that can show several",
                "Use --set class_weights=balanced.",
            )
        self.corrupt.policy = s.corrupt
        self.model.to(device)
        self.optimizer = build_optimizer(self.model, s)
        self.shared = shared(self.model, self.ranks)
        self.computed: nn.Module = torch.compile(self.shared) if s.compile else self.shared  # type: ignore[assignment]
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False) if s.ema else None
        classes = len(self.data.classes)
        self.targets = targets_of(self.data.train, classes, s).to(device)
        self.weights = weights_of(self.data.train, classes, s).to(device)
        self.labels = torch.from_numpy(self.data.train.labels).to(device)
        self.levels = [
            torch.tensor(v, device=device).view(1, -1, 1, 1)
            for v in (self.preprocess.mean, self.preprocess.std)
        ]
        crop_in_decode = self.data.train.paths is not None
        self.augment = replace(s.augment, crop=None) if crop_in_decode else s.augment
        self.per_epoch = steps_in_epoch(len(self.data.train), self.batch)
        self.steps = self.per_epoch * s.epochs
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, right, seen, steps left out
        self.in_a_row = torch.zeros((), device=device)
        self.worst = torch.zeros((), device=device)
        self.recent: deque[tuple[int, Tensor, Tensor]] = deque(maxlen=2 * LOOK_EVERY)  # step, pictures, bad
        self.names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}

    # ---- going through the steps ------------------------------------------------------------

    def run(self, after_epoch: Callable[[int], None]) -> None:
        """Take every step that is left; `after_epoch` evaluates and saves."""
        reader = Reader(
            self.data.train,
            self.preprocess,
            augment=self.settings.augment,
            seed=self.settings.seed,
            workers=self.settings.workers,
            corrupt=self.corrupt,
            device=self.machine.device,
        )
        start, first = time.perf_counter(), self.step
        try:
            if self.pending:  # stopped while the epoch was judged
                after_epoch(self.step // self.per_epoch)
            parts = reader.batches(self.wanted())
            while self.step < self.steps:
                self.take_step(parts)
                if self.step % LOOK_EVERY == 0 or self.step % self.per_epoch == 0:
                    self.look(start, first)
                if self.step % self.per_epoch == 0:
                    self.finish_epoch(after_epoch)
                if self.ranks.any(self.signal is not None, self.machine.device):
                    raise Stopped(self.signal or 15)
        finally:
            reader.close()

    def wanted(self) -> Iterator[tuple[int, Tensor]]:
        """Which pictures this process needs, part by part, from the next step to the last."""
        s, epoch, order = self.settings, -1, torch.empty(0)
        for step in range(self.step, self.steps):
            if step // self.per_epoch != epoch:
                epoch = step // self.per_epoch
                order = epoch_order(
                    self.data.train, seed=s.seed, epoch=epoch, balanced=s.sampling == "balanced"
                )
            mine = self.ranks.part(batch_indices(order, step % self.per_epoch, self.batch))
            for part in mine.chunk(s.accumulate):
                yield epoch, part

    def take_step(self, parts: Iterator[Batch]) -> None:
        """One step of the optimizer, over all its parts; left out on the device if a number is none."""
        s = self.settings
        chance = numbers([s.seed, self.step, self.ranks.rank, 2], 1)
        torch.manual_seed(int(chance) & (2**63 - 1))  # dropout: a function of the step
        self.model.train()
        set_rate(self.optimizer, rate_at(self.step, self.steps, s))
        self.optimizer.zero_grad(set_to_none=True)
        seen = []
        for number in range(s.accumulate):
            batch = next(parts)
            seen.append(batch.indices)
            with self.sharing(last=number == s.accumulate - 1):
                (self.loss(batch) / s.accumulate).backward()
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(trained, s.clip or math.inf, foreach=True)
        bad = (~norm.isfinite()).float()
        self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.optimizer.step()
        self.recent.append((self.step, torch.cat(seen), bad))
        self.in_a_row = (self.in_a_row + bad) * bad
        self.worst = torch.maximum(self.worst, self.in_a_row)
        self.sums[3] += bad
        if self.ema is not None:
            self.average()
        self.step += 1

    def sharing(self, last: bool) -> AbstractContextManager[None]:
        """Gradients of all parts but the last stay in this process; with it, their sum is shared."""
        return nullcontext() if last or self.ranks.count == 1 else self.shared.no_sync()  # type: ignore[operator]

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a part, on its changed and mixed pictures."""
        s, device = self.settings, self.machine.device
        epoch = self.step // self.per_epoch
        indices, kept = batch.indices.to(device), batch.kept.to(device)
        images = augment(
            batch.images.to(device),
            indices,
            self.augment,
            seed=s.seed,
            epoch=epoch,
            size=self.preprocess.target,
        )
        targets = self.targets[indices]
        if self.step < (1 - s.calm) * self.steps:
            images, targets = mix(images, targets, indices, s.mixing, seed=s.seed, epoch=epoch)
        mean, std = self.levels
        images = (images * (255 * self.preprocess.scale) - mean) / std
        with self.machine.computing():
            logits = self.computed(images)
        each = loss_of(logits, targets, self.weights, s) * kept
        with torch.no_grad():
            counts = kept * each.isfinite()  # what is no number is left out, as its step is
            right = self.right(logits, indices) * counts
            loss = each.where(counts > 0, 0.0).sum()
            self.sums[:3] += torch.stack([loss, right.sum(), counts.sum()]).double()
        return each.mean()

    def right(self, logits: Tensor, indices: Tensor) -> Tensor:
        labels = self.labels[indices]
        if labels.ndim == 2:
            return ((logits > 0) == labels.bool()).float().mean(dim=1)
        return (logits.argmax(dim=1) == labels).float()

    def average(self) -> None:
        """EMA; at first it forgets faster, so that it does not remember the first random weights."""
        assert self.ema is not None
        decay = min(self.settings.ema or 0.0, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            ours: list[Tensor] = list(self.ema.parameters())
            torch._foreach_lerp_(ours, [p.detach() for p in self.model.parameters()], 1 - decay)

    # ---- looking ----------------------------------------------------------------------------

    def look(self, start: float, first: int) -> None:
        """Fetch what the device has counted: show it, and stop a run that has gone wrong."""
        sums = self.ranks.add(self.sums.clone()).tolist()
        if self.worst >= MOST_BAD:
            raise self.diverged()
        seconds = max(time.perf_counter() - start, 1e-9)
        self.show(
            Progress(
                self.step,
                self.steps,
                (self.step - 1) // self.per_epoch,
                sums[0] / max(sums[2], 1),
                sums[1] / max(sums[2], 1),
                rate_at(self.step - 1, self.steps, self.settings),
                (self.step - first) * self.batch / seconds,
            )
        )

    def diverged(self) -> Diverged:
        found = [(step, indices) for step, indices, bad in self.recent if bad]
        steps = ", ".join(str(step) for step, _ in found[:MOST_BAD])
        names = [self.data.train.names[int(i)] for _, indices in found[:MOST_BAD] for i in indices[:2]]
        return Diverged(
            f"The gradient must be a number; it was none {MOST_BAD} times in a row.",
            f"none at steps {steps}, among whose pictures are {printable(', '.join(names))}",
            "The last checkpoint is untouched. Use a lower learning rate, a longer warm-up, or fp32.",
        )

    def finish_epoch(self, after_epoch: Callable[[int], None]) -> None:
        epoch = self.step // self.per_epoch
        self.corrupt.names = self.ranks.union(self.corrupt.names)
        loss, right, seen, left_out = self.ranks.add(self.sums.clone()).tolist()
        if not seen and self.corrupt.names:
            name, reason = next(iter(self.corrupt.names.items()))
            raise InputError(
                "Some pictures must be readable.",
                f"an epoch without one; {name}: {reason.rstrip('.')}",
                "Check the files.",
            )
        self.history.append(
            {
                "step": self.step,
                "epoch": epoch,
                "rate": rate_at(self.step - 1, self.steps, self.settings),
                "loss": loss / max(seen, 1),
                "accuracy": right / max(seen, 1),
                "left_out": int(left_out / self.ranks.count),
                "corrupt": len(self.corrupt.names),
            }
        )
        self.sums.zero_()
        self.pending = True
        after_epoch(epoch)

    # ---- saving and going on ----------------------------------------------------------------

    def state(self) -> files.Checkpoint:
        tensors = {
            "model": dict(self.model.state_dict()),
            "optimizer": files.optimizer_tensors(self.optimizer, self.names),
            "sums": {"sums": self.all_sums(), "in_a_row": self.in_a_row, "worst": self.worst},
        }
        if self.ema is not None:
            tensors["ema"] = dict(self.ema.state_dict())
        names = self.ranks.union(self.corrupt.names)
        state = {"history": self.history, "pending": self.pending, "corrupt": names}
        return files.Checkpoint(self.step, tensors, state)

    def all_sums(self) -> Tensor:
        """The sums of every process (ranks, 4): added up now, they would be rounded differently later."""
        rows = self.sums.new_zeros(self.ranks.count, len(self.sums))
        rows[self.ranks.rank] = self.sums
        return self.ranks.add(rows)

    def save(self) -> None:
        """A checkpoint of this moment, unless there is one."""
        moment = (self.step, self.pending)
        if moment == self.saved:
            return
        state = self.state()
        if self.ranks.first:
            files.save(self.out / "checkpoints", state, self.settings.keep, self.damaged)
        self.ranks.wait()
        self.saved, self.damaged = moment, []

    def restore(self, saved: files.Checkpoint) -> None:
        self.step, self.history = saved.step, list(saved.state["history"])
        self.pending = bool(saved.state["pending"])
        self.model.load_state_dict(dict(saved.tensors["model"]))
        files.restore_optimizer(self.optimizer, saved.tensors["optimizer"], self.names)
        if self.ema is not None:
            self.ema.load_state_dict(dict(saved.tensors["ema"]))
        self.corrupt.names = dict(saved.state["corrupt"])
        self.saved = (self.step, self.pending)
        device, rows = self.machine.device, saved.tensors["sums"]["sums"]
        if len(rows) != self.ranks.count:  # as many processes as never before: the first carries them on
            rows = torch.cat([rows.sum(0, keepdim=True), rows.new_zeros(self.ranks.count, rows.shape[1])])
        self.sums = rows[self.ranks.rank].to(device)
        self.in_a_row, self.worst = (saved.tensors["sums"][name].to(device) for name in ("in_a_row", "worst"))
