"""Lab `attention-distance`: mean attention distance of the heads of a trained ViT, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import resolve_arm
from vitrail.experiment.trial import map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.training.recipes.settings import Recipe
from vitrail.views import distance
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail.views.distance import GLOBAL, LOCAL, lowest_layers
from vitrail.views.figure_images import from_files, from_pixels
from vitrail_course.labs.custom_run import CustomRun, set_weights, train_run
from vitrail_course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset, resize_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Statement, Verdict, decide, format_interval, is_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitrail_course.labs.custom_run import Weights

    HeadDistances = NDArray[
        np.float64
    ]  # (L, k): of each head, as a fraction of the distance of uniform attention

NAME = "attention-distance"
TITLE = "heads attend near and far"
NOTE = '002 "How far does self-attention look?"'
CLAIM = (
    "In the first layers some heads attend locally and some globally; attention distance grows with depth."
)
ACCEPTS = "MNIST as IDX files, a .npz, or a folder of images"

_LR = 3e-3
_DIGIT_SIDE = 12  # pixels to which digits are resized
_MEASURED_IMAGES = 200


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    small = size == "small"
    images = load_dataset(data, *((200, 50) if small else (10_000, 2_000)))
    model = lecture_model_fields(images) | {"width": 48, "depth": 6, "heads": 4}
    if data is None:  # 8 x 8 pixels, upsampled: 36 patches instead of 16
        images = resize_dataset(images, _DIGIT_SIDE)
        model["size"] = _DIGIT_SIDE
    if small:
        model |= {"width": 8, "heads": 2}
    seeds = 2 if small else 8
    epochs = 3 if small else 20 if data is None else 10
    changes: dict[str, Any] = {"model": model, "batch": 40 if small else 64, "epochs": epochs}
    recipes = [resolve_arm("mnist-notes", images, {}, changes, _LR, seed) for seed in range(seeds)]
    runs = [CustomRun(recipe, snapshot_epochs=(epochs,)) for recipe in recipes]
    results = map_in_processes(partial(train_run, data=images), runs, process_count(size))
    finished = [
        (recipe, result.snapshots[epochs])
        for recipe, result in zip(recipes, results, strict=True)
        if epochs in result.snapshots
    ]
    trained = [measure_distances(recipe, images, weights) for recipe, weights in finished]
    untrained = [measure_distances(recipe, images, None) for recipe, _ in finished]
    gained = slope_gains(trained, untrained)
    accuracy = fmean(result.score for result in results)
    return LabResult(
        number=fmean(gained),
        unit="% of the uniform attention distance gained per layer, more than before training",
        n=len(gained),
        sentence=summarize(images, epochs, accuracy, trained, untrained),
        figure=draw(trained, untrained),
        interval=confidence_interval(gained),
        numbers={
            "fraction of the uniform distance, by seed, layer and head": [
                distances.tolist() for distances in trained
            ],
            "before training": [distances.tolist() for distances in untrained],
            "accuracy": [result.score for result in results],
            "lr": _LR,
        },
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Training must make distance grow with depth, and the lowest layers must have local and global heads.

    Untrained heads attend almost uniformly, and so globally: that alone says nothing. Training must also set
    the nearest and the farthest head of the lowest layers further apart.
    """
    trained, untrained = (
        [np.array(one) for one in numbers[key]]
        for key in ("fraction of the uniform distance, by seed, layer and head", "before training")
    )
    gained = slope_gains(trained, untrained)
    bounds = confidence_interval(gained)
    few = lowest_layers(len(trained[0]))
    nearest, farthest = ([float(pick(one[:few])) for one in trained] for pick in (np.min, np.max))
    local = is_above(confidence_interval(nearest), LOCAL)
    spread = [
        100 * float(np.ptp(after[:few]) - np.ptp(before[:few]))
        for after, before in zip(trained, untrained, strict=True)
    ]
    answers = is_above(confidence_interval(farthest), GLOBAL), is_above(confidence_interval(spread), 0)
    apart = False if False in answers else None if None in answers else True
    untrained_farthest = [float(np.max(one[:few])) for one in untrained]
    return decide(
        [
            Statement(
                "in this small ViT, attention distance grows with depth",
                is_above(bounds, 0),
                f"{format_interval(fmean(gained), bounds, '+.2f')} % of the uniform distance per layer, more "
                "than before training",
            ),
            Statement(
                f"in its lowest layers, the first {few} of {len(trained[0])}, some heads attend locally",
                None if local is None else not local,
                f"the nearest head: {_format_distance(nearest)}, local below {LOCAL:.0%}",
            ),
            Statement(
                "in the lowest layers some heads attend globally, others nearer, more than before training",
                apart,
                f"the farthest head: {_format_distance(farthest)}, global above {GLOBAL:.0%}, but "
                f"{100 * fmean(untrained_farthest):.1f} % before training; from the nearest to the farthest "
                f"head, minus that before training: {_format_change(spread)}",
            ),
        ]
    )


