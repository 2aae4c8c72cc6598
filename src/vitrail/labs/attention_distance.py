"""Lab `attention-distance`: how far the heads of a trained ViT look, from the first layer to the last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.data.sources import Dataset
from vitrail.inspect import distance
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.inspect.distance import GLOBAL, LOCAL
from vitrail.inspect.pictures import from_files, from_pixels
from vitrail.labs.given import described, enlarged, of_the_notes, opened
from vitrail.labs.interval import interval
from vitrail.labs.job import Job, do, fill
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import settled
from vitrail.labs.trial import each, processes_for
from vitrail.model import ViT
from vitrail.training.settings import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitrail.labs.job import State

    Heads = NDArray[np.float64]  # (L, k): of each head, as a share of the uniform distance

NAME = "attention-distance"
NOTE = '002 "How far does self-attention look?"'
CLAIM = (
    "In the first layers some heads look near and some far; the deeper the layer, the farther attention "
    "looks."
)
TAKES = "MNIST as IDX files, a .npz, or a folder of pictures"

RATE = 3e-3
SIDE = 12  # of digits
LOOKED_AT = 200  # pictures


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    small = size == "small"
    pictures = opened(data, *((200, 50) if small else (10_000, 2_000)))
    model = of_the_notes(pictures) | {"width": 48, "depth": 6, "heads": 4}
    if data is None:  # 8 x 8 pixels, enlarged: 36 places to look at, not 16
        pictures = enlarged(pictures, SIDE)
        model["size"] = SIDE
    if small:
        model |= {"width": 8, "heads": 2}
    seeds = 2 if small else 3
    epochs = 3 if small else 20 if data is None else 10
    changes: dict[str, Any] = {"model": model, "batch": 40 if small else 64, "epochs": epochs}
    recipes = [settled("mnist-notes", pictures, {}, changes, RATE, seed) for seed in range(seeds)]
    done = each(
        partial(do, data=pictures), [Job(one, keep=(epochs,)) for one in recipes], processes_for(size)
    )
    learned = [
        measure(recipe, pictures, one.states[epochs])
        for recipe, one in zip(recipes, done, strict=True)
        if epochs in one.states
    ]
    fresh = [measure(recipe, pictures, None) for recipe in recipes]
    slopes = [100 * slope(one) for one in learned]
    first = [(float(one[0].min()), float(one[0].max())) for one in learned]
    score = fmean(one.score for one in done)
    return Result(
        number=fmean(slopes),
        unit="% of the uniform distance farther with each layer",
        n=len(slopes),
        verdict=judge(slopes, first),
        sentence=tell(pictures, epochs, score, learned, fresh, slopes, first),
        figure=draw(learned, fresh),
        interval=interval(slopes),
        numbers={
            "share of the uniform distance, by seed, layer and head": [one.tolist() for one in learned],
            "before training": [one.tolist() for one in fresh],
            "slopes": slopes,
            "nearest and farthest head of the first layer": first,
            "held-out pictures right": [one.score for one in done],
            "rate": RATE,
        },
    )


def judge(slopes: Sequence[float], first: Sequence[tuple[float, float]]) -> Verdict:
    """Distance must grow with depth, beyond chance; and the first layer must have both kinds of heads."""
    around = interval(slopes)
    farther = around is not None and around[0] > 0
    nearer = around is not None and around[1] < 0
    both = sum(low < LOCAL and high > GLOBAL for low, high in first) > len(first) / 2
    low, high = fmean(low for low, _ in first), fmean(high for _, high in first)
    reach = f"from {low:.0%} to {high:.0%} of the uniform distance"
    if farther and both:
        return Verdict("holds")
    if farther:
        return Verdict("holds if", f"depth alone is meant: heads of the first layer reach {reach}")
    trend = "attention looks nearer" if nearer else "it looks neither clearly farther nor nearer"
    if both:
        return Verdict("holds if", f"the first layer alone is meant: with depth {trend}")
    return Verdict("does not hold", f": with depth {trend}, and heads of the first layer reach {reach}")


def measure(recipe: Recipe, data: Dataset, state: State | None) -> Heads:
    """Each head's distance as a share of what it would be if all patches counted alike: (L, k)."""
    torch.manual_seed(recipe.train.seed)
    model = ViT(recipe.model)
    if state is not None:
        fill(model, state)
    some = data.held_out.take(np.arange(min(LOOKED_AT, len(data.held_out))))
    if some.images is None:
        seen = from_files(some.paths or [], recipe.preprocess)
    else:
        seen = from_pixels(some.images, recipe.preprocess, some.names)
    found = distance.compute(model, seen.images)
    return found.distance.mean / found.uniform


def slope(heads: Heads) -> float:
    """How much the mean of a layer's heads grows from a layer to the next, by least squares."""
    return float(np.polyfit(np.arange(len(heads)), heads.mean(axis=1), 1)[0])


def tell(
    data: Dataset,
    epochs: int,
    score: float,
    learned: Sequence[Heads],
    fresh: Sequence[Heads],
    slopes: Sequence[float],
    first: Sequence[tuple[float, float]],
) -> str:
    means = np.mean([one.mean(axis=1) for one in learned], axis=0)
    low, high = fmean(low for low, _ in first), fmean(high for _, high in first)
    return (
        f"A ViT of {len(means)} layers, trained on {described(data)} ({epochs} epochs, {len(learned)} seeds, "
        f"{score:.1%} of those held out right), looks {means[0]:.0%} of the uniform distance "
        f"far in its first layer and {means[-1]:.0%} in its last: {fmean(slopes):+.1f} % with each layer. "
        f"In the first layer heads reach from {low:.0%} to {high:.0%}. Before training the mean is "
        f"{np.mean(fresh):.0%}. The paper's models are far larger and saw far more pictures."
    )


@in_our_style
def draw(learned: Sequence[Heads], fresh: Sequence[Heads]) -> Figure:
    figure = canvas(7.2, 3.0)
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, some, title in ((left, fresh, "before training"), (right, learned, "trained")):
        dots(axis, some)
        axis.axhline(1, color=FAINT, linestyle="--", linewidth=1, label="uniform attention")
        axis.set(xlabel="layer", title=title)
    left.set_ylabel("distance, uniform = 1")
    most = max(1.05, *(float(one.max()) for one in (*learned, *fresh)))
    left.set_ylim(0, 1.35 * most)  # room above for the legend
    right.legend(loc="upper left", ncols=3, fontsize=7.5, columnspacing=1, handletextpad=0.4)
    return figure


def dots(axis: Axes, some: Sequence[Heads]) -> None:
    """Every head of every seed, and the mean of them all."""
    layers = np.arange(1, len(some[0]) + 1)
    for n, heads in enumerate(some):
        lines = axis.plot(layers, heads, "o", color=LINES[0], alpha=0.45, markersize=4)
        lines[0].set_label("" if n else "one head")
    means = np.mean([heads.mean(axis=1) for heads in some], axis=0)
    axis.plot(layers, means, color=LINES[1], marker="_", label="mean")
    axis.set_xticks(layers)
