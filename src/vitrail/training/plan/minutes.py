"""`--minutes`: as many epochs as fit in a time budget, by a rehearsal with real images."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import astuple, dataclass, field, replace

import torch

from vitrail.base.errors import ConfigError
from vitrail.base.fields import is_real, short_repr
from vitrail.base.machine import is_out_of_memory
from vitrail.training.clock import format_seconds
from vitrail.training.plan.rehearsal import Pace, rehearse
from vitrail.training.plan.threads import Threads, choose_threads, use_threads
from vitrail.training.recipes.settings import TrainConfig
from vitrail.training.trainer import Trainer

_REHEARSAL, _MOST_SECONDS = 0.03, 10.0  # of the budget, and at most
_RESERVE = 0.1  # of the time, for what a short rehearsal does not show


@dataclass(frozen=True)
class TimeBudget:
    """The minutes that a run may take, from now on."""

    minutes: float
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not is_real(self.minutes) or not 0 < self.minutes < 1e6:
            raise ConfigError(
                f"minutes must be a number above 0, such as 30, not {short_repr(self.minutes)}."
            )

    @property
    def seconds_left(self) -> float:
        return 60 * self.minutes - (time.monotonic() - self.start)


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has chosen and measured."""

    train: TrainConfig
    """The settings with as many epochs as fit."""
    threads: Threads
    reason: str
    seconds: float | None = None
    """The time of the run; None if it ran out of memory."""


def fit_minutes(rehearsal: Trainer, budget: TimeBudget) -> Rehearsed:
    """As many epochs as fit, at most those of the settings.

    Args:
        rehearsal: the run as it would be with all epochs; it is trained for a few steps, and of no use then.
    """
    t = rehearsal
    threads = choose_threads(t, None)
    try:
        with use_threads(threads.count):
            pace = rehearse(t, min(_MOST_SECONDS, _REHEARSAL * 60 * budget.minutes))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):  # the run itself reports it, with advice
            return Rehearsed(t.settings, threads, "The rehearsal for the time budget ran out of memory.")
        raise
    finally:
        t.workers.close()
    measured = torch.tensor([*astuple(pace), budget.seconds_left], device=t.compute.device)
    *seconds, left = (t.ranks.sum(measured) / t.ranks.count).tolist()  # the same in all processes
    pace, per_epoch = Pace(*seconds), t.steps_per_epoch
    epochs, reason = choose_epochs(t.settings, pace, per_epoch, (1 - _RESERVE) * left, budget.minutes)
    total = pace.total(epochs, per_epoch, t.settings.evaluate_every)
    return Rehearsed(replace(t.settings, epochs=epochs), threads, reason, total)


def choose_epochs(
    settings: TrainConfig, pace: Pace, steps_per_epoch: int, seconds: float, minutes: float
) -> tuple[int, str]:
    """As many epochs as end within so many seconds, at least one, and a sentence that says why."""

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