def _format_change(percent: Sequence[float]) -> str:
    return (
        f"{format_interval(fmean(percent), confidence_interval(percent), '+.1f')} % of the uniform distance"
    )


def _format_distance(distances: Sequence[float]) -> str:
    bounds = confidence_interval(distances)
    percent = bounds and (100 * bounds[0], 100 * bounds[1])
    return f"{format_interval(100 * fmean(distances), percent, '.1f')} % of the uniform distance"


def slope_gains(trained: Sequence[HeadDistances], untrained: Sequence[HeadDistances]) -> list[float]:
    """The slope over the layers after training minus that before it, in percent per layer, by seed."""
    return [
        100 * (slope_per_layer(after) - slope_per_layer(before))
        for after, before in zip(trained, untrained, strict=True)
    ]


def measure_distances(recipe: Recipe, data: Dataset, weights: Weights | None) -> HeadDistances:
    """Mean attention distance of each head over that of uniform attention: (L, k)."""
    torch.manual_seed(recipe.train.seed)
    model = ViT(recipe.model)
    if weights is not None:
        set_weights(model, weights)
    split = data.eval_split.take(np.arange(min(_MEASURED_IMAGES, len(data.eval_split))))
    if split.images is None:
        batch = from_files(split.paths or [], recipe.preprocess)
    else:
        batch = from_pixels(split.images, recipe.preprocess, split.names)
    measured = distance.compute(model, batch.images)
    return measured.distance.mean / measured.uniform


def slope_per_layer(heads: HeadDistances) -> float:
    """Least-squares slope of the mean distance over the layers."""
    return float(np.polyfit(np.arange(len(heads)), heads.mean(axis=1), 1)[0])


def summarize(
    data: Dataset,
    epochs: int,
    accuracy: float,
    trained: Sequence[HeadDistances],
    untrained: Sequence[HeadDistances],
) -> str:
    layer_means = np.mean([distances.mean(axis=1) for distances in trained], axis=0)
    few = lowest_layers(len(layer_means))
    low, high = (np.mean([pick(one[:few]) for one in trained]) for pick in (np.min, np.max))
    after, before = (
        100 * fmean(slope_per_layer(one) for one in distances) for distances in (trained, untrained)
    )
    return (
        f"A ViT with {len(layer_means)} layers, trained on {describe_dataset(data)} ({epochs} epochs, "
        f"{len(trained)} seeds, accuracy {accuracy:.1%}), has a mean attention distance of "
        f"{layer_means[0]:.0%} of that of uniform attention in its first layer and {layer_means[-1]:.0%} in "
        f"its last: {after:+.2f} % per layer, and {before:+.2f} % before training. Heads of the lowest {few} "
        f"layers range from {low:.0%} to {high:.0%}. Before training the mean is {np.mean(untrained):.0%}. "
        "The paper's models are far larger and were trained on far more images."
    )


@styled
def draw(trained: Sequence[HeadDistances], untrained: Sequence[HeadDistances]) -> Figure:
    figure = new_figure(7.2, 3.0)
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, per_seed, title in ((left, untrained, "before training"), (right, trained, "trained")):
        _draw_heads(axis, per_seed)
        axis.axhline(1, color=FAINT, linestyle="--", linewidth=1, label="uniform attention")
        axis.set(xlabel="layer, from 0", title=title)
    left.set_ylabel("distance (uniform attention: 1)")
    highest = max(1.05, *(float(distances.max()) for distances in (*trained, *untrained)))
    left.set_ylim(0, 1.35 * highest)  # leaves room for the legend
    right.legend(loc="upper left", ncols=3, fontsize=7.5, columnspacing=1, handletextpad=0.4)
    return figure


def _draw_heads(axis: Axes, per_seed: Sequence[HeadDistances]) -> None:
    """Every head of every seed, and the mean over all heads."""
    layers = np.arange(len(per_seed[0]))
    for n, heads in enumerate(per_seed):
        lines = axis.plot(layers, heads, "o", color=LINES[0], alpha=0.45, markersize=4)
        lines[0].set_label("" if n else "one head")
    layer_means = np.mean([heads.mean(axis=1) for heads in per_seed], axis=0)
    axis.plot(layers, layer_means, color=LINES[1], marker="_", label="mean")
    axis.set_xticks(layers)
