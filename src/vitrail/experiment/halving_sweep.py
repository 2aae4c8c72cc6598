"""A small search over learning rate, weight decay and augmentation, by successive halving.

All candidates are trained for a fraction of the epochs; the best third of them for three times as long, and
so on, until one is left that is trained to the end (Jamieson and Talwalkar 2016). Each of these runs is a
complete one with its own schedule, so that short and long runs are compared only with their equals. The
first candidate is the recipe itself.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail.base.fields import as_integer
from vitrail.base.safe_files import write_text
from vitrail.base.summary import Summary
from vitrail.experiment.trial import StudyPool, Trial, TrialTask, check_folder
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import Dataset
from vitrail.images.rng import random_uniform
from vitrail.training.callbacks import Callback
from vitrail.training.open_data import open_training_data
from vitrail.training.recipes.settings import MAX_SEED, TrainConfig
from vitrail.training.resolve import resolve_recipe
from vitrail.training.run_directory import environment

_KEEP = 3  # one of so many candidates goes on to the next round, for as many times the epochs
_LR_FACTOR, _DECAY_FACTOR = 4.0, 5.0  # candidates are drawn from 1/factor to factor of the recipe's value
_STRENGTHS = (0.5, 1.0, 1.5)  # of the recipe's augmentation
_STREAM = 20_417  # of random numbers, like no other use of the seed
_RECORD = "sweep.json"


@dataclass(frozen=True)
class Candidate:
    """Settings to try."""

    name: str
    lr: float
    weight_decay: float
    strength: float
    """Of the augmentation, relative to the recipe's."""


@dataclass(frozen=True)
class Round:
    """Candidates trained for the same number of epochs, and the held-out accuracy of each."""

    epochs: int
    scores: dict[str, float]


@dataclass(frozen=True, repr=False)
class Sweep(Summary):
    """The results of a search."""

    out: Path
    data: str
    candidates: list[Candidate]
    rounds: list[Round]
    best: Candidate
    score: float
    """The held-out accuracy of the best candidate after all epochs. It was selected by it among others, so
    expect a little less on new images."""
    command: str
    model: str
    """The model file of the best candidate, in `out`."""
    environment: Mapping[str, Any] = field(default_factory=environment)

    def summary(self) -> dict[str, str]:
        """The best candidate, and the command that trains it."""
        b = self.best
        best = f"lr {b.lr:g}, weight decay {b.weight_decay:g}, augmentation x {b.strength:g}"
        return {"accuracy": f"{self.score:.2%}", "best": best, "command": self.command}


def sweep(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    trials: int = 9,
    recipe: str = "auto",
    from_: str | Path | None = None,
    size: int | tuple[int, int] | None = None,
    seed: int = 0,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **changes: Any,
) -> Sweep:
    """Search for a better learning rate, weight decay and strength of augmentation.

    Args:
        data: what `vitrail.train` takes.
        out: a folder. Finished runs in it are not run again; unfinished ones are resumed.
        trials: the number of candidates of the first round; 9 cost about three runs of all epochs, and
            27 about four.
        recipe: the recipe of all other settings, and the first candidate.
        from_: a weight file to start from.
        processes: how many runs at a time, one thread each. The results do not depend on it.
        progress: called with the number of runs that are done, and of all.
        changes: changes to the recipe for all runs, such as epochs=27, as `vitrail.train` takes them.
    """
    count, seed = as_integer("trials", trials, 2, 1000), as_integer("seed", seed, 0, MAX_SEED)
    folder, dataset = Path(out), open_training_data(data, None, changes, Callback())
    base, start = resolve_recipe(recipe, dataset, from_, {**changes, "seed": seed}, size)
    check_folder(folder, "sweep", (_RECORD,))
    candidates = draw_candidates(base.train, count, seed)
    plan = _rounds(count, base.train.epochs)

    def task(candidate: Candidate, epochs: int) -> TrialTask:
        settings = replace(_changed(base.train, candidate), epochs=epochs)
        path = folder / "runs" / f"{epochs} epochs" / candidate.name
        return TrialTask(candidate.name, candidate.lr, seed, replace(base, train=settings), path, start)

    folder.mkdir(parents=True, exist_ok=True)
    left, rounds, done, total = candidates, [], 0, sum(number for number, _ in plan)
    with StudyPool(dataset, as_integer("processes", processes, 1)) as pool:
        for number, epochs in plan:
            tasks = [task(one, epochs) for one in left[:number]]
            trials_of_round: list[Trial] = []
            for first in range(0, len(tasks), pool.processes):
                trials_of_round += pool.run(tasks[first : first + pool.processes])
                progress(done + len(trials_of_round), total)
            done += len(tasks)
            scores = {trial.arm: trial.score for trial in trials_of_round}
            losses = {trial.arm: math.inf if trial.loss is None else trial.loss for trial in trials_of_round}
            left = sorted(left[:number], key=lambda one: (-scores[one.name], losses[one.name]))
            rounds.append(Round(epochs, {one.name: scores[one.name] for one in left}))
    best = left[0]
    model = task(best, plan[-1][1]).out / "best.safetensors"
    command = _command(data, recipe, from_, size, base.train, best, {**changes, "seed": seed})
    score, file = rounds[-1].scores[best.name], str(model.relative_to(folder))
    result = Sweep(folder, dataset.name, candidates, rounds, best, score, command, file)
    saved = {name: value for name, value in asdict(result).items() if name != "out"}
    write_text(folder / _RECORD, json.dumps(saved, indent=2), overwrite=True)
    return result


