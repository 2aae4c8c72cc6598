"""The plan of a run: its size, and estimates of memory and time before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vitrail.base.errors import option
from vitrail.base.machine import usable_cores
from vitrail.training.plan.rehearsal import closing_images, measure_loading, rehearse_run
from vitrail.training.plan.step_mode import estimate_seconds
from vitrail.training.sharding import step_memory
from vitrail.training.trainer import Trainer

if TYPE_CHECKING:
    from vitrail.training.plan.threads import Threads


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
    plan = {
        "data": f"{data.name}: {len(data.classes)} classes",
        "images": f"{len(data.train):,} for training, {len(data.eval_split):,} held out",
        "parameters": f"{count:,}" + (f", {trained:,} of them trained" if trained != count else ""),
        "tokens": f"{trainer.model.config.tokens} per image"
        + (" at most; images keep their shape" if s.native else ""),
        "steps": f"{trainer.steps:,} of {trainer.batch} images, {epochs}",
        "memory": f"about {_estimate_memory(trainer) / 2**20:,.0f} MB for weights and activations",
        "time": f"about {_format_time(seconds)}, {basis}",
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
    bottleneck = ""
    if rate and loading > computing:
        bottleneck = (
            f"slower than the model: {rate:,.0f} images/s are read, and the model takes "
            f"{images / computing:,.0f}; decode them once with vitrail pack or {option('cache', True)}, or "
            "use more workers"
        )
    return seconds, basis, bottleneck


def step_seconds(computing: float, loading: float, trainer: Trainer) -> float:
    """The time of a step from that of computing alone and that of reading its images alone.

    Workers read while the device computes. Where both need the same cores, these do the work of both.
    """
    plan, cores = trainer.workers.plan, usable_cores()
    if plan.kind == "none":
        return computing + loading
    longest = max(computing, loading)
    if trainer.compute.device.type != "cpu":
        return longest
    threads, workers = min(torch.get_num_threads(), cores), min(plan.count, cores)
    return max(longest, (threads * computing + workers * loading) / cores)


def _format_time(seconds: float) -> str:
    """40 seconds, 2 min 20 s, 18 minutes, 3.5 hours: no rounding by more than 5 %."""
    if seconds < 90:
        count = max(1, round(seconds))
        return f"{count} second{'s' * (count > 1)}"
    if seconds < 10 * 60:
        minutes, rest = divmod(10 * round(seconds / 10), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} minutes"
    return f"{round(seconds / 60)} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"


def _estimate_memory(trainer: Trainer) -> float:
    """Bytes of weights, gradients, the optimizer's two moments, and the activations kept for backward.

    Activations of frozen blocks are not kept: there is one block's at a time.
    """
    model, t = trainer.trained, trainer
    kept = 1.0 if any(p.requires_grad for p in model.blocks.parameters()) else 1 / model.config.depth
    needed, shards = step_memory(model, t.settings, t.compute, t.ranks, t.batch), t.parallel.shards
    return needed.states(shards) + kept * needed.activations(shards)
