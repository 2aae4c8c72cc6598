"""Lab `resolution`: fine-tuning at a higher resolution, with positions interpolated or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from vitrail.config import by
from vitrail.data.sources import Dataset
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.labs import job as jobs
from vitrail.labs.given import described, enlarged, of_the_notes, opened
from vitrail.labs.interval import interval
from vitrail.labs.job import Job, do, fill
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import Difference, best_rate, settled
from vitrail.labs.trial import Trial, each, processes_for
from vitrail.model import ViT, surgery

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitrail.labs.job import State

NAME = "resolution"
NOTE = '002 "Finetuning"'
CLAIM = (
    "Fine-tuning is often done at a higher resolution: the patch stays, the sequence gets longer, and the "
    "position embeddings are interpolated to span the larger picture."
)
TAKES = "MNIST as IDX files, a .npz, or a folder of pictures"

RECIPE = "mnist-notes"
BEGIN = 3e-3  # the rate of the first training, the same for all
INTERPOLATED, RANDOM, NUMBERED = "interpolated", "new random", "by number"
ARMS = (INTERPOLATED, RANDOM, NUMBERED)  # by number: the old rows for the first patches, zeros for the rest
SIGMA = 0.02  # of new rows, as they begin in a fresh model

Scores = Mapping[str, Sequence[float]]


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    small, digits = size == "small", data is None
    pictures = opened(data, *((200, 60) if small else (10_000, 5_000)))
    fields = of_the_notes(pictures)
    if digits:  # 8 x 8 pixels, enlarged: patches of 4 have more to see than single pixels
        fields |= {"size": (16, 16), "patch": (4, 4)}
    if small:
        fields |= {"width": 16, "depth": 1, "heads": 2}
    low, high = pictures_at(pictures, fields["size"], 1), pictures_at(pictures, fields["size"], 2)
    rates, seeds = ([1e-3], 2) if small else ([3e-4, 1e-3, 3e-3], 5 if digits else 3)
    epochs, tuned = (6, 1) if small else (30, 3) if digits else (10, 2)
    changes: dict[str, Any] = {"model": fields, "batch": 20 if small else 64}
    count = processes_for(size)
    first = [settled(RECIPE, low, {}, {**changes, "epochs": epochs}, BEGIN, seed) for seed in range(seeds)]
    begun = each(partial(do, data=low), [Job(one, keep=(epochs,)) for one in first], count)
    models = [fill(ViT(recipe.model), one.states[epochs]) for recipe, one in zip(first, begun, strict=True)]
    starts = {arm: [begin(arm, model, seed) for seed, model in enumerate(models)] for arm in ARMS}
    larger = changes | {"model": {**fields, "size": twice(fields["size"])}, "epochs": tuned}
    before, after, chosen = tune(starts, high, larger, rates, count)
    base = [one.score for one in begun]
    gains = {
        when: {arm: Difference.of(scores[INTERPOLATED], scores[arm]) for arm in (RANDOM, NUMBERED)}
        for when, scores in (("before", before), ("after", after))
    }
    number = gains["before"][RANDOM]
    return Result(
        number=100 * number.mean,
        unit="percentage points more right with interpolated positions than with new ones, before tuning",
        n=seeds,
        verdict=judge(gains),
        sentence=tell(pictures, fields["size"], base, before, after, tuned),
        figure=draw(base, before, after, tuned),
        interval=number.interval and (100 * number.interval[0], 100 * number.interval[1]),
        numbers={
            "at the low resolution": base,
            "before tuning": before,
            "after tuning": after,
            "rates": chosen,
            "interpolated more than": {
                when: {arm: (one.mean, one.interval) for arm, one in some.items()}
                for when, some in gains.items()
            },
            "pictures": len(pictures.train),
            "epochs": (epochs, tuned),
        },
    )


def judge(gains: Mapping[str, Mapping[str, Difference]]) -> Verdict:
    """Interpolated rows against each other way, at once and after tuning."""

    def better(when: str) -> list[str]:
        return [arm for arm, one in gains[when].items() if one.clear and one.mean > 0]

    before, after = better("before"), better("after")
    if len(before) == len(after) == len(gains["before"]):
        return Verdict("holds")
    if not before and not after:
        return Verdict("does not hold", ": interpolated rows are not clearly better, before tuning or after")
    words = []
    for when, some in (("before tuning", before), ("after it", after)):
        rest = "clearly better than " + " and ".join(some) if some else "not clearly better than others"
        words.append(f"{when} interpolated rows are {rest}")
    return Verdict("holds if", "this is enough: " + ", ".join(words))


# ---- positions for a larger grid ------------------------------------------------------------


def begin(arm: str, model: ViT, seed: int) -> State:
    """The weights at twice the resolution, with positions as the arm has them."""
    larger = surgery.resize(model, twice(model.config.size))
    table, old = larger.get_parameter("position.table"), model.get_parameter("position.table")
    front = model.config.prefix
    with torch.no_grad():
        if arm == RANDOM:
            chance = torch.Generator().manual_seed(seed)
            table[front:] = SIGMA * torch.randn(len(table) - front, table.shape[1], generator=chance)
        elif arm == NUMBERED:
            table.zero_()
            table[: len(old)] = old
    return {name: tensor.numpy().copy() for name, tensor in larger.state_dict().items()}


def twice(size: Any) -> tuple[int, int]:
    high, wide = size
    return 2 * high, 2 * wide


def pictures_at(data: Dataset, size: tuple[int, int], times: int) -> Dataset:
    return enlarged(data, (times * size[0], times * size[1]))


# ---- tuning ---------------------------------------------------------------------------------


def tune(
    starts: Mapping[str, Sequence[State]],
    data: Dataset,
    changes: dict[str, Any],
    rates: Sequence[float],
    processes: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
    """What each arm gets right before and after; each is tuned at the best of the rates on the first seed."""

    def job(arm: str, rate: float, seed: int) -> Job:
        return Job(settled(RECIPE, data, {}, changes, rate, seed), start=starts[arm][seed])

    def trials(keys: Sequence[tuple[str, float, int]]) -> list[Trial]:
        done = each(partial(do, data=data), [job(*key) for key in keys], processes)
        return [Trial(*key, one.score, one.loss, one.seconds) for key, one in zip(keys, done, strict=True)]

    seeds = range(len(starts[INTERPOLATED]))
    at_once = partial(jobs.judge, data=data)
    before = {arm: each(at_once, [job(arm, rates[0], seed) for seed in seeds], 1) for arm in ARMS}
    sweep = trials([(arm, rate, 0) for arm in ARMS for rate in rates])
    best = {arm: best_rate([one for one in sweep if one.arm == arm]) for arm in ARMS}
    others = trials([(arm, best[arm], seed) for arm in ARMS for seed in seeds[1:]])
    tuned = sorted((one for one in (*sweep, *others) if one.rate == best[one.arm]), key=lambda one: one.seed)
    after = {arm: [one.score for one in tuned if one.arm == arm] for arm in ARMS}
    return before, after, best


def tell(
    data: Dataset, size: tuple[int, int], base: Sequence[float], before: Scores, after: Scores, tuned: int
) -> str:
    def said(scores: Scores) -> str:
        return ", ".join(f"{fmean(values):.1%} {arm}" for arm, values in scores.items())

    return (
        f"Trained on {described(data)}, at {by(size)} pixels ({len(base)} seeds), the model gets "
        f"{fmean(base):.1%} right. At {by(twice(size))} with the same patches it gets, by positions: "
        f"{said(before)}. After {tuned} epoch{'s' * (tuned > 1)} of tuning, each at its best "
        f"rate: {said(after)}. The larger pictures are enlarged ones: they hold no more detail."
    )


# ---- the picture ----------------------------------------------------------------------------


@in_our_style
def draw(base: Sequence[float], before: Scores, after: Scores, tuned: int) -> Figure:
    """Every seed before tuning and after, and the low resolution's mean beside them."""
    figure = canvas(7.6, 2.6)
    axes = figure.subplots(1, 2, sharey=True)
    titles = ("before tuning", f"after {tuned} epoch{'s' * (tuned > 1)} of tuning")
    for axis, scores, title in zip(axes, (before, after), titles, strict=True):
        for n, values in enumerate(scores.values()):
            dots(axis, n, values)
        axis.axvline(fmean(base), color=FAINT, linestyle="--", linewidth=1, label="low resolution")
        axis.set(xlabel="held-out pictures right", yticks=range(len(ARMS)), yticklabels=ARMS)
        axis.set_xlim(0, 1.02)
        axis.set_title(title, loc="left")
    axes[0].set_ylim(len(ARMS) - 0.5, -0.5)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", fontsize=7.5)
    return figure


def dots(axis: Axes, row: int, values: Sequence[float]) -> None:
    axis.plot(values, [row] * len(values), "o", color=LINES[row], alpha=0.35, markersize=5)
    axis.plot([fmean(values)], [row], "|", color=LINES[row], markersize=14, markeredgewidth=2)
    if (around := interval(values)) is not None:
        axis.plot(around, [row, row], color=LINES[row], linewidth=2)
