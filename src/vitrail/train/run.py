"""A run from beginning to end: its folder, its plan, its evaluations, its checkpoints, its end."""

from __future__ import annotations

import json
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from vitrail import __version__
from vitrail.data.loader import Corrupt
from vitrail.data.sources import Dataset, Split, open_data
from vitrail.errors import ConfigError, FileError, printable, suggest
from vitrail.evaluate.forward import outputs_of
from vitrail.fields import show
from vitrail.model import ViT
from vitrail.recipes import Recipe, recipe
from vitrail.train import checkpoint as files
from vitrail.train.loop import Progress, Stopped, Trainer
from vitrail.train.parallel import Ranks, join
from vitrail.train.precision import choose_machine
from vitrail.train.settings import TrainConfig
from vitrail.weights.bundle import Bundle, Card
from vitrail.weights.load import load


class Listener(Protocol):
    """Whoever is told how a run is going."""

    def note(self, text: str) -> None: ...
    def plan(self, facts: Mapping[str, Any]) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def epoch(self, metrics: Mapping[str, Any]) -> None: ...


class Silent:
    """Nobody."""

    def note(self, text: str) -> None:
        pass

    def plan(self, facts: Mapping[str, Any]) -> None:
        pass

    def progress(self, progress: Progress) -> None:
        pass

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        pass


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
    keeper.finish()
    return Run(place, keeper.judged_best(), trainer.history)


