"""The trainer of a run, as a real run and `--dry-run` build it."""

from __future__ import annotations

from dataclasses import replace

import torch

from vitrail.base.errors import option
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice
from vitrail.training.callbacks import Callback
from vitrail.training.parallel import ProcessGroup
from vitrail.training.plan.minutes import Rehearsed, TimeBudget, fit_minutes
from vitrail.training.recipes.settings import Recipe
from vitrail.training.teacher import Teacher
from vitrail.training.trainer import Trainer
from vitrail.weights.bundle.bundle import Bundle


def fit_recipe(
    recipe: Recipe,
    dataset: Dataset,
    budget: TimeBudget,
    compute: ComputeDevice,
    ranks: ProcessGroup,
    teacher: Teacher | None,
    log: Callback,
) -> tuple[Recipe, Rehearsed]:
    """The recipe with a number of epochs that fits the time budget, and what the rehearsal has measured."""
    log.on_message("Timing some steps, to choose the number of epochs by the minutes.")
    model = ViT(recipe.model)
    rehearsal = Trainer(model, recipe.preprocess, dataset, recipe.train, compute, ranks, teacher)
    rehearsed = fit_minutes(rehearsal, budget)
    return replace(recipe, train=rehearsed.train, notes=(*recipe.notes, rehearsed.reason)), rehearsed


def build_trainer(
    dataset: Dataset,
    recipe: Recipe,
    start: Bundle | None,
    teacher: Teacher | None,
    compute: ComputeDevice,
    ranks: ProcessGroup,
    log: Callback,
) -> Trainer:
    """The trainer at step 0; what was decided on the way is reported."""
    chosen = recipe.train.device == "auto" and compute.device.type == "cuda"
    otherwise = f"; {option('device', 'cpu')} chooses otherwise" if chosen else ""
    log.on_message(f"Computing on {compute.reason}{otherwise}.")
    for note in (*dataset.notes, *recipe.notes):
        log.on_message(note)
    for note in teacher.notes if teacher else []:
        log.on_message(f"The teacher: {note}")
    model = _initial_model(recipe, start, log)
    trainer = Trainer(model, recipe.preprocess, dataset, recipe.train, compute, ranks, teacher)
    trainer.on_message = log.on_message
    return trainer


def _initial_model(recipe: Recipe, start: Bundle | None, log: Callback) -> ViT:
    """Random weights from the seed, or those to start from."""
    torch.manual_seed(recipe.train.seed)
    model = ViT(recipe.model)
    if start is not None:
        for note in start.notes:
            log.on_message(note)
        model.load_state_dict(start.model.state_dict())
    return model
