"""Training for models that are no ViT, which a study cannot train: each at its own best rate, as there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.chance import shuffle
from vitrail.data.loader import batch_indices, steps_in_epoch
from vitrail.labs.descent import descend
from vitrail.labs.trial import Pool

BATCH = 64


@dataclass(frozen=True, eq=False)
class Lesson:
    """A model to train, and on what: all that a process of its own needs."""

    build: Callable[[], nn.Module]
    images: Tensor
    """(N, C, H, W) as the model takes them."""
    labels: Tensor
    held_out: tuple[Tensor, Tensor]
    """Pictures and labels to judge by."""
    steps: int
    rate: float
    seed: int
    """Decides first values and batches: they are the same for every model and rate."""


@dataclass(frozen=True, eq=False)
class Learned:
    """How one kind of model fared at its best rate."""

    rate: float
    scores: list[float]
    """The share of the held-out pictures that was right, for each seed."""
    state: Mapping[str, Tensor]
    """The weights of the first seed."""

    @property
    def mean(self) -> float:
        return fmean(self.scores)


def learn(lesson: Lesson) -> tuple[float, dict[str, Tensor]]:
    """The share of held-out pictures right at the end, and the weights."""
    torch.manual_seed(lesson.seed)
    model, batches = lesson.build(), drawn(len(lesson.labels), lesson.seed)

    def loss() -> Tensor:
        which = next(batches)
        return F.cross_entropy(model(lesson.images[which]), lesson.labels[which])

    descend(model, loss, lesson.steps, lesson.rate)
    images, labels = lesson.held_out
    with torch.no_grad():
        answers = torch.cat([model(part).argmax(dim=1) for part in images.split(256)])
    return (answers == labels).double().mean().item(), model.state_dict()


def drawn(pictures: int, seed: int) -> Iterator[Tensor]:
    """Which pictures are in each batch, without an end: every epoch has an order of its own."""
    batch = min(BATCH, pictures)
    steps = steps_in_epoch(pictures, batch)
    for epoch in count():
        order = shuffle([seed, epoch], pictures)
        yield from (batch_indices(order, step, batch) for step in range(steps))


def at_best_rates(
    plan: Callable[[str, float, int], Lesson],
    names: Sequence[str],
    rates: Sequence[float],
    seeds: int,
    pool: Pool,
) -> dict[str, Learned]:
    """As a study does it: every rate on the first seed, then the other seeds at the best of them.

    Args:
        plan: the lesson for a name, a rate and a seed.
    """
    tried = [(name, rate) for name in names for rate in rates]
    first = dict(zip(tried, pool.each(learn, [plan(*one, 0) for one in tried]), strict=True))
    best = {name: max((first[name, rate][0], -rate, rate) for rate in rates)[-1] for name in names}
    left = [(name, seed) for name in names for seed in range(1, seeds)]
    done = pool.each(learn, [plan(name, best[name], seed) for name, seed in left])
    more = dict(zip(left, done, strict=True))
    found = {}
    for name in names:
        score, state = first[name, best[name]]
        scores = [score, *(more[name, seed][0] for seed in range(1, seeds))]
        found[name] = Learned(best[name], scores, state)
    return found
