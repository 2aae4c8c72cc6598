"""The wall time of a run: of each epoch, and how much is left by what has been measured so far."""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime

# Columns of metrics.jsonl that depend on the machine and the day; two runs with the same bits differ in them.
TIME_COLUMNS = ("time", "seconds", "images_per_second", "seconds_left")

_MARKS = 20  # the pace is that of the steps between this many progress reports


class Clock:
    """Measures the steps and evaluations of a run.

    Args:
        images: how many images a step has, over all processes.
        eval_images: how many images are evaluated after an epoch.
    """

    def __init__(self, images: int, eval_images: int) -> None:
        self.images, self.eval_images = images, eval_images
        self.epoch_seconds = 0.0
        """Of the current epoch so far, also before an interruption."""
        self._epoch_training = 0.0  # its part without evaluation, in this process
        self._epoch_steps = 0
        self._evaluation: float | None = None  # seconds of the last one
        self._training = 0.0  # seconds of training since this process started
        self._marks: deque[tuple[int, float]] = deque(maxlen=_MARKS)  # steps taken, seconds of training
        self._now = time.perf_counter()

    def start(self, step: int) -> None:
        """Start to measure, at a step; what came before is not part of the run."""
        self._now = time.perf_counter()
        self._marks.append((step, self._training))

    def trained(self, step: int) -> None:
        """The time since the last call was for training, up to this step."""
        seconds = self._lap()
        self._training += seconds
        self._epoch_training += seconds
        self._epoch_steps += step - self._marks[-1][0]
        self._marks.append((step, self._training))

    def evaluated(self) -> None:
        """The time since the last call was for evaluation."""
        self._evaluation = self._lap()

    def end_training(self) -> float:
        """Images per second of the epoch's training, without its evaluation, in this process."""
        rate = self._epoch_steps * self.images / max(self._epoch_training, 1e-9)
        self._epoch_training, self._epoch_steps = 0.0, 0
        return round(rate, 1)

    def end_epoch(self) -> tuple[str, float]:
        """The time (UTC) and the wall time of the epoch, with its evaluation; a new epoch starts."""
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", round(seconds, 3)

    @property
    def seconds_per_step(self) -> float | None:
        """By the last steps; None before the first."""
        (first, start), (last, end) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) if last > first else None

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds_per_step or 0.0, 1e-9)

    def seconds_left(self, steps: int, evaluations: int) -> float | None:
        """The time for this many more steps and evaluations; None before the first step."""
        step = self.seconds_per_step
        if step is None:
            return None
        evaluation = self._evaluation
        if evaluation is None:  # a forward pass takes about a third of a step
            evaluation = step / 3 * self.eval_images / self.images
        return steps * step + evaluations * evaluation

    def _lap(self) -> float:
        before, self._now = self._now, time.perf_counter()
        self.epoch_seconds += self._now - before
        return self._now - before


class Interval:
    """True at most once in so many seconds; the first time when they have passed since it was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._last = seconds, time.monotonic()

    def __call__(self) -> bool:
        if time.monotonic() - self._last < self.seconds:
            return False
        self._last = time.monotonic()
        return True


def format_seconds(seconds: float) -> str:
    """40 s, 2.3 min, 18 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.{int(seconds < 10 * 60)}f} min"
    return f"{seconds / 3600:.1f} h"
