"""The learning rate range test (Smith 2015): the loss while the learning rate grows at every step.

Below a useful learning rate the loss hardly moves, above it the loss explodes. The suggestion is a tenth of
the learning rate at which the smoothed loss is lowest: a start, which a sweep improves on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import FileError, InputError, printable
from vitrail.base.fields import as_integer, is_real, short_repr
from vitrail.base.safe_files import write_text
from vitrail.base.summary import Summary
from vitrail.images.formats.sources import Dataset
from vitrail.training.callbacks import Callback
from vitrail.training.epoch import Diverged
from vitrail.training.open_data import open_training_data
from vitrail.training.resolve import resolve_recipe
from vitrail.training.run_plan import plan_recipe
from vitrail.training.signals import Interrupted
from vitrail.training.trainer import Trainer
from vitrail.views.canvas import FAINT, LINES, new_figure, save_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMOOTHING = 0.9  # of the exponential moving average of the loss
_EXPLODED = 4.0  # times the lowest smoothed loss: the ramp ends
_FROM_MINIMUM = 10.0
_RAMP_ENDED = 15  # the signal number that ends a run; nobody sees it


@dataclass(frozen=True, repr=False)
class LRCurve(Summary):
    """The loss at each learning rate of the ramp."""

    lrs: list[float]
    losses: list[float]
    """Of each step's images, before the step."""
    smoothed: list[float]
    lr: float
    recipe_lr: float

    def summary(self) -> dict[str, str]:
        """The suggestion, and what the recipe has."""
        return {"suggested lr": f"{self.lr:.2g}", "the recipe's": f"{self.recipe_lr:g}"}

    @styled
    def figure(self) -> Figure:
        """Loss over learning rate, with the suggestion and the recipe's learning rate."""
        figure = new_figure(5.4, 3.2)
        axis = figure.subplots()
        axis.plot(self.lrs, self.losses, color=FAINT, linewidth=0.6, label="loss of a step")
        axis.plot(self.lrs, self.smoothed, color=LINES[0], label="smoothed")
        axis.axvline(self.lr, color=LINES[1], linestyle="--", label=f"suggested: {self.lr:.2g}")
        axis.axvline(self.recipe_lr, color=LINES[2], linestyle=":", label=f"recipe: {self.recipe_lr:.2g}")
        low = min(self.smoothed)
        axis.set_ylim(0.9 * low, max(self.smoothed[0] * 1.3, 1.5 * low))
        axis.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axis.legend()
        return figure


def find_lr(
    data: str | Path | Dataset,
    *,
    out: str | Path | None = None,
    recipe: str = "auto",
    from_: str | Path | None = None,
    size: int | tuple[int, int] | None = None,
    steps: int = 150,
    low: float = 1e-6,
    high: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **changes: Any,
) -> LRCurve:
    """Train for some steps with a learning rate that grows from `low` to `high`, and suggest one.

    The model is a new one, of the same settings and seed as a run's; nothing of it is kept.

    Args:
        data, recipe, from_, size, changes: what `vitrail.train` takes.
        out: a folder for lr.json, lr.png and lr.svg, which may not have these files; None to write nothing.
        progress: called with the number of steps done, and of all.
    """
    count = as_integer("steps", steps, 10, 100_000)
    if not (is_real(low) and is_real(high) and 0 < low < high <= 100):
        raise InputError(
            f"low and high must be learning rates, low < high <= 100, not {short_repr((low, high))}."
        )
    folder = None if out is None else Path(out)
    if folder is not None:
        there = [path for path in (folder / f"lr.{end}" for end in ("json", "png", "svg")) if path.exists()]
        if there or (folder.exists() and not folder.is_dir()):
            raise FileError(f"{printable((there or [folder])[0])} exists; choose another folder.")
    dataset = open_training_data(data, None, changes, Callback())
    resolved, start = resolve_recipe(recipe, dataset, from_, changes, size)
    plan = plan_recipe(dataset, resolved, start).with_settings(
        schedule="constant",
        warmup=0.0,
        epochs=1_000_000,
        ema=None,
        compile=False,  # not worth it for so few steps, like a CUDA graph
        cuda_graph=False,
    )
    trainer = Trainer(plan)
    curve = _ramp(trainer, count, low, high, resolved.train.lr, progress)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "lr.json", json.dumps(asdict(curve), indent=1))
        save_figure(curve.figure(), folder / "lr")
    return curve


def _ramp(
    trainer: Trainer, steps: int, low: float, high: float, own: float, progress: Callable[[int, int], None]
) -> LRCurve:
    """Take the steps; each learning rate is a constant factor above the one before."""
    lrs: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    base, average, last_of_epoch = trainer.settings, 0.0, 0.0

    def set_next() -> None:
        trainer.settings = replace(base, lr=low * (high / low) ** (trainer.step / (steps - 1)))

    def end_epoch(metrics: dict[str, Any]) -> None:
        nonlocal last_of_epoch
        last_of_epoch = metrics["loss"]  # the sums start anew at every step, so it is this step's

    def after_step() -> int | None:
        """Called after every step: a number ends the ramp."""
        nonlocal average
        loss, _, images, _ = trainer.metrics.totals()
        trainer.metrics.start_epoch()
        loss = loss if images else last_of_epoch
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        lrs.append(trainer.settings.lr)
        losses.append(loss)
        smoothed.append(average / (1 - _SMOOTHING ** len(losses)))
        progress(trainer.step, steps)
        exploded = len(smoothed) > 10 and smoothed[-1] > _EXPLODED * min(smoothed)
        if trainer.step >= steps or exploded:
            return _RAMP_ENDED
        set_next()
        return None

    set_next()
    with suppress(Interrupted, Diverged):
        trainer.run(end_epoch, stop=after_step)
    return LRCurve(lrs, losses, smoothed, suggest_lr(lrs, smoothed), own)


def suggest_lr(lrs: list[float], smoothed: list[float]) -> float:
    """A tenth of the learning rate of the lowest smoothed loss, with two digits."""
    finite = [(loss, lr) for loss, lr in zip(smoothed, lrs, strict=True) if math.isfinite(loss)]
    if not finite:
        raise InputError("no step of the ramp had a finite loss; check the images, or use precision=fp32.")
    return float(f"{min(finite)[1] / _FROM_MINIMUM:.2g}")
