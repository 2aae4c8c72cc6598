"""Runs that a study cannot do: with positions that stay as they are, from given weights, seen on the way.

They take the same steps as a study's runs do, and give the same numbers; nothing of them goes into files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitrail.data.sources import Dataset
from vitrail.model import ViT
from vitrail.training.keeper import Keeper
from vitrail.training.listen import Silent
from vitrail.training.loop import Trainer
from vitrail.training.parallel import Ranks
from vitrail.training.precision import choose_machine
from vitrail.training.settings import Recipe
from vitrail.training.tally import Diverged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    State = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Job:
    """A run to do."""

    chosen: Recipe
    rows: NDArray[np.float32] | None = None
    """E_pos (T, D) of a model with learned positions, which then does not learn."""
    start: State | None = None
    """The weights to begin with."""
    keep: tuple[int, ...] = ()
    """After which epochs the weights are kept."""


@dataclass(frozen=True, eq=False)
class Done:
    """What came out of a run."""

    score: float
    """The share of the held-out pictures that it got right after the last epoch; 0 if it diverged."""
    loss: float | None
    """On the same pictures; None if it diverged."""
    seconds: float
    states: dict[int, State] = field(default_factory=dict)
    """The weights after each epoch that was asked for."""


def do(job: Job, data: Dataset) -> Done:
    """Train, and judge at the end."""
    clock, trainer = time.perf_counter(), prepared(job, data)
    states: dict[int, State] = {}

    def after_epoch(epoch: int) -> None:
        trainer.pending = False
        if epoch in job.keep:
            weights = trainer.model.state_dict().items()
            states[epoch] = {name: tensor.cpu().numpy().copy() for name, tensor in weights}

    score, loss = 0.0, None
    try:
        trainer.run(after_epoch)
        found = Keeper(trainer, data, Silent()).judge(data.held_out)
        score, loss = found["val_accuracy"], found["val_loss"]
    except Diverged:
        pass
    return Done(score, loss, round(time.perf_counter() - clock, 3), states)


def judge(job: Job, data: Dataset) -> float:
    """The share of the held-out pictures right before anything is learned."""
    return Keeper(prepared(job, data), data, Silent()).judge(data.held_out)["val_accuracy"]


def prepared(job: Job, data: Dataset) -> Trainer:
    """The model with its first weights, before the first step."""
    settings = job.chosen.train
    torch.manual_seed(settings.seed)
    model = ViT(job.chosen.model)
    if job.start is not None:
        fill(model, job.start)
    machine = choose_machine(settings.precision)
    trainer = Trainer(model, job.chosen.preprocess, data, settings, machine, Ranks(), Path())
    if job.rows is not None:
        table = model.get_parameter("position.table")
        with torch.no_grad():
            table.copy_(torch.from_numpy(job.rows))
        table.requires_grad_(False)  # what has no gradient, the optimizer leaves alone
    return trainer


def fill(model: ViT, state: State) -> ViT:
    """The model with these weights."""
    model.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
    return model
