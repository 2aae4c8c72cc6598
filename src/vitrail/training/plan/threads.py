"""How many CPU threads a run computes with: given, as before, or by a short rehearsal.

On a busy machine more threads are often slower, because all of them wait for the one that has no core. The
number changes the order of additions, and with it the last bits of a result, so it is recorded and used
again on resume. `auto` keeps torch's own number unless another one is clearly faster, and never measures
short runs: a run that is started again then gets the same number, and the same bits, unless the load of the
machine has changed a lot.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vitrail.base.machine import usable_cores
from vitrail.training.plan.step_mode import estimate_seconds, rehearse_pass

if TYPE_CHECKING:
    from vitrail.training.trainer import Trainer

_SHORT_RUN = 60.0  # seconds; nothing is measured for a run below that
_COST, _MOST_SECONDS, _ROUNDS = 0.02, 6.0, 3  # of the rehearsal: at most, as a fraction of the run
_CLEARLY_FASTER = 0.8  # of the time that torch's own number takes
_HOPELESS, _HOPELESS_SECONDS = 3, 0.5  # a number this many times slower than the best is not timed again
_IMAGES = 16  # in a rehearsed step, at most
_BUSY = 0.25  # warn where a run waits for a core for more than this fraction of its time


@dataclass(frozen=True)
class Threads:
    """A number of threads, and why."""

    count: int
    reason: str


def choose_threads(trainer: Trainer) -> Threads:
    """The number of threads of a run: as requested, as before it was interrupted, or measured."""
    default, asked = torch.get_num_threads(), trainer.settings.threads
    reused = trainer.plan.resolved.get("threads")
    if asked != "auto":
        return Threads(asked, "as requested")
    if reused is not None:
        return Threads(reused, "as chosen before")
    if trainer.compute.device.type != "cpu":
        return Threads(1, "the model is computed elsewhere, and the cores are for decoding")
    if trainer.ranks.count > 1 or default == 1:
        return Threads(default, "torch's own number")
    seconds = estimate_seconds(trainer)
    if seconds < _SHORT_RUN:
        return Threads(default, "torch's own number; the run is too short to measure others")
    others = {1, max(1, default // 2), min(default, usable_cores())} - {default}
    return _rehearse(trainer, [default, *sorted(others)], min(_MOST_SECONDS, _COST * seconds))


def _rehearse(trainer: Trainer, candidates: list[int], budget: float) -> Threads:
    """Time real forward and backward passes, in turns, so that a change of the load affects all alike."""

    def time_with(count: int) -> float:
        with use_threads(count):
            return _time_pass(trainer)

    first = {count: time_with(count) for count in candidates}  # and allocate, start threads
    hopeless = max(_HOPELESS * min(first.values()), _HOPELESS_SECONDS)
    times = {count: [seconds] if seconds > hopeless else [] for count, seconds in first.items()}
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        for count in (count for count in candidates if first[count] <= hopeless):
            times[count].append(time_with(count))
        if time.perf_counter() - start > budget:
            break
    medians = {count: statistics.median(some) for count, some in times.items()}
    default = candidates[0]
    best = min(candidates, key=lambda count: medians[count])
    chosen = best if medians[best] < _CLEARLY_FASTER * medians[default] else default
    listed = ", ".join(f"{medians[count]:.2g} s with {count}" for count in sorted(candidates))
    return Threads(chosen, f"a pass takes {listed}")


def _time_pass(trainer: Trainer) -> float:
    count = min(_IMAGES, max(1, trainer.batch // trainer.settings.accumulate))
    images = torch.rand(count, *trainer.model.config.input_shape)
    start = time.perf_counter()
    rehearse_pass(trainer, images)
    trainer.optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - start


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with this many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- a busy machine -------------------------------------------------------------------------


class CpuWait:
    """How much of its time this thread waited for a core, since it was last asked (Linux only)."""

    def __init__(self) -> None:
        self._last = _schedule_times()
        self._since = time.monotonic()

    def fraction(self, least: float) -> float | None:
        """From 0 to 1; None if it is not known, or less than so many seconds have passed."""
        if time.monotonic() - self._since < least:
            return None
        now, before = _schedule_times(), self._last
        self._last, self._since = now, time.monotonic()
        if now is None or before is None:
            return None
        ran, waited = now[0] - before[0], now[1] - before[1]
        return waited / max(1, ran + waited)

    def warning(self, least: float) -> str | None:
        """The message for a machine that other processes use as well, if it is one."""
        fraction = self.fraction(least)
        if fraction is None or fraction <= _BUSY:
            return None
        load = ""
        with suppress(OSError, AttributeError):  # not on every system
            load = f" (load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores)"
        return (
            f"The machine is busy{load}: training waits for a processor core {fraction:.0%} of the time, and "
            "everything takes that much longer."
        )


def _schedule_times() -> tuple[int, int] | None:
    """Nanoseconds that this thread has run, and has waited for a core."""
    with suppress(OSError, ValueError, IndexError):
        ran, waited, *_ = Path("/proc/thread-self/schedstat").read_text().split()
        return int(ran), int(waited)
    return None
