"""Lab `attention-distance`: mean attention distance of the heads of a trained ViT, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.course.labs.custom_run import CustomRun, set_weights, train_run
from vitrail.course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset, resize_dataset
from vitrail.course.labs.lab import LabResult, LabSize, Verdict, process_count
from vitrail.data.sources import Dataset
from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import resolve_arm
from vitrail.experiment.trial import map_in_processes
from vitrail.inspect import distance
from vitrail.inspect.canvas import FAINT, LINES, new_figure, styled
from vitrail.inspect.distance import GLOBAL, LOCAL
from vitrail.inspect.images import from_files, from_pixels
from vitrail.model import ViT
from vitrail.recipes.settings import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitrail.course.labs.custom_run import Weights

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
    seeds = 2 if small else 3
    epochs = 3 if small else 20 if data is None else 10
    changes: dict[str, Any] = {"model": model, "batch": 40 if small else 64, "epochs": epochs}
    recipes = [resolve_arm("mnist-notes", images, {}, changes, _LR, seed) for seed in range(seeds)]
    runs = [CustomRun(recipe, snapshot_epochs=(epochs,)) for recipe in recipes]
    results = map_in_processes(partial(train_run, data=images), runs, process_count(size))
    trained = [
        measure_distances(recipe, images, result.snapshots[epochs])
        for recipe, result in zip(recipes, results, strict=True)
        if epochs in result.snapshots
    ]
    untrained = [measure_distances(recipe, images, None) for recipe in recipes]
    slopes = [100 * slope_per_layer(distances) for distances in trained]
    first_layer = [(float(distances[0].min()), float(distances[0].max())) for distances in trained]
    accuracy = fmean(result.score for result in results)
    return LabResult(
        number=fmean(slopes),
        unit="% of the uniform attention distance gained per layer",
        n=len(slopes),
        verdict=decide_verdict(slopes, first_layer),
        sentence=summarize(images, epochs, accuracy, trained, untrained, slopes, first_layer),
        figure=draw(trained, untrained),
        interval=confidence_interval(slopes),
        numbers={
            "fraction of the uniform distance, by seed, layer and head": [
                distances.tolist() for distances in trained
            ],
            "before training": [distances.tolist() for distances in untrained],
            "slopes": slopes,
            "nearest and farthest head of the first layer": first_layer,
            "accuracy": [result.score for result in results],
            "lr": _LR,
        },
    )


def decide_verdict(slopes: Sequence[float], first_layer: Sequence[tuple[float, float]]) -> Verdict:
    """Distance must clearly grow with depth, and the first layer must have local and global heads."""
    bounds = confidence_interval(slopes)
    grows = bounds is not None and bounds[0] > 0
    shrinks = bounds is not None and bounds[1] < 0
    both = sum(low < LOCAL and high > GLOBAL for low, high in first_layer) > len(first_layer) / 2
    low, high = fmean(low for low, _ in first_layer), fmean(high for _, high in first_layer)
    reach = f"from {low:.0%} to {high:.0%} of the uniform distance"
    if grows and both:
        return Verdict("holds")
    if grows:
        return Verdict("partly", f"distance grows with depth, but heads of the first layer reach {reach}")
    trend = "shrinks" if shrinks else "neither clearly grows nor shrinks"
    if both:
        return Verdict("partly", f"the first layer has both kinds of heads, but distance {trend} with depth")
    return Verdict(
        "does not hold", f"distance {trend} with depth, and heads of the first layer reach {reach}"
    )


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
    slopes: Sequence[float],
    first_layer: Sequence[tuple[float, float]],
) -> str:
    layer_means = np.mean([distances.mean(axis=1) for distances in trained], axis=0)
    low, high = fmean(low for low, _ in first_layer), fmean(high for _, high in first_layer)
    return (
        f"A ViT with {len(layer_means)} layers, trained on {describe_dataset(data)} ({epochs} epochs, "
        f"{len(trained)} seeds, accuracy {accuracy:.1%}), has a mean attention distance of "
        f"{layer_means[0]:.0%} of that of uniform attention in its first layer and {layer_means[-1]:.0%} in "
        f"its last: {fmean(slopes):+.1f} % per layer. Heads of the first layer range from {low:.0%} to "
        f"{high:.0%}. Before training the mean is {np.mean(untrained):.0%}. The paper's models are far "
        "larger and were trained on far more images."
    )


@styled
def draw(trained: Sequence[HeadDistances], untrained: Sequence[HeadDistances]) -> Figure:
    figure = new_figure(7.2, 3.0)
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, per_seed, title in ((left, untrained, "before training"), (right, trained, "trained")):
        _draw_heads(axis, per_seed)
        axis.axhline(1, color=FAINT, linestyle="--", linewidth=1, label="uniform attention")
        axis.set(xlabel="layer", title=title)
    left.set_ylabel("distance (uniform attention: 1)")
    highest = max(1.05, *(float(distances.max()) for distances in (*trained, *untrained)))
    left.set_ylim(0, 1.35 * highest)  # leaves room for the legend
    right.legend(loc="upper left", ncols=3, fontsize=7.5, columnspacing=1, handletextpad=0.4)
    return figure


def _draw_heads(axis: Axes, per_seed: Sequence[HeadDistances]) -> None:
    """Every head of every seed, and the mean over all heads."""
    layers = np.arange(1, len(per_seed[0]) + 1)
    for n, heads in enumerate(per_seed):
        lines = axis.plot(layers, heads, "o", color=LINES[0], alpha=0.45, markersize=4)
        lines[0].set_label("" if n else "one head")
    layer_means = np.mean([heads.mean(axis=1) for heads in per_seed], axis=0)
    axis.plot(layers, layer_means, color=LINES[1], marker="_", label="mean")
    axis.set_xticks(layers)