def draw_candidates(base: TrainConfig, count: int, seed: int) -> list[Candidate]:
    """The recipe itself, then random ones around it."""
    found = [Candidate("recipe", base.lr, base.weight_decay, 1.0)]
    for number in range(1, count):
        a, b, c = random_uniform([seed, number, _STREAM], 3).reshape(-1).tolist()
        lr = float(f"{base.lr * _LR_FACTOR ** (2 * a - 1):.2g}")
        decay = float(f"{base.weight_decay * _DECAY_FACTOR ** (2 * b - 1):.2g}")
        found.append(Candidate(f"trial {number}", lr, decay, _STRENGTHS[int(c * len(_STRENGTHS))]))
    return found


def scale_augmentation(augment: Augment, mixing: Mixing, strength: float) -> tuple[Augment, Mixing]:
    """Augmentation with its ranges multiplied; flips and the operations of a policy stay as they are."""
    names = ("rotate", "translate", "shear", "brightness", "contrast", "saturation", "hue", "erase")
    most = {"rotate": 180.0, "shear": 80.0, "hue": 0.5}
    scaled: dict[str, Any] = {
        name: min(most.get(name, 1.0), round(getattr(augment, name) * strength, 4)) for name in names
    }
    scaled["zoom"] = round(1 + (augment.zoom - 1) * strength, 4)
    if augment.crop is not None:
        scaled["crop"] = max(0.05, round(1 - (1 - augment.crop) * strength, 4))
    probability = min(1.0, round(mixing.probability * strength, 4))
    mixes = mixing.mixup or mixing.cutmix
    return replace(augment, **scaled), replace(mixing, probability=probability) if mixes else mixing


# ---- parts ----------------------------------------------------------------------------------


def _rounds(count: int, epochs: int) -> list[tuple[int, int]]:
    """The number of candidates and of epochs of each round."""
    last = int(math.log(count, _KEEP) + 1e-9) or 1
    numbers = [*(max(1, round(count / _KEEP**n)) for n in range(last)), 1]
    return [(number, math.ceil(epochs / _KEEP ** (last - n))) for n, number in enumerate(numbers)]


def _changed(base: TrainConfig, candidate: Candidate) -> TrainConfig:
    augment, mixing = scale_augmentation(base.augment, base.mixing, candidate.strength)
    return replace(base, lr=candidate.lr, weight_decay=candidate.weight_decay, augment=augment, mixing=mixing)


def _command(
    data: str | Path | Dataset,
    recipe: str,
    from_: str | Path | None,
    size: int | tuple[int, int] | None,
    base: TrainConfig,
    best: Candidate,
    changes: Mapping[str, Any],
) -> str:
    """The command that trains the best candidate: the user's changes, and what the search changed."""
    words = ["vitrail", "train", data.name if isinstance(data, Dataset) else str(data)]
    words += ["--recipe", recipe] if recipe != "auto" else []
    words += ["--from", str(from_)] if from_ is not None else []
    if size is not None:
        words += ["--size", str(size) if isinstance(size, int) else "x".join(map(str, size))]
    settings: dict[str, Any] = {**changes, "epochs": base.epochs, "lr": best.lr}
    settings["weight_decay"] = best.weight_decay
    changed = _changed(base, best)
    for part in ("augment", "mixing"):
        before, after = asdict(getattr(base, part)), asdict(getattr(changed, part))
        own = {name: value for name, value in after.items() if value != before[name]}
        settings[part] = {**settings.get(part, {}), **own}
    for name, value in settings.items():
        if name in ("epochs", "batch", "lr", "seed", "tune"):
            words += [f"--{name}", _text(value)]
        elif name == "model" and isinstance(value, str):
            words += ["--model", value]
        elif isinstance(value, Mapping):
            for inner, one in value.items():
                words += ["--model", one] if inner == "name" else ["--set", f"{name}.{inner}={_text(one)}"]
        else:
            words += ["--set", f"{name}={_text(value)}"]
    return " ".join(map(shlex.quote, [*words, "--out", "runs/best"]))


def _text(value: Any) -> str:
    """A value as --set takes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        separator = "x" if all(isinstance(one, int) for one in value) else ","
        return separator.join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
