"""A run from beginning to end."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.config import by
from vitrail.data.sources import Dataset, open_data
from vitrail.errors import ConfigError, VitrailError, suggest
from vitrail.fields import show
from vitrail.model import ViT
from vitrail.recipes import Recipe
from vitrail.recipes import recipe as recipe_for
from vitrail.train.keeper import Keeper
from vitrail.train.listen import Listener, Silent
from vitrail.train.loop import Stopped, Trainer
from vitrail.train.parallel import join
from vitrail.train.place import prepare
from vitrail.train.precision import choose_machine
from vitrail.train.settings import TrainConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.describe import fitted
from vitrail.weights.load import load


@dataclass(frozen=True)
class Run:
    """A finished run."""

    out: Path
    bundle: Bundle
    """The weights that were judged best: their running mean, where there is one."""
    metrics: list[dict[str, Any]]
    """A row for each epoch."""


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    recipe: str = "small",
    start: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **changes: Any,
) -> Run:
    """Train a model on labelled pictures.

    Args:
        data: what `vitrail.data.sources.open_data` takes: a folder of pictures, a table, an array file.
        out: the run's folder; it must be empty or new, unless `resume` is given.
        recipe: where the settings come from.
        start: a weight file to start from, of any family; its head is replaced.
        resume: go on with the run in `out`, from its last whole checkpoint.
        changes: fields of TrainConfig, such as epochs=10; and model=, augment=, mixing= with a
            mapping of theirs.
    """
    say, ranks, place = listener or Silent(), join(), Path(out)
    dataset = data if isinstance(data, Dataset) else open_data(data, seed=int(changes.get("seed", 0)))
    for note in dataset.notes:
        say.note(note)
    chosen = settle(recipe, dataset, start, changes)
    if prepare(place, resume, chosen, ranks, say):
        return finished(place)
    machine = choose_machine(chosen.train.precision, ranks.local)
    say.note(f"Computing on {machine.reason}.")
    model = first_model(chosen, start, dataset, say)
    trainer = Trainer(model, chosen.preprocess, dataset, chosen.train, machine, ranks, place, say.progress)
    keeper = Keeper(trainer, dataset, say)
    if resume:
        keeper.go_on()
    say.plan(plan(trainer))
    with signals(trainer):
        try:
            trainer.run(keeper.after_epoch)
        except Stopped:
            trainer.save()
            say.note(f"Stopped at step {trainer.step:,} of {trainer.steps:,}; go on with --resume.")
            raise
        except torch.OutOfMemoryError as error:
            raise too_large(trainer) from error
    keeper.finish()
    return Run(place, keeper.judged_best(), trainer.history)


def settle(name: str, data: Dataset, start: str | Path | None, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with the user's changes."""
    chosen = recipe_for(name, data)
    fields = dict(changes)
    model = dict(fields.pop("model", None) or {})
    nested = {part: fields.pop(part) for part in ("augment", "mixing") if part in fields}
    known = list(TrainConfig.__dataclass_fields__)
    for key in fields:
        if key not in known:
            raise ConfigError(
                "A run takes the fields of TrainConfig.", f"{key}={show(fields[key])}", suggest(key, known)
            )
    settings = chosen.train
    for part, more in nested.items():
        settings = replace(settings, **{part: replace(getattr(settings, part), **more)})
    settings = replace(settings, **fields)
    config = replace(chosen.model, **model)
    preprocess = chosen.preprocess
    if start is not None:
        bundle = load(start, classes=config.classes, **({"size": model["size"]} if "size" in model else {}))
        config, preprocess = bundle.model.config, bundle.preprocess or preprocess
    elif config.pixels != preprocess.target or config.channels != preprocess.channels:
        preprocess = fitted(preprocess, config)
    return Recipe(config, preprocess, settings)


def first_model(chosen: Recipe, start: str | Path | None, data: Dataset, say: Listener) -> ViT:
    """Fresh weights from the seed, or those of the file to start from."""
    if start is None:
        torch.manual_seed(chosen.train.seed)
        return ViT(chosen.model)
    bundle = load(start, classes=chosen.model.classes, size=chosen.model.pixels)  # type: ignore[arg-type]
    for note in bundle.notes:
        say.note(note)
    return bundle.model


def too_large(trainer: Trainer) -> VitrailError:
    """What to do when the device's memory does not hold a step."""
    s, size = trainer.settings, by(trainer.preprocess.target)
    return ConfigError(
        "A step must fit in the device's memory.",
        f"{trainer.batch} pictures of {size} in {s.accumulate} parts, {trainer.machine.dtype}",
        f"Use --set accumulate={2 * s.accumulate}, which computes the same in smaller parts.",
    )


def plan(trainer: Trainer) -> dict[str, Any]:
    """What is to come, before it comes."""
    s, count = trainer.settings, sum(p.numel() for p in trainer.model.parameters())
    learning = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    held = trainer.data.held_out
    return {
        "data": f"{trainer.data.name}: {len(trainer.data.classes)} classes",
        "pictures": f"{len(trainer.data.train):,} to learn from, {len(held):,} to judge by",
        "parameters": f"{count:,}" + (f", of which {learning:,} learn" if learning != count else ""),
        "tokens": f"{trainer.model.config.tokens} for each picture",
        "steps": f"{trainer.steps:,} of {trainer.batch} pictures: {s.epochs} epochs of {trainer.per_epoch}",
        "memory": f"about {memory(trainer, learning, count) / 2**20:,.0f} MB for weights and activations",
    }


def memory(trainer: Trainer, learning: int, count: int) -> float:
    """Bytes: weights, gradients, the optimizer's two means, and what backward needs of every block."""
    c = trainer.model.config
    part = trainer.batch / trainer.ranks.count / trainer.settings.accumulate
    width = 2 if trainer.machine.dtype == torch.bfloat16 else 4
    block = c.tokens * (10 * c.width + 3 * c.heads_width + 2 * c.F)
    return 4 * (count + 3 * learning) + part * c.depth * block * width


def finished(out: Path) -> Run:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Run(out, load(out / "best.safetensors"), rows)


@contextmanager
def signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and SIGINT save and stop; the second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if trainer.signal is not None:
            sys.exit(128 + number)
        trainer.signal = number

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
