"""The training loop. A run is a function of its settings: stopped anywhere and gone on with, it ends in
the same bits (on one kind of machine), because nothing is drawn from a stream of chance: the order of
the pictures, their changes, and what dropout leaves out are functions of (seed, step, index).
"""

from __future__ import annotations

import copy
import math
import time
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
from vitrail.errors import InputError
from vitrail.model import ViT
from vitrail.preprocess import Preprocess
from vitrail.training import checkpoint as files
from vitrail.training.listen import Progress
from vitrail.training.lora import adapt
from vitrail.training.objective import distance_of, loss_of, targets_of, weights_of
from vitrail.training.optim import average, build_optimizer, rate_at, set_rate
from vitrail.training.parallel import Ranks, batch_of, shared
from vitrail.training.precision import Machine
from vitrail.training.settings import TrainConfig
from vitrail.training.tally import LOOK_EVERY, Tally
from vitrail.training.teacher import Student, Teacher, normaliser


class Stopped(Exception):
    """A signal came; everything is saved."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


@dataclass
class Trainer:
    """A model in training, and the teacher it learns from besides, if it has one."""

    model: ViT
    preprocess: Preprocess
    data: Dataset
    settings: TrainConfig
    machine: Machine
    ranks: Ranks
    out: Path
    show: Callable[[Progress], None] = lambda progress: None
    teacher: Teacher | None = None
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
        self.batch = batch_of(self.data, s, self.ranks)
        self.corrupt.policy = s.corrupt
        if s.tune == "lora":
            adapt(self.model, s)
        self.model.to(device)
        self.optimizer = build_optimizer(self.model, s)
        self.shared = shared(Student(self.model) if self.teacher else self.model, self.ranks)
        self.computed: nn.Module = torch.compile(self.shared) if s.compile else self.shared  # type: ignore[assignment]
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False) if s.ema else None
        classes = len(self.data.classes)
        self.targets = targets_of(self.data.train, classes, s).to(device)
        self.weights = weights_of(self.data.train, classes, s).to(device)
        self.labels = torch.from_numpy(self.data.train.labels).to(device)
        self.normalise = normaliser(self.preprocess, device)
        crop_in_decode = self.data.train.paths is not None
        self.augment = replace(s.augment, crop=None) if crop_in_decode else s.augment
        self.per_epoch = steps_in_epoch(len(self.data.train), self.batch)
        self.steps = self.per_epoch * s.epochs
        self.tally = Tally(device, self.ranks)
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
        self.model.train(s.tune != "head").head.train()  # an encoder that is frozen drops nothing
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
        self.tally.add_step(self.step, torch.cat(seen), bad)
        if self.ema is not None:
            average(self.ema, self.model, self.step, s.ema or 0.0)
        self.step += 1

    def sharing(self, last: bool) -> AbstractContextManager[None]:
        """Gradients of all parts but the last stay in this process; with it, their sum is shared."""
        return nullcontext() if last or self.ranks.count == 1 else self.shared.no_sync()  # type: ignore[operator]

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a part, on its changed and mixed pictures."""
        s, device = self.settings, self.machine.device
        indices, kept = batch.indices.to(device), batch.kept.to(device)
        images, targets = self.changed(batch.images.to(device), indices)
        with self.machine.computing():
            answers = self.computed(self.normalise(images))
        if self.teacher is None:
            logits = answers
            each = loss_of(logits, targets, self.weights, s)
        else:
            ours, taught = answers
            logits = (ours + taught) / 2  # what the model says as a whole
            distance = distance_of(taught, self.teacher(images), s)
            share = s.distill_weight
            each = (1 - share) * loss_of(ours, targets, self.weights, s) + share * distance
        each = each * kept
        self.tally.add_pictures(each, self.right(logits, indices), kept)
        return each.mean()

    def changed(self, images: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures as this epoch changes and mixes them, levels from 0 to 1, and their targets."""
        s, epoch = self.settings, self.step // self.per_epoch
        size = self.preprocess.target
        images = augment(images, indices, self.augment, seed=s.seed, epoch=epoch, size=size)
        targets = self.targets[indices]
        if self.step < (1 - s.calm) * self.steps:
            images, targets = mix(images, targets, indices, s.mixing, seed=s.seed, epoch=epoch)
        return images, targets

    def right(self, logits: Tensor, indices: Tensor) -> Tensor:
        labels = self.labels[indices]
        if labels.ndim == 2:
            return ((logits > 0) == labels.bool()).float().mean(dim=1)
        return (logits.argmax(dim=1) == labels).float()

    # ---- looking ----------------------------------------------------------------------------

    def look(self, start: float, first: int) -> None:
        """Fetch what the device has counted: show it, and stop a run that has gone wrong."""
        loss, accuracy, _, _ = self.tally.totals()
        self.tally.check(self.data.train.names)
        seconds = max(time.perf_counter() - start, 1e-9)
        self.show(
            Progress(
                self.step,
                self.steps,
                (self.step - 1) // self.per_epoch,
                loss,
                accuracy,
                rate_at(self.step - 1, self.steps, self.settings),
                (self.step - first) * self.batch / seconds,
            )
        )

    def finish_epoch(self, after_epoch: Callable[[int], None]) -> None:
        epoch = self.step // self.per_epoch
        self.corrupt.names = self.ranks.union(self.corrupt.names)
        loss, accuracy, seen, left_out = self.tally.totals()
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
                "loss": loss,
                "accuracy": accuracy,
                "left_out": left_out,
                "corrupt": len(self.corrupt.names),
            }
        )
        self.tally.start_epoch()
        self.pending = True
        after_epoch(epoch)

    # ---- saving and going on ----------------------------------------------------------------

    def state(self) -> files.Checkpoint:
        tensors = {
            "model": dict(self.model.state_dict()),
            "optimizer": files.optimizer_tensors(self.optimizer, self.names),
            "sums": self.tally.tensors(),
        }
        if self.ema is not None:
            tensors["ema"] = dict(self.ema.state_dict())
        names = self.ranks.union(self.corrupt.names)
        state = {"history": self.history, "pending": self.pending, "corrupt": names}
        return files.Checkpoint(self.step, tensors, state)

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
        self.tally.restore(saved.tensors["sums"])
