"""How a run reads its image files: how fast, measured before the first step, and which no step uses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from vitrail.base.machine import usable_cores
from vitrail.images.loader import AHEAD, CorruptFiles, Reader
from vitrail.images.workers import PREFETCH, WorkerPlan
from vitrail.training.trainer import Trainer

_MIN_READS = 2_000  # images that the run has yet to read: fewer take about as long as measuring
_SECONDS = 1.0
_REQUEST = 64  # images


def measure_loading(trainer: Trainer) -> float | None:
    """Images per second that this process reads and decodes while it computes nothing.

    None for arrays, and where few images are left to read.
    """
    t = trainer
    reads = (t.steps - t.step) * t.batch // t.ranks.count
    if t.data.train.paths is None or reads < _MIN_READS:
        return None
    reader = Reader(
        t.data.train,
        t.reading,
        augment=t.settings.augment,
        seed=t.settings.seed,
        workers=t.workers,
        corrupt=CorruptFiles("skip"),  # the run itself reports them
        device=t.compute.device,
    )
    batches = reader.batches(_requests(t))
    passed = read = 0
    start = 0.0
    for batch in batches:
        passed += len(batch.indices)
        if not start:
            if passed > _prefetched(t.workers.plan, t.workers.chunk):
                start = time.perf_counter()
            continue
        read += len(batch.indices)
        if time.perf_counter() - start > _SECONDS:
            break
    return read / (time.perf_counter() - start) if read else None


def read_unused(trainer: Trainer) -> None:
    """Read the images of the first epoch's incomplete last batch, which no step uses.

    So a file that cannot be read is found in the first epoch, wherever it is in the order.
    """
    t, count = trainer, len(trainer.data.train)
    rest = torch.arange(min(t.steps_per_epoch * t.batch, count), count)
    if t.data.train.paths is None or not len(rest):
        return
    own = t.order(0)[rest][t.ranks.rank :: t.ranks.count]
    reader = Reader(t.data.train, t.reading, workers=t.workers, corrupt=t.corrupt)
    deque(reader.batches((0, part) for part in own.split(_REQUEST)), maxlen=0)
    t.corrupt.reasons = t.ranks.union(t.corrupt.reasons)


def _requests(trainer: Trainer) -> Iterator[tuple[int, Tensor]]:
    """The images of the next steps, in small parts."""
    for epoch, indices in trainer.micro_batch_indices():
        yield from ((epoch, part) for part in indices.split(_REQUEST))


def _prefetched(plan: WorkerPlan, chunk: int) -> int:
    """How many images may be ready before the first of them is needed."""
    if plan.kind == "processes":
        return 2 * PREFETCH * plan.count * chunk
    return AHEAD * _REQUEST if plan.kind == "threads" else 0


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
