"""`vt.study`: which of several training settings is better, by how much, and how certain that is.

    result = vt.study(
        "digits",
        out="study",
        arms={"class": {}, "mean": {"model": {"pool": "mean"}}},
        lrs=[3e-4, 1e-3, 3e-3],
        seeds=3,
        recipe="digits",
        epochs=5,
    )
    print(result.compare("mean", "class"))

Arms are compared at equal compute: the same images, the same number of steps and batch size, and the same
number of learning rates. Every arm is first trained at every learning rate with the first seed; the rate with
the highest held-out accuracy is selected for the arm, and all seeds are run at it. So an arm that needs
another learning rate does not lose because of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from vitrail.base.errors import ConfigError, InputError, suggest
from vitrail.base.fields import as_integer, is_real, short_repr
from vitrail.base.safe_files import write_text
from vitrail.base.summary import Summary
from vitrail.experiment.interval import check_extra, difference_interval, fraction_interval
from vitrail.experiment.trial import StudyPool, Trial, TrialTask, check_folder
from vitrail.images.formats.sources import Dataset, open_dataset
from vitrail.model import ViT
from vitrail.training.recipes.settings import Recipe
from vitrail.training.resolve import resolve_recipe, run_context
from vitrail.training.run_directory import environment
from vitrail.views.canvas import FAINT, LINES, new_figure, save_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARM_NAME = re.compile(r"\w[\w .=+-]{0,60}")  # it is a folder's name, too
_EQUAL_FIELDS = ("epochs", "batch", "accumulate")  # equal compute: the same in all arms


@dataclass(frozen=True)
class Arm:
    """The results of one arm."""

    name: str
    changes: Mapping[str, Any]
    lr: float
    """The best learning rate of the sweep, at which all seeds were run."""
    scores: list[float]
    """The held-out accuracy after the last epoch, one per seed."""
    sweep: list[Trial]
    """Every learning rate with the seeds that select it."""
    parameters: int
    seconds: float
    """Of all its runs together, one thread each."""
    images: int
    """The number of held-out images that the scores are fractions of."""

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean; None for a single seed."""
        return fraction_interval(self.scores, self.images)

    def numbers(self) -> dict[str, Any]:
        """What a result keeps of it."""
        kept = {name: getattr(self, name) for name in ("mean", "interval", "lr", "scores")}
        return {**kept, "sweep": scores_by_lr(self.sweep)}


