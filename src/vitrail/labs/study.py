"""`vt.study`: which of several ways to train is better, by how much, and how sure that is.

    found = vt.study(
        "digits",
        out="study",
        arms={"class": {}, "mean": {"model": {"pool": "mean"}}},
        rates=[3e-4, 1e-3, 3e-3],
        seeds=3,
        recipe="digits",
        epochs=5,
    )
    print(found.compare("mean", "class"))

Arms are compared at equal compute: the same pictures, the same steps of the same batch, and as many
learning rates tried. Every arm is first run at every rate on the first seed; the rate with the most
held-out pictures right is the arm's own, and all seeds are run at it. An arm that needs another rate is
not beaten because it was given the wrong one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.data.sources import Dataset, open_data
from vitrail.errors import ConfigError, FileError, InputError, printable, suggest
from vitrail.fields import as_whole, is_real, show
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style, save
from vitrail.labs.interval import interval
from vitrail.labs.trial import Task, Trial, Workers
from vitrail.model import ViT
from vitrail.recipes.start import settle
from vitrail.training.checkpoint import replace_text
from vitrail.training.place import environment
from vitrail.training.settings import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = re.compile(r"\w[\w .=+-]{0,60}")  # an arm's, which names a folder too
EQUAL = ("epochs", "batch", "accumulate")  # what makes compute equal: the same in all arms


@dataclass(frozen=True)
class Arm:
    """How one arm fared."""

    name: str
    changes: Mapping[str, Any]
    rate: float
    """The best of the sweep, at which all seeds were run."""
    scores: list[float]
    """One for each seed: the share of the held-out pictures that was right after the last epoch."""
    sweep: list[Trial]
    """Every rate on the seeds that choose."""
    parameters: int
    seconds: float
    """Of all its runs together, one thread each."""

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def mean(self) -> float:
        return math.fsum(self.scores) / self.n

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the mean, 95 %; None of a single seed."""
        return interval(self.scores)


@dataclass(frozen=True)
class Difference:
    """How much more one arm scores than another, seed by seed."""

    mean: float
    interval: tuple[float, float] | None
    """Of the mean, 95 %; None of a single seed."""
    n: int

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Difference:
        """First minus second, each a score for every seed."""
        apart = [a - b for a, b in zip(first, second, strict=True)]
        return cls(math.fsum(apart) / len(apart), interval(apart), len(apart))

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Study:
    """Arms, compared at equal compute."""

    out: Path
    data: str
    recipe: str
    changes: Mapping[str, Any]
    seeds: list[int]
    rates: list[float]
    arms: dict[str, Arm]
    environment: Mapping[str, Any] = field(default_factory=environment)

    def compare(self, first: str, second: str) -> Difference:
        """first minus second, paired by seed: chance that both share does not count."""
        for name in (first, second):
            if name not in self.arms:
                raise InputError("An arm must be one of the study's.", show(name), suggest(name, self.arms))
        return Difference.of(self.arms[first].scores, self.arms[second].scores)

    @property
    def notes(self) -> list[str]:
        """What a reader should know before believing the numbers."""
        found = []
        for arm in self.arms.values():
            if len(self.rates) > 1 and arm.rate in (min(self.rates), max(self.rates)):
                which = "lowest" if arm.rate == min(self.rates) else "highest"
                found.append(
                    f"The best rate of {arm.name}, {arm.rate:g}, is the {which} tried: try beyond it."
                )
        return found

    def as_json(self) -> dict[str, Any]:
        facts = {"mean", "interval", "n"}
        arms = [asdict(arm) | {name: getattr(arm, name) for name in facts} for arm in self.arms.values()]
        first, *others = self.arms
        found = {**vars(self), "out": None, "arms": arms, "notes": self.notes}
        found["compared"] = [
            {"arm": name, "with": first, **asdict(self.compare(name, first))} for name in others
        ]
        found["seconds"] = round(sum(arm.seconds for arm in self.arms.values()), 3)
        return {name: value for name, value in found.items() if name != "out"}

    @in_our_style
    def figure(self) -> Figure:
        """Every seed, mean and interval of each arm; beside it the sweep that chose its rate."""
        figure = canvas(7.2, 1.4 + 0.4 * max(4, len(self.arms)))
        left, right = figure.subplots(1, 2)
        for n, arm in enumerate(self.arms.values()):
            colour = LINES[n % len(LINES)]
            draw_arm(left, n, arm, colour)
            rates = sorted({trial.rate for trial in arm.sweep})
            right.plot(rates, [mean_at(arm.sweep, rate) for rate in rates], "o-", color=colour, markersize=4)
        left.set(yticks=range(len(self.arms)), yticklabels=list(self.arms), xlabel="held-out pictures right")
        left.invert_yaxis()
        left.set_title(f"{len(self.seeds)} seeds, mean and 95 % interval")
        right.set(xscale="log", xlabel="learning rate", title="the sweep that chose each rate")
        return figure


