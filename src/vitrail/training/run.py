"""A run from beginning to end."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.config import by
from vitrail.data.sources import Dataset
from vitrail.errors import ConfigError, VitrailError
from vitrail.memory import check_fits, is_out_of_memory, training_bytes
from vitrail.model import ViT
from vitrail.training.keeper import Keeper
from vitrail.training.listen import Listener, Silent
from vitrail.training.log import Log
from vitrail.training.loop import Stopped, Trainer
from vitrail.training.lora import check_rank
from vitrail.training.parallel import batch_of, join
from vitrail.training.place import prepare
from vitrail.training.precision import choose_machine
from vitrail.training.settings import Recipe
from vitrail.training.teacher import Teacher
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

TOGETHER = 2.0  # seconds


@dataclass(frozen=True)
class Run:
    """A finished run."""

    out: Path
    bundle: Bundle
    """The weights that were judged best: their running mean, where there is one."""
    metrics: list[dict[str, Any]]
    """A row for each epoch."""


def run(
    dataset: Dataset,
    chosen: Recipe,
    out: str | Path,
    *,
    start: Bundle | None = None,
    teacher: Bundle | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Train by a recipe, from beginning to end, or from the last whole checkpoint in `out`."""
    ranks, place = join(), Path(out)
    say = Log(listener or Silent(), place / "log.txt", writes=ranks.first)
    for note in (*dataset.notes, *chosen.notes):
        say.note(note)
    machine = choose_machine(chosen.train.precision, ranks.local)
    batch = batch_of(dataset, chosen.train, ranks)  # what cannot be is found out before there is a folder
    check_rank(chosen.model, chosen.train)
    if machine.device.type == "cpu":
        part = batch // ranks.count // chosen.train.accumulate
        do = "use a smaller --size, --batch or model, or --set accumulate=2"
        check_fits(training_bytes(chosen.model, part), chosen.model, part, "A training step", do)
    guide = None if teacher is None else Teacher(teacher, dataset, chosen.model.channels, machine)
    origin = {"from_file": start is not None, "teacher": guide and guide.digest}
    if prepare(place, resume, chosen, dataset, origin, ranks, say):
        return finished(place)
    say.begin()
    say.note(f"Computing on {machine.reason}.")
    for note in guide.notes if guide else []:
        say.note(f"The teacher: {note}")
    model = first_model(chosen, start, say)
    trainer = Trainer(
        model, chosen.preprocess, dataset, chosen.train, machine, ranks, place, say.progress, guide
    )
    keeper = Keeper(trainer, dataset, say)
    if resume:
        keeper.go_on()
    with signals(trainer):
        try:
            say.plan(plan(trainer))
            trainer.run(keeper.after_epoch)
        except Stopped:
            trainer.save()
            say.note(f"Stopped at step {trainer.step:,} of {trainer.steps:,}; go on with --resume.")
            raise
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise too_large(trainer) from error
            raise
    keeper.finish()
    return Run(place, keeper.judged_best(), trainer.history)


def first_model(chosen: Recipe, start: Bundle | None, say: Listener) -> ViT:
    """Fresh weights from the seed, or those to start from."""
    torch.manual_seed(chosen.train.seed)
    model = ViT(chosen.model)
    if start is not None:
        for note in start.notes:
            say.note(note)
        model.load_state_dict(start.model.state_dict())
    return model


def too_large(trainer: Trainer) -> VitrailError:
    """What to do when the device's memory does not hold a step."""
    s, size = trainer.settings, by(trainer.preprocess.target)
    parts = f" in {s.accumulate} parts" if s.accumulate > 1 else ""
    return ConfigError(
        f"a step of {trainer.batch} images of {size}{parts} ({trainer.machine.dtype}) does not fit in the "
        f"device's memory; use --set accumulate={2 * s.accumulate}, which computes the same in smaller parts."
    )


def plan(trainer: Trainer) -> dict[str, Any]:
    """What is to come, before it comes."""
    s, count = trainer.settings, sum(p.numel() for p in trainer.model.parameters())
    learning = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    held = trainer.data.held_out
    facts = {
        "data": f"{trainer.data.name}: {len(trainer.data.classes)} classes",
        "pictures": f"{len(trainer.data.train):,} to learn from, {len(held):,} to judge by",
        "parameters": f"{count:,}" + (f", of which {learning:,} learn" if learning != count else ""),
        "tokens": f"{trainer.model.config.tokens} for each picture",
        "steps": f"{trainer.steps:,} of {trainer.batch} pictures, in {s.epochs} epoch{'s' * (s.epochs > 1)}",
        "memory": f"about {memory(trainer, learning, count) / 2**20:,.0f} MB for weights and activations",
        "time": f"about {in_words(seconds_left(trainer))}, going by one step",
    }
    if trainer.teacher is not None:
        theirs = sum(p.numel() for p in trainer.teacher.model.parameters())
        share = f"{s.distill_weight:.0%} of the loss"
        facts["teacher"] = f"{theirs:,} parameters; {s.distill} answers, {share}"
    return facts


def seconds_left(trainer: Trainer) -> float:
    """The time of the steps that are left, from one forward and backward pass of random pictures."""
    s, machine = trainer.settings, trainer.machine
    count = trainer.batch // trainer.ranks.count // s.accumulate
    images = torch.rand(count, *trainer.model.config.input_shape, device=machine.device)
    clock = 0.0
    for _ in range(2):  # the first time around, memory is still being asked for
        start = time.perf_counter()
        with machine.computing():
            loss = trainer.model(images).float().square().mean()
        loss.backward()
        if trainer.teacher is not None:
            trainer.teacher(images)
        if machine.device.type == "cuda":
            torch.cuda.synchronize(machine.device)
        clock = time.perf_counter() - start
    trainer.optimizer.zero_grad(set_to_none=True)
    return clock * s.accumulate * (trainer.steps - trainer.step)


def in_words(seconds: float) -> str:
    """A time as people say it: 40 seconds, 8 minutes, 3.5 hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"


def memory(trainer: Trainer, learning: int, count: int) -> float:
    """Bytes: weights, gradients, the optimizer's two means, and what backward needs of every block.

    Of blocks that do not learn, backward needs nothing: there is one at a time.
    """
    c = trainer.model.config
    depth = c.depth if any(p.requires_grad for p in trainer.model.blocks.parameters()) else 1
    part = trainer.batch / trainer.ranks.count / trainer.settings.accumulate
    width = 2 if trainer.machine.dtype == torch.bfloat16 else 4
    block = c.tokens * (10 * c.width + 3 * c.heads_width + 2 * c.F)
    return 4 * (count + 3 * learning) + part * depth * block * width


def finished(out: Path) -> Run:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Run(out, load(out / "best.safetensors"), rows)


@contextmanager
def signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and SIGINT save and stop; the second one stops at once.

    torchrun passes on a signal that the terminal has sent to every process already: with it, what
    comes right after the first is the first.
    """
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        nonlocal first
        if trainer.signal is None:
            trainer.signal, first = number, time.monotonic()
        elif trainer.ranks.count == 1 or time.monotonic() - first > TOGETHER:
            sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
