"""A rehearsal of a run: real steps with real images, timed and then taken back."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGTERM

import numpy as np
import torch

from vitrail.images.loader import CorruptFiles
from vitrail.training.captured_step import WARM_UP
from vitrail.training.checkpoint import Checkpoint
from vitrail.training.clock import Clock
from vitrail.training.epoch import evaluate_epoch
from vitrail.training.head_scores import MAX_IMAGES
from vitrail.training.metric_values import Diverged
from vitrail.training.signals import Interrupted
from vitrail.training.trainer import Trainer

_SHORT_RUN = 30.0  # seconds; a shorter run is not rehearsed
_COST, _MOST_SECONDS = 0.02, 10.0  # of the run, and at most
_TIMED_STEPS, _MOST_STEPS = 3, 0.1  # at least so many, but at most this fraction of a run's steps
_BATCHES = 4  # that are evaluated, at most
_MEMORY = 0.2  # of a GPU's free memory, at most, for a copy of weights and optimizer


@dataclass(frozen=True)
class Pace:
    """What a rehearsal has measured, in seconds."""

    first_step: float
    """With all that happens once, such as compiling."""
    step: float
    evaluation: float
    """Of all held-out images."""
    closing: float
    """For what follows the last epoch: files and the report."""

    def total(self, epochs: int, steps_per_epoch: int, evaluate_every: int) -> float:
        """The time of a run of so many epochs."""
        training = self.first_step + epochs * steps_per_epoch * self.step
        return training + math.ceil(epochs / evaluate_every) * self.evaluation + self.closing


def rehearse(trainer: Trainer, seconds: float, least: int = _TIMED_STEPS) -> Pace:
    """Take real steps for about so long, with loading and augmentation, and evaluate some images.

    Args:
        least: the steps that are timed at least.
    """
    marks = [time.perf_counter()]

    def stop() -> int | None:
        if trainer.compute.device.type == "cuda":
            torch.cuda.synchronize(trainer.compute.device)
        marks.append(time.perf_counter())
        timed = marks[_untimed(trainer) :]
        enough = len(timed) > least and timed[-1] - timed[0] > seconds
        return SIGTERM if enough else None

    with suppress(Interrupted, Diverged):
        trainer.run(stop=stop)
    untimed = min(_untimed(trainer), len(marks) - 1)
    first = marks[untimed] - marks[0]
    count = len(marks) - 1 - untimed
    step = (marks[-1] - marks[untimed]) / count if count else first / untimed
    forward = _time_forward(trainer)
    return Pace(first, step, forward * len(trainer.data.eval_split), forward * closing_images(trainer))


def closing_images(trainer: Trainer) -> int:
    """The images of the forward passes after the last epoch: of the best and last weights, and the report."""
    data = trainer.data
    sampled = min(MAX_IMAGES, len(data.train)) + len(data.eval_split) if data.val else 0
    return 2 * sampled + len(data.eval_split)


def _untimed(trainer: Trainer) -> int:
    """The first steps, which compile, allocate memory, and are captured as a CUDA graph."""
    captured = trainer.mode is not None and trainer.mode.cuda_graph
    return 1 + (WARM_UP if captured else 0)


def _time_forward(trainer: Trainer) -> float:
    """The time of a held-out image, by some of them."""
    split, t = trainer.data.eval_split, trainer
    count = min(len(split), _BATCHES * t.batch)
    some = split.take(np.arange(count))
    start = 0.0
    for _ in range(1 if t.compute.device.type == "cpu" else 2):  # the first pass loads kernels
        start = time.perf_counter()
        evaluate_epoch(
            t.averaged_model,
            some,
            t.reading,
            t.compute,
            ranks=t.ranks,
            workers=t.workers,
            corrupt=CorruptFiles(t.settings.corrupt),
        )
    return (time.perf_counter() - start) / count


# ---- a run that is to follow ----------------------------------------------------------------


def rehearse_run(trainer: Trainer, estimate: float, loading: float) -> float | None:
    """The seconds of a run from now on, by some of its own steps; its state is then what it was.

    None where an estimate must do: for short runs, few steps, several processes, or too little memory.

    Args:
        estimate: about how long the run takes.
        loading: seconds in which the images of a step are read. The first steps find theirs already read.
    """
    t, left = trainer, trainer.steps - trainer.step
    timed = min(_TIMED_STEPS, int(_MOST_STEPS * left) - _untimed(t))
    if estimate < _SHORT_RUN or timed < 1 or t.ranks.count > 1 or not _has_room(t):
        return None
    before = _copy(t.state())
    try:
        pace = rehearse(t, min(_MOST_SECONDS, _COST * estimate), timed)
    finally:
        t.restore(before)
        t.metrics.recent.clear()
        t.clock = Clock(t.batch, len(t.data.eval_split))
    step = pace.step if t.workers.plan.kind == "none" else max(pace.step, loading)
    return left * step + t.evaluations_left * pace.evaluation + pace.closing


def _copy(state: Checkpoint) -> Checkpoint:
    tensors = {
        file: {name: tensor.detach().clone() for name, tensor in some.items()}
        for file, some in state.tensors.items()
    }
    return Checkpoint(state.step, tensors, state.state)


def _has_room(trainer: Trainer) -> bool:
    """Whether there is memory for a copy of what later steps depend on; on a CPU, where steps need more,
    there is."""
    if trainer.compute.device.type != "cuda":
        return True
    tensors = [tensor for some in trainer.state().tensors.values() for tensor in some.values()]
    free, _ = torch.cuda.mem_get_info(trainer.compute.device)
    return sum(tensor.nbytes for tensor in tensors) < _MEMORY * free
