"""Training runs that a study cannot do: frozen position embeddings, given weights, snapshots per epoch.

They take the same steps as a study's runs and give the same numbers, but write no files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.model.device import choose_device
from vitrail.training.epoch import Diverged, evaluate_epoch
from vitrail.training.recipes.settings import Recipe
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class CustomRun:
    """A training run."""

    recipe: Recipe
    frozen_positions: NDArray[np.float32] | None = None
    """Position embeddings (T, D) that are not trained, for a model with `position="learned"`."""
    initial_weights: Weights | None = None
    snapshot_epochs: tuple[int, ...] = ()
    """Epochs after which the weights are returned."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """The outcome of a training run."""

    score: float
    """Accuracy on the held-out images after the last epoch; 0 if the run diverged."""
    loss: float | None
    """Loss on the same images; None if the run diverged."""
    seconds: float
    snapshots: dict[int, Weights] = field(default_factory=dict)
    """The weights after each of `snapshot_epochs`."""


def train_run(run: CustomRun, data: Dataset) -> RunResult:
    """Train, and evaluate after the last epoch."""
    start, trainer = time.perf_counter(), _build_trainer(run, data)
    snapshots: dict[int, Weights] = {}

    def after_epoch(metrics: dict[str, Any]) -> None:
        epoch = metrics["epoch"]
        if epoch in run.snapshot_epochs:
            weights = trainer.model.state_dict().items()
            snapshots[epoch] = {name: tensor.cpu().numpy().copy() for name, tensor in weights}

    score, loss = 0.0, None
    try:
        trainer.run(after_epoch)
        metrics = _evaluate_held_out(trainer)
        score, loss = metrics["val_accuracy"], metrics["val_loss"]
    except Diverged:
        pass
    return RunResult(score, loss, round(time.perf_counter() - start, 3), snapshots)


def initial_accuracy(run: CustomRun, data: Dataset) -> float:
    """Accuracy on the held-out images before the first step."""
    return _evaluate_held_out(_build_trainer(run, data))["val_accuracy"]


def _evaluate_held_out(trainer: Trainer) -> dict[str, Any]:
    return evaluate_epoch(
        trainer.averaged_model, trainer.data.eval_split, trainer.preprocess, trainer.compute
    )


def _build_trainer(run: CustomRun, data: Dataset) -> Trainer:
    settings = run.recipe.train
    torch.manual_seed(settings.seed)
    model = ViT(run.recipe.model)
    if run.initial_weights is not None:
        set_weights(model, run.initial_weights)
    device = choose_device(settings.precision, device=settings.device)
    trainer = Trainer(RunPlan(data, run.recipe, device), model)
    if run.frozen_positions is not None:
        table = model.get_parameter("position.table")
        with torch.no_grad():
            table.copy_(torch.from_numpy(run.frozen_positions))
        table.requires_grad_(False)  # without a gradient, the optimizer skips it
    return trainer


def set_weights(model: ViT, weights: Weights) -> ViT:
    """Copy weights into a model and return it."""
    model.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()})
    return model
