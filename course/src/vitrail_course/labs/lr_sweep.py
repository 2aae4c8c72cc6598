"""Training of classifiers that a study cannot train, such as CNNs, each at its own best learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.experiment.trial import ProcessPool
from vitrail.images.loader import batch_indices, steps_in_epoch
from vitrail.images.rng import random_permutation

BATCH = 64
_WARMUP = 0.05  # fraction of the steps
_WEIGHT_DECAY, _CLIP_NORM = 0.01, 1.0


@dataclass(frozen=True, eq=False)
class ClassifierRun:
    """A model to train and its data: everything a worker process needs."""

    build: Callable[[], nn.Module]
    images: Tensor
    """(N, C, H, W), preprocessed."""
    labels: Tensor
    held_out: tuple[Tensor, Tensor]
    """Images and labels for the evaluation."""
    steps: int
    lr: float
    seed: int
    """Determines initial weights and batches."""


@dataclass(frozen=True, eq=False)
class SweepResult:
    """The results of one arm at its best learning rate."""

    lr: float
    scores: list[float]
    """Accuracy on the held-out images, for each seed."""
    state: Mapping[str, Tensor]
    """The weights of the first seed."""
    sweep: Mapping[float, float]
    """The accuracy of the first seed at each learning rate."""

    @property
    def mean(self) -> float:
        return fmean(self.scores)


def train_classifier(run: ClassifierRun) -> tuple[float, dict[str, Tensor]]:
    """Train a model and return its accuracy on the held-out images and its weights."""
    torch.manual_seed(run.seed)
    model, batches = run.build(), iterate_batches(len(run.labels), run.seed)

    def batch_loss() -> Tensor:
        indices = next(batches)
        return F.cross_entropy(model(run.images[indices]), run.labels[indices])

    train_model(model, batch_loss, run.steps, run.lr)
    images, labels = run.held_out
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(dim=1) for part in images.split(256)])
    return (predicted == labels).double().mean().item(), model.state_dict()


def iterate_batches(images: int, seed: int) -> Iterator[Tensor]:
    """The indices of each batch, without end; every epoch has its own order."""
    batch = min(BATCH, images)
    steps = steps_in_epoch(images, batch)
    for epoch in count():
        order = random_permutation([seed, epoch], images)
        yield from (batch_indices(order, step, batch) for step in range(steps))


def sweep_learning_rates(
    plan: Callable[[str, float, int], ClassifierRun],
    names: Sequence[str],
    lrs: Sequence[float],
    seeds: int,
    pool: ProcessPool,
) -> dict[str, SweepResult]:
    """Train every arm at every learning rate on the first seed, then the other seeds at the best one.

    Args:
        plan: returns the run for an arm's name, a learning rate and a seed.
    """
    sweep = [(name, lr) for name in names for lr in lrs]
    first = dict(zip(sweep, pool.map(train_classifier, [plan(*key, 0) for key in sweep]), strict=True))
    best = {name: max((first[name, lr][0], -lr, lr) for lr in lrs)[-1] for name in names}
    others = [(name, seed) for name in names for seed in range(1, seeds)]
    trained = pool.map(train_classifier, [plan(name, best[name], seed) for name, seed in others])
    other_scores = {key: score for key, (score, _) in zip(others, trained, strict=True)}
    results = {}
    for name in names:
        score, state = first[name, best[name]]
        scores = [score, *(other_scores[name, seed] for seed in range(1, seeds))]
        results[name] = SweepResult(best[name], scores, state, {lr: first[name, lr][0] for lr in sorted(lrs)})
    return results


# ---- the training loop ----------------------------------------------------------------------


def train_model(model: nn.Module, batch_loss: Callable[[], Tensor], steps: int, lr: float) -> list[float]:
    """Train a model and return the loss of every step.

    Args:
        batch_loss: draws a batch and returns the model's loss on it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=_WEIGHT_DECAY)
    model.train()
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_factor(step, steps)
        optimizer.zero_grad()
        loss = batch_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def lr_factor(step: int, steps: int) -> float:
    """The factor on the learning rate at a step: linear warmup, then a half cosine down to 0."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
