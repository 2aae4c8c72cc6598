"""A rehearsal of a run: real steps with real images, timed and then taken back.

Also how fast images are read, and the number of epochs that fit in a time budget (`--minutes`).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.base.errors import option
from vitrail.base.machine import is_out_of_memory
from vitrail.images.loader import AHEAD, CorruptFiles
from vitrail.images.workers import PREFETCH
from vitrail.training.callbacks import Callback
from vitrail.training.captured_step import WARM_UP
from vitrail.training.checkpoint import Checkpoint
from vitrail.training.clock import Clock, format_seconds
from vitrail.training.epoch import MAX_IMAGES, Diverged, evaluate_epoch
from vitrail.training.parallel import step_memory
from vitrail.training.plan.step_mode import estimate_seconds
from vitrail.training.plan.threads import choose_threads, use_threads
from vitrail.training.recipes.settings import TrainConfig
from vitrail.training.signals import Interrupted
from vitrail.training.trainer import Trainer

if TYPE_CHECKING:
    from vitrail.training.plan.threads import Threads
    from vitrail.training.run_plan import RunPlan


_SHORT_RUN = 30.0  # seconds; a shorter run is not rehearsed
_COST, _MOST_SECONDS = 0.02, 10.0  # of the run, and at most
_BUDGET_COST = 0.03  # the same of a time budget
_RESERVE = 0.1  # of a time budget, for what a short rehearsal does not show
_TIMED_STEPS, _MOST_STEPS = 3, 0.04  # at least so many, but at most this fraction of a run's steps
_BATCHES = 4  # that are evaluated, at most
_MEMORY = 0.2  # of a GPU's free memory, at most, for a copy of weights and optimizer
_MIN_READS = 2_000  # images that the run has yet to read: fewer take about as long as measuring
_READ_SECONDS, _REQUEST = 1.0, 64  # how long and how many images at a time are read to measure that


@dataclass(frozen=True)
class Pace:
    """The seconds of the first step, a later one, and an evaluation, as a rehearsal has measured them."""

    first_step: float
    step: float
    evaluation: float
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
    marks, untimed = [time.perf_counter()], untimed_steps(trainer)

    def stop() -> int | None:
        if trainer.compute.device.type == "cuda":
            torch.cuda.synchronize(trainer.compute.device)
        marks.append(time.perf_counter())
        timed = marks[untimed:]
        enough = len(timed) > least and timed[-1] - timed[0] > seconds
        return SIGTERM if enough else None

    with suppress(Interrupted, Diverged):
        trainer.run(stop=stop)
    untimed = min(untimed, len(marks) - 1)
    first = marks[untimed] - marks[0]
    count = len(marks) - 1 - untimed
    step = (marks[-1] - marks[untimed]) / count if count else first / untimed
    forward = _time_forward(trainer)
    return Pace(first, step, forward * len(trainer.data.eval_split), forward * closing_images(trainer))


def untimed_steps(trainer: Trainer) -> int:
    """The first steps, which compile, allocate memory, and are captured as a CUDA graph."""
    return 1 + (WARM_UP if trainer.mode is not None and trainer.mode.cuda_graph else 0)


def closing_images(trainer: Trainer) -> int:
    """The images of the forward passes after the last epoch: statistics of features, and the report."""
    data = trainer.data
    sampled = min(MAX_IMAGES, len(data.train)) + len(data.eval_split) if data.val else 0
    return sampled + len(data.eval_split)


def _time_forward(trainer: Trainer) -> float:
    """The time of a held-out image, by some of them."""
    t, split = trainer, trainer.data.eval_split
    some, corrupt = split.take(np.arange(min(len(split), _BATCHES * t.batch))), CorruptFiles(t.corrupt.policy)
    start = 0.0
    for _ in range(1 if t.compute.device.type == "cpu" else 2):  # the first pass loads kernels
        start = time.perf_counter()
        model = t.averaged_model
        evaluate_epoch(model, some, t.reading, t.compute, ranks=t.ranks, workers=t.workers, corrupt=corrupt)
    return (time.perf_counter() - start) / len(some)


# ---- a run that is to follow ----------------------------------------------------------------


def rehearse_run(trainer: Trainer, estimate: float, loading: float) -> float | None:
    """The seconds of a run from now on, by some of its own steps; its state is then what it was.

    None where an estimate must do: for short runs, few steps, several processes, or too little memory.

    Args:
        estimate: about how long the run takes.
        loading: seconds in which the images of a step are read. The first steps find theirs already read.
    """
    t, left = trainer, trainer.steps - trainer.step
    timed = min(_TIMED_STEPS, int(_MOST_STEPS * left) - untimed_steps(t))
    if estimate < _SHORT_RUN or timed < 1 or t.ranks.count > 1:
        return None
    state = t.state()
    if t.compute.device.type == "cuda":  # on a CPU, steps need more than a copy of the state
        size = sum(tensor.nbytes for some in state.tensors.values() for tensor in some.values())
        if size > _MEMORY * torch.cuda.mem_get_info(t.compute.device)[0]:
            return None
    copies = {
        file: {name: tensor.detach().clone() for name, tensor in some.items()}
        for file, some in state.tensors.items()
    }
    try:
        pace = rehearse(t, min(_MOST_SECONDS, _COST * estimate), timed)
    finally:
        t.restore(Checkpoint(state.step, copies, state.state))
        t.metrics.recent.clear()
        t.clock = Clock(t.batch, len(t.data.eval_split))
    step = pace.step if t.workers.plan.kind == "none" else max(pace.step, loading)
    return left * step + t.evaluations_left * pace.evaluation + pace.closing


def measure_loading(trainer: Trainer) -> float | None:
    """Images per second that this process reads and decodes while it computes nothing.

    None for arrays, and where few images are left to read.
    """
    t, plan = trainer, trainer.workers.plan
    if t.data.train.paths is None or (t.steps - t.step) * t.batch // t.ranks.count < _MIN_READS:
        return None
    ahead = {"processes": 2 * PREFETCH * plan.count * t.workers.chunk, "threads": AHEAD * _REQUEST}
    requests = ((epoch, part) for epoch, some in t.micro_batch_indices() for part in some.split(_REQUEST))
    passed = read = 0
    start = 0.0
    for batch in t.reader(CorruptFiles("skip")).batches(requests):  # the run itself reports corrupt files
        passed += len(batch.indices)
        if start:
            read += len(batch.indices)
            if time.perf_counter() - start > _READ_SECONDS:
                break
        elif passed > ahead.get(plan.kind, 0):  # these were ready before the first of them was needed
            start = time.perf_counter()
    return read / (time.perf_counter() - start) if read else None


# ---- a time budget --------------------------------------------------------------------------


def fit_minutes(plan: RunPlan, log: Callback) -> RunPlan:
    """The plan with as many epochs as fit in its minutes, at most those of the settings.

    The run is rehearsed as it would be with all epochs: it is trained for a few steps, and thrown away.
    """
    minutes = plan.minutes
    if minutes is None:
        return plan
    log.on_message("Timing some steps, to choose the number of epochs by the minutes.")
    t = Trainer(plan)
    plan = replace(plan, threads=(threads := choose_threads(t)))
    try:
        with use_threads(threads.count):
            pace = rehearse(t, min(_MOST_SECONDS, _BUDGET_COST * 60 * minutes))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):  # the run itself reports it, with advice
            return plan.with_settings("The rehearsal for the time budget ran out of memory.")
        raise
    finally:
        t.workers.close()
    left = 60 * minutes - (time.monotonic() - plan.since)
    measured = torch.tensor([*astuple(pace), left], device=t.compute.device)
    *seconds, left = (t.ranks.sum(measured) / t.ranks.count).tolist()  # the same in all processes
    pace = Pace(*seconds)
    fitting = choose_epochs(t.settings, pace, t.steps_per_epoch, (1 - _RESERVE) * left, minutes)
    total = pace.total(fitting[0], t.steps_per_epoch, t.settings.evaluate_every)
    return replace(plan.with_settings(fitting[1], epochs=fitting[0]), seconds=total)


def choose_epochs(
    settings: TrainConfig, pace: Pace, steps_per_epoch: int, seconds: float, minutes: float
) -> tuple[int, str]:
    """Choose the most epochs that end within so many seconds, at least one; and say why in a sentence."""

    def total(epochs: int) -> float:
        return pace.total(epochs, steps_per_epoch, settings.evaluate_every)

    most, given = settings.epochs, f"{minutes:g} minute{'s' * (minutes != 1)}"
    epoch = steps_per_epoch * pace.step + pace.evaluation / settings.evaluate_every
    fits = bisect_right(range(1, most + 1), seconds, key=total)
    if fits == 0:
        return 1, (
            f"One epoch is trained, although it does not fit in {given}: with evaluation it takes about "
            f"{format_seconds(total(1))} here. To be quicker, use a smaller image size or model, "
            "or fewer images."
        )
    if fits == most:
        plural = f"All {most} epochs are" if most > 1 else "The one epoch is"
        return most, f"{plural} trained: that takes about {format_seconds(total(most))} of the {given}."
    return fits, (
        f"{fits} of {most} epochs are trained, as many as fit in {given}: an epoch with its evaluation takes "
        f"about {format_seconds(epoch)} here."
    )


# ---- the plan, for people to read -----------------------------------------------------------


_REHEARSED = "with evaluation, by the rehearsal"


def training_plan(trainer: Trainer, threads: Threads | None = None) -> dict[str, Any]:
    """What the run will do, by name, for people to read."""
    seconds, basis, bottleneck = trainer.plan.seconds, _REHEARSED, ""
    if seconds is None:
        seconds, basis, bottleneck = _estimate_time(trainer)
    s, parameters = trainer.settings, list(trainer.trained.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    data, epochs = trainer.data, f"{s.epochs} epoch{'s' * (s.epochs > 1)}"
    shards, blocks = trainer.parallel.shards, trainer.trained.blocks
    needed = step_memory(trainer.trained, s, trainer.compute, trainer.ranks, trainer.batch)
    # Activations of frozen blocks are not kept for the backward pass: there is one block's at a time.
    kept = 1 if any(p.requires_grad for p in blocks.parameters()) else 1 / len(blocks)
    memory = needed.states(shards) + kept * needed.activations(shards)
    plan = {
        "data": f"{data.name}: {len(data.classes)} classes",
        "images": f"{len(data.train):,} for training, {len(data.eval_split):,} held out",
        "parameters": f"{count:,}" + (f", {trained:,} of them trained" if trained != count else ""),
        "tokens": f"{trainer.model.config.tokens} per image"
        + (" at most; images keep their shape" if s.native else ""),
        "steps": f"{trainer.steps:,} of {trainer.batch} images, {epochs}",
        "memory": f"about {memory / 2**20:,.0f} MB for weights and activations",
        "time": f"about {format_seconds(seconds)}, {basis}",
    }
    if trainer.parallel.reason:
        plan["parallel"] = trainer.parallel.reason
    if trainer.mode is not None:
        plan["step"] = "; ".join([trainer.mode.reason, *trainer.executable.chosen])
    if data.train.paths is not None:
        plan["decoding"] = str(trainer.workers.plan)
    if bottleneck:
        plan["loading"] = bottleneck
    if threads is not None and trainer.compute.device.type == "cpu":
        plan["threads"] = f"{threads.count}; {threads.reason}"
    if trainer.teacher is not None:
        size = sum(p.numel() for p in trainer.teacher.model.parameters())
        plan["teacher"] = f"{size:,} parameters, {s.distill} distillation, {s.distill_weight:.0%} of the loss"
    return plan


def _estimate_time(trainer: Trainer) -> tuple[float, str, str]:
    """The time of the remaining steps and evaluations, its basis, and a sentence if loading takes longest."""
    t, steps = trainer, trainer.steps - trainer.step
    computing, images = estimate_seconds(t) / max(1, steps), t.batch / t.ranks.count
    rate = measure_loading(t)
    loading = images / rate if rate else 0.0
    evaluating = step_seconds(computing / 3, loading, t)  # a forward pass takes about a third of a step
    seconds = steps * step_seconds(computing, loading, t) + (t.mode.ready if t.mode else 0.0)
    evaluated = t.evaluations_left * len(t.data.eval_split) + closing_images(t)
    seconds += evaluating * evaluated / t.batch
    basis = "extrapolated from one step" + (" and the reading of some images" if rate else "")
    if (rehearsed := rehearse_run(t, seconds, loading)) is not None:
        seconds, basis = rehearsed, _REHEARSED
    if not rate or loading <= computing:
        return seconds, basis, ""
    slow = (
        f"slower than the model: {rate:,.0f} images/s are read, and the model takes "
        f"{images / computing:,.0f}; decode them once with vitrail pack or {option('cache', True)}, or use "
        "more workers"
    )
    return seconds, basis, slow


def step_seconds(computing: float, loading: float, trainer: Trainer) -> float:
    """The time of a step from that of computing alone and that of reading its images alone.

    Workers read while the device computes; on a CPU, they take cores from it.
    """
    at_once = trainer.workers.plan.kind != "none" and trainer.compute.device.type != "cpu"
    return max(computing, loading) if at_once else computing + loading