@dataclass(frozen=True)
class Difference:
    """The difference in accuracy between two arms, paired by seed."""

    mean: float
    interval: tuple[float, float] | None
    """The 95 % confidence interval of the mean; None for a single seed."""
    n: int

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float], images: int | None = None) -> Difference:
        """First minus second; each has one score per seed, a fraction of so many held-out images."""
        differences = [a - b for a, b in zip(first, second, strict=True)]
        interval = difference_interval(differences, images)
        return cls(fmean(differences), interval, len(differences))

    @property
    def significant(self) -> bool:
        """Whether the confidence interval excludes zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, repr=False)
class Study(Summary):
    """The results of all arms, compared at equal compute."""

    out: Path
    data: str
    recipe: str
    changes: Mapping[str, Any]
    seeds: list[int]
    lrs: list[float]
    arms: dict[str, Arm]
    environment: Mapping[str, Any] = field(default_factory=environment)

    def summary(self) -> dict[str, str]:
        """The folder, and the mean accuracy of each arm."""
        arms = {name: f"{arm.mean:.2%} (n = {arm.n}, lr {arm.lr:g})" for name, arm in self.arms.items()}
        return {"folder": str(self.out), **arms}

    def compare(self, first: str, second: str) -> Difference:
        """First minus second, paired by seed, so that variation common to both cancels."""
        for name in (first, second):
            if name not in self.arms:
                raise InputError(f"unknown arm {short_repr(name)}. {suggest(name, self.arms)}")
        return Difference.of(self.arms[first].scores, self.arms[second].scores, self.arms[first].images)

    @property
    def notes(self) -> list[str]:
        """Reservations about the results, one sentence each."""
        return [note for arm in self.arms.values() if (note := edge_note(arm.name, arm.lr, self.lrs))]

    def as_json(self) -> dict[str, Any]:
        derived = ("mean", "interval", "n")
        arms = [asdict(arm) | {name: getattr(arm, name) for name in derived} for arm in self.arms.values()]
        first, *others = self.arms
        result = {**vars(self), "arms": arms, "notes": self.notes}
        result["compared"] = [
            {"arm": name, "with": first, **asdict(self.compare(name, first))} for name in others
        ]
        result["seconds"] = round(sum(arm.seconds for arm in self.arms.values()), 3)
        return {name: value for name, value in result.items() if name != "out"}

    @styled
    def figure(self) -> Figure:
        """Every seed, mean and interval of each arm; beside it the learning rate sweep."""
        figure = new_figure(7.2, 1.4 + 0.4 * max(4, len(self.arms)))
        left, right = figure.subplots(1, 2)
        for n, arm in enumerate(self.arms.values()):
            color = LINES[n % len(LINES)]
            draw_arm(left, n, arm, color)
            means = scores_by_lr(arm.sweep)
            right.plot(list(means), list(means.values()), "o-", color=color, markersize=4)
        left.set(yticks=range(len(self.arms)), yticklabels=list(self.arms), xlabel="held-out accuracy")
        left.invert_yaxis()
        left.set_title(f"{len(self.seeds)} seeds, mean and 95 % interval")
        right.set(xscale="log", xlabel="learning rate", title="learning rate sweep")
        return figure


def edge_note(name: str, lr: float, lrs: Sequence[float]) -> str:
    """A sentence if the best learning rate is the lowest or highest tried; empty otherwise."""
    if len(lrs) == 1 or min(lrs) < lr < max(lrs):
        return ""
    which = "lowest" if lr == min(lrs) else "highest"
    return f"The best learning rate of {name}, {lr:g}, is the {which} tried; extend the range."


def draw_arm(axis: Axes, n: int, arm: Arm, color: str) -> None:
    """Draw the scores, mean and interval of an arm as row `n`."""
    axis.plot(arm.scores, [n] * arm.n, "o", color=color, alpha=0.35, markersize=5)
    axis.plot([arm.mean], [n], "|", color=color, markersize=14, markeredgewidth=2)
    if arm.interval is not None:
        axis.plot(arm.interval, [n, n], color=color, linewidth=2)
    axis.axhline(n, color=FAINT, linewidth=0.3, zorder=0)


def study(
    data: str | Path | Dataset,
    *,
    arms: Mapping[str, Mapping[str, Any]],
    out: str | Path,
    seeds: int | Sequence[int] = 3,
    lrs: Sequence[float] | None = None,
    selection_seeds: int = 1,
    recipe: str = "auto",
    processes: int = 2,
    **changes: Any,
) -> Study:
    """Compare training settings.

    Args:
        data: what `vitrail.train` takes. The held-out images are the same for every run.
        arms: the name of each arm, and its changes to the recipe, as `vitrail.train` takes them: `{}` is the
            recipe itself, `{"model": {"pool": "mean"}}` the recipe with mean pooling.
        out: a folder. Finished runs in it are not run again; unfinished ones are resumed.
        seeds: how many, from 0; or a list of seeds.
        lrs: learning rates to try for each arm; the recipe's own by default.
        selection_seeds: how many of the seeds select an arm's learning rate.
        recipe: the recipe of all other settings. "auto" chooses once for all arms, by the shared changes.
        processes: how many runs at a time, one thread each. The results do not depend on it.
        changes: changes to the recipe for all arms, such as epochs=5.
    """
    seed_list = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    _check_arguments(arms, seed_list, lrs, as_integer("selection_seeds", selection_seeds, 1), changes)
    folder, dataset = Path(out), data if isinstance(data, Dataset) else open_dataset(data)
    check_folder(folder, "study", ("study.json", "study.png", "study.svg"))
    check_extra()

    def task(name: str, lr: float | None, seed: int) -> TrialTask:
        resolved = resolve_arm(recipe, dataset, arms[name], changes, lr, seed)
        lr = resolved.train.lr
        return TrialTask(name, lr, seed, resolved, folder / "runs" / name / f"lr {lr:g}, seed {seed}")

    tried: Sequence[float | None] = lrs or [None]
    sweep = [task(name, lr, seed) for name in arms for lr in tried for seed in seed_list[:selection_seeds]]
    paths = [str(one.out).casefold() for one in sweep]  # on any file system
    for n, one in enumerate(sweep):
        if paths[n] in paths[:n]:
            raise InputError(
                f"arms and learning rates must differ by more than case; {one.arm} at {one.lr:g} appears "
                "twice. Remove or rename one."
            )
    folder.mkdir(parents=True, exist_ok=True)
    with StudyPool(dataset, as_integer("processes", processes, 1)) as pool:
        swept = pool.run(sweep)
        best = {name: best_lr([trial for trial in swept if trial.arm == name]) for name in arms}
        final = pool.run([task(name, best[name], seed) for name in arms for seed in seed_list])
    results = {}
    for name in arms:
        own_sweep, own_final = ([trial for trial in some if trial.arm == name] for some in (swept, final))
        seconds = {(trial.lr, trial.seed): trial.seconds for trial in (*own_sweep, *own_final)}
        results[name] = Arm(
            name=name,
            changes=arms[name],
            lr=best[name],
            scores=[trial.score for trial in own_final],
            sweep=own_sweep,
            parameters=count_parameters(next(one.recipe for one in sweep if one.arm == name)),
            seconds=round(sum(seconds.values()), 3),
            images=len(dataset.eval_split),
        )
    all_lrs = sorted({trial.lr for trial in swept})
    result = Study(folder, dataset.name, recipe, changes, seed_list, all_lrs, results)
    write_text(folder / "study.json", json.dumps(result.as_json(), indent=2), overwrite=True)
    save_figure(result.figure(), folder / "study")
    return result


# ---- parts ----------------------------------------------------------------------------------


def resolve_arm(
    recipe: str,
    data: Dataset,
    arm: Mapping[str, Any],
    shared: Mapping[str, Any],
    lr: float | None,
    seed: int,
) -> Recipe:
    """The recipe with the shared changes, then the arm's own; mappings such as model= are merged."""
    both = {**shared, **arm, "seed": seed} | ({} if lr is None else {"lr": lr})
    for part in set(shared) & set(arm):
        if isinstance(shared[part], Mapping) and isinstance(arm[part], Mapping):
            both[part] = {**shared[part], **arm[part]}
    return resolve_recipe(recipe, data, None, both, context=run_context(shared))[0]