def draw_arm(axis: Axes, n: int, arm: Arm, colour: str) -> None:
    axis.plot(arm.scores, [n] * arm.n, "o", color=colour, alpha=0.35, markersize=5)
    axis.plot([arm.mean], [n], "|", color=colour, markersize=14, markeredgewidth=2)
    if arm.interval is not None:
        axis.plot(arm.interval, [n, n], color=colour, linewidth=2)
    axis.axhline(n, color=FAINT, linewidth=0.3, zorder=0)


def study(
    data: str | Path | Dataset,
    *,
    arms: Mapping[str, Mapping[str, Any]],
    out: str | Path,
    seeds: int | Sequence[int] = 3,
    rates: Sequence[float] | None = None,
    choosing: int = 1,
    recipe: str = "small",
    processes: int = 2,
    **changes: Any,
) -> Study:
    """Compare ways to train.

    Args:
        data: what `vitrail.train` takes. The held-out pictures are the same for every run.
        arms: a name for each, and how it changes the recipe, as `vitrail.train` takes changes: `{}` is the
            recipe itself, `{"model": {"pool": "mean"}}` one with another pool.
        out: a folder. Finished runs that lie there are not run again; unfinished ones are gone on with.
        seeds: how many, from 0 on; or which.
        rates: learning rates that each arm is tried at; the recipe's own when not given.
        choosing: the first so many seeds choose an arm's rate.
        recipe: where all other settings come from.
        processes: how many runs there are at a time, one thread each. The numbers do not depend on it.
        changes: changes to the recipe that all arms share, such as epochs=5.
    """
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    check(arms, numbers, rates, as_whole("choosing", choosing, 1), changes)
    place, dataset = Path(out), data if isinstance(data, Dataset) else open_data(data)
    check_place(place)

    def task(name: str, rate: float | None, seed: int) -> Task:
        chosen = settled(recipe, dataset, arms[name], changes, rate, seed)
        rate = chosen.train.lr
        return Task(name, rate, seed, chosen, place / "runs" / name / f"rate {rate:g}, seed {seed}")

    tries: Sequence[float | None] = rates or [None]
    sweep = [task(name, rate, seed) for name in arms for rate in tries for seed in numbers[:choosing]]
    check_apart(sweep)
    place.mkdir(parents=True, exist_ok=True)
    with Workers(dataset, as_whole("processes", processes, 1)) as workers:
        tried = workers.run(sweep)
        best = {name: best_rate([trial for trial in tried if trial.arm == name]) for name in arms}
        chosen = workers.run([task(name, best[name], seed) for name in arms for seed in numbers])
    found = {}
    for name in arms:
        swept, runs = ([trial for trial in some if trial.arm == name] for some in (tried, chosen))
        spent = {(trial.rate, trial.seed): trial.seconds for trial in (*swept, *runs)}
        count = parameters(next(one.chosen for one in sweep if one.arm == name))
        scores = [trial.score for trial in runs]
        found[name] = Arm(name, arms[name], best[name], scores, swept, count, round(sum(spent.values()), 3))
    tried_rates = sorted({trial.rate for trial in tried})
    done = Study(place, dataset.name, recipe, changes, numbers, tried_rates, found)
    replace_text(place / "study.json", json.dumps(done.as_json(), indent=2))
    save(done.figure(), place / "study")
    return done