def settle(name: str, data: Dataset, start: str | Path | None, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with the user's changes."""
    chosen = recipe(name, data)
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
        from vitrail.weights.describe import fitted

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


def prepare(out: Path, resume: bool, chosen: Recipe, ranks: Ranks, say: Listener) -> bool:
    """Make the run's folder, or check that it is this run's; True where the run is finished already."""
    described = {
        "model": asdict(chosen.model),
        "train": asdict(chosen.train),
        "preprocess": asdict(chosen.preprocess),
    }
    described = json.loads(json.dumps(described))
    file = out / "config.json"
    if resume and file.exists():
        known = json.loads(file.read_text())
        for part, fields in described.items():
            for name, value in fields.items():
                if known.get(part, {}).get(name) != value and name not in ("workers", "keep"):
                    raise ConfigError(
                        "A run is gone on with by the settings it began with.",
                        f"{part}.{name}={show(value)}, and {show(known.get(part, {}).get(name))} in the run",
                        "Give the same settings, or another --out.",
                    )
        return (out / "best.safetensors").exists() and (out / "last.safetensors").exists()
    if resume:
        say.note("There is no run to go on with: it starts at step 0.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not resume:
        raise FileError(
            "--out must be a new or empty folder.", printable(out), "Name another, or go on with --resume."
        )
    if ranks.first:
        out.mkdir(parents=True, exist_ok=True)
        files.write_text(out / "environment.json", json.dumps(environment(), indent=2))
        files.write_text(file, json.dumps(described, indent=2))
    ranks.wait()
    return False


def environment() -> dict[str, Any]:
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def finished(out: Path) -> Run:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Run(out, load(out / "best.safetensors"), rows)


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
        "steps": f"{trainer.steps:,}: {s.epochs} epochs of {trainer.per_epoch}, {trainer.batch} pictures each",
        "memory": f"about {memory(trainer, learning, count) / 2**20:,.0f} MB for weights and activations",
    }


def memory(trainer: Trainer, learning: int, count: int) -> float:
    """Bytes: weights, gradients, the optimizer's two means, and what backward needs of every block."""
    c = trainer.model.config
    part = trainer.batch / trainer.ranks.count / trainer.settings.accumulate
    width = 2 if trainer.machine.dtype == torch.bfloat16 else 4
    block = c.tokens * (10 * c.width + 3 * c.heads_width + 2 * c.F)
    return 4 * (count + 3 * learning) + part * c.depth * block * width


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


@dataclass
class Keeper:
    """What happens after an epoch: judge, write down, keep."""

    trainer: Trainer
    data: Dataset
    say: Listener
    best: float = -1.0

    def go_on(self) -> None:
        """From the last whole checkpoint, if there is one."""
        found, warnings = files.load_newest(self.trainer.out / "checkpoints")
        for warning in warnings:
            self.say.note(warning)
        if found is None:
            self.say.note("There is no whole checkpoint: it starts at step 0.")
            return
        self.trainer.restore(found)
        scores = [row["val_accuracy"] for row in self.trainer.history if "val_accuracy" in row]
        self.best = max(scores, default=-1.0)
        self.say.note(f"Going on at step {found.step:,} of {self.trainer.steps:,}.")

    def after_epoch(self, epoch: int) -> None:
        t, row = self.trainer, self.trainer.history[-1]
        last = epoch == t.settings.epochs
        if epoch % t.settings.evaluate_every == 0 or last:
            row |= self.judge(self.data.held_out)
        if t.ranks.first:
            lines = "".join(json.dumps(one) + "\n" for one in t.history)
            replace_text(t.out / "metrics.jsonl", lines)
            if self.data.val is not None and row.get("val_accuracy", -1.0) > self.best:
                self.best = row["val_accuracy"]
                self.bundle(t.ema or t.model).save(t.out / "best.part.safetensors")
                (t.out / "best.part.safetensors").replace(t.out / "best-so-far.safetensors")
        self.say.epoch(row)
        if epoch % t.settings.save_every == 0 or last:
            t.save()

    def judge(self, split: Split) -> dict[str, float]:
        """Loss and accuracy on held-out pictures, the same for any number of processes."""
        t = self.trainer
        model = t.ema or t.model

        def ahead(done: int) -> None:
            if t.signal is not None and t.ranks.count == 1:
                raise Stopped(t.signal)

        corrupt = Corrupt(t.settings.corrupt)
        how: dict[str, Any] = {"rank": t.ranks.rank, "ranks": t.ranks.count, "workers": t.settings.workers}
        with t.machine.autocast():
            logits, kept = outputs_of(model, split, t.preprocess, corrupt=corrupt, ahead=ahead, **how)
        logits = t.ranks.add(logits.to(t.machine.device)).cpu()
        kept = t.ranks.add(kept.to(t.machine.device)).cpu()
        labels = torch.from_numpy(split.labels)
        if labels.ndim == 2:
            each = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
            right = ((logits > 0) == labels.bool()).float().mean(1)
        else:
            each = F.cross_entropy(logits, labels, reduction="none")
            right = (logits.argmax(1) == labels).float()
        seen = kept.sum().clamp(min=1)
        return {
            "val_loss": ((each * kept).double().sum() / seen).item(),
            "val_accuracy": ((right * kept).double().sum() / seen).item(),
            "val_seen": int(kept.sum()),
        }

    def bundle(self, model: ViT) -> Bundle:
        rows = [row for row in self.trainer.history if "val_accuracy" in row]
        metrics = {"accuracy": rows[-1]["val_accuracy"]} if rows else {}
        card = Card(name=self.data.name, source=f"trained on {self.data.name}", metrics=metrics)
        spec = self.trainer.preprocess
        return Bundle(model=model, preprocess=spec, labels=list(self.data.classes), card=card)

    def finish(self) -> None:
        """The last weights, and those that were judged best."""
        t = self.trainer
        if t.ranks.first:
            self.bundle(t.model).save(t.out / "last.safetensors")
            chosen = t.out / "best-so-far.safetensors"
            if chosen.exists():
                chosen.replace(t.out / "best.safetensors")
            else:  # judged by the test set, which may not choose: the last it is
                self.bundle(t.ema or t.model).save(t.out / "best.safetensors")
        t.ranks.wait()

    def judged_best(self) -> Bundle:
        return load(self.trainer.out / "best.safetensors")


def replace_text(file: Path, text: str) -> None:
    """A text file, whole or as it was."""
    aside = file.with_name(f".{file.name}.part")
    files.write_text(aside, text)
    aside.replace(file)