def best_lr(trials: Sequence[Trial]) -> float:
    """The learning rate of the highest mean score; of equals the lower loss, then the lower rate."""
    means = scores_by_lr(trials)

    def order(lr: float) -> tuple[float, float, float]:
        losses = [math.inf if trial.loss is None else trial.loss for trial in trials if trial.lr == lr]
        return means[lr], -sum(losses), -lr

    return max(means, key=order)


def scores_by_lr(trials: Sequence[Trial]) -> dict[float, float]:
    """The mean score at each learning rate of a sweep."""
    lrs = sorted({trial.lr for trial in trials})
    return {lr: fmean(trial.score for trial in trials if trial.lr == lr) for lr in lrs}


def count_parameters(recipe: Recipe) -> int:
    """The number of parameters of the recipe's model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ViT(recipe.model).parameters())


# ---- checks, before anything is run ---------------------------------------------------------


def _check_arguments(
    arms: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    lrs: Sequence[float] | None,
    selection_seeds: int,
    changes: Mapping[str, Any],
) -> None:
    if not isinstance(arms, Mapping) or not arms or not all(isinstance(a, Mapping) for a in arms.values()):
        raise InputError(
            f'arms must be a mapping of names to changes, such as {{"plain": {{}}, "wide": {{...}}}}, not '
            f"{short_repr(arms)}."
        )
    advice = {"lr": "use lrs= for all arms", "seed": "use seeds="}
    for name, arm in arms.items():
        if not (isinstance(name, str) and _ARM_NAME.fullmatch(name)):
            raise InputError(
                f"the arm name {short_repr(name)} cannot be a folder name; use letters, digits, spaces and . "
                "_ = + -."
            )
        for key in (key for key in (*_EQUAL_FIELDS, "lr", "seed") if key in arm):
            do = advice.get(key, f"pass {key} to the study, for all arms")
            raise ConfigError(f"arm {short_repr(name)} sets {key}, which must be equal in all arms; {do}.")
    if any(key in changes for key in ("lr", "seed")):
        raise ConfigError(
            "a study tries several learning rates and seeds; use lrs= and seeds= instead of lr and seed."
        )
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int for seed in seeds):
        raise InputError(
            f"seeds must be a count or a list of distinct integers, such as 3, not {short_repr(seeds)}."
        )
    if selection_seeds > len(seeds):
        raise InputError(
            f"selection_seeds is {selection_seeds}, but there are only {len(seeds)} seeds; use at most "
            f"{len(seeds)}."
        )
    if lrs is not None and (isinstance(lrs, str) or not lrs or not all(is_real(lr) and lr > 0 for lr in lrs)):
        raise InputError(
            f"lrs must be learning rates above 0, such as [3e-4, 1e-3, 3e-3], not {short_repr(lrs)}."
        )