# ---- parts ----------------------------------------------------------------------------------


def settled(
    recipe: str,
    data: Dataset,
    arm: Mapping[str, Any],
    shared: Mapping[str, Any],
    rate: float | None,
    seed: int,
) -> Recipe:
    """The recipe with what all arms share, then the arm's own; parts such as model= are put together."""
    both = {**shared, **arm}
    for part in set(shared) & set(arm):
        if isinstance(shared[part], Mapping) and isinstance(arm[part], Mapping):
            both[part] = {**shared[part], **arm[part]}
    both["seed"] = seed
    if rate is not None:
        both["lr"] = rate
    return settle(recipe, data, None, both)[0]


def best_rate(trials: Sequence[Trial]) -> float:
    """The most right; of equals the lower loss, then the lower rate."""

    def worth(rate: float) -> tuple[float, float, float]:
        losses = [math.inf if trial.loss is None else trial.loss for trial in trials if trial.rate == rate]
        return mean_at(trials, rate), -sum(losses), -rate

    return max({trial.rate for trial in trials}, key=worth)


def mean_at(trials: Sequence[Trial], rate: float) -> float:
    scores = [trial.score for trial in trials if trial.rate == rate]
    return math.fsum(scores) / len(scores)


def parameters(chosen: Recipe) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ViT(chosen.model).parameters())


# ---- checks, before anything is run ---------------------------------------------------------


def check(
    arms: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    rates: Sequence[float] | None,
    choosing: int,
    changes: Mapping[str, Any],
) -> None:
    if not isinstance(arms, Mapping) or not arms or not all(isinstance(a, Mapping) for a in arms.values()):
        raise InputError(
            "arms must be a mapping of names to changes.", show(arms), 'Such as {"plain": {}, "wide": {...}}.'
        )
    for name, arm in arms.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise InputError(
                "An arm's name must be letters, digits, spaces and . _ = + -, which a folder can have.",
                show(name),
                "Rename it.",
            )
        for key in (key for key in (*EQUAL, "lr", "seed") if key in arm):
            do = {"lr": "Give rates= for all arms.", "seed": "Give seeds=."}.get(
                key, f"Give {key} to the study, for all arms alike."
            )
            raise ConfigError(
                "Arms must run at equal compute, rates and seeds.", f"{key} in {show(name)}", do
            )
    if any(key in changes for key in ("lr", "seed")):
        raise ConfigError("A study tries rates and seeds.", show(dict(changes)), "Give rates= and seeds=.")
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int for seed in seeds):
        raise InputError("seeds must be a count or different whole numbers.", show(seeds), "Such as 3.")
    if choosing > len(seeds):
        raise InputError(
            "Seeds that choose the rate are among the seeds.",
            f"{choosing} of {len(seeds)}",
            "Choose by fewer.",
        )
    good = rates is None or (
        not isinstance(rates, str) and len(rates) > 0 and all(is_real(rate) and rate > 0 for rate in rates)
    )
    if not good:
        raise InputError("rates must be learning rates above 0.", show(rates), "Such as [3e-4, 1e-3, 3e-3].")


def check_apart(tasks: Sequence[Task]) -> None:
    """Two runs in one folder would be one."""
    places = [str(task.place).casefold() for task in tasks]
    for n, place in enumerate(places):
        if place in places[:n]:
            raise InputError(
                "Arms and rates must differ by more than capital letters.",
                f"{tasks[n].arm} at {tasks[n].rate:g} twice",
                "Leave one out or rename it.",
            )


def check_place(place: Path) -> None:
    ours = {"runs", "study.json", "study.png", "study.svg"}
    there = {file.name for file in place.iterdir()} if place.is_dir() else set()
    strange = {name for name in there - ours if not name.startswith(".study.json")}
    if strange or (place.exists() and not place.is_dir()):
        raise FileError(
            "out must be a new or empty folder, or a study's.",
            f"{printable(place)}" + (f" with {printable(min(strange))}" if strange else ", a file"),
            "Name another.",
        )
