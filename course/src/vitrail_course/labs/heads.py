"""Lab `heads`: whether the heads of a layer attend to different tokens, and whether that matters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.base.errors import InputError
from vitrail.experiment.interval import share_interval
from vitrail.experiment.study import resolve_arm
from vitrail.experiment.trial import map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT, edit, record
from vitrail.training.recipes.settings import Recipe
from vitrail.views import ablation
from vitrail.views.canvas import LINES, SEQUENTIAL, new_figure, styled
from vitrail.views.figure_images import from_pixels
from vitrail_course.labs.custom_run import CustomRun, set_weights, train_run
from vitrail_course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import NO_DIFFERENCE, Verdict, exceeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitrail_course.labs.custom_run import Weights

NAME = "heads"
TITLE = "heads attend differently"
NOTE = '001 "Self-Attention"'
CLAIM = (
    "Thus, different attention heads will capture different types of relations among patches helping the "
    "model to see things from different prospective."
)
ACCEPTS = "MNIST as IDX files, or a .npz"

_LR = 3e-3
_MEASURED_IMAGES = 200
SWAPPED = "accuracy with another head's attention"


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    small = size == "small"
    images = load_dataset(data, *((200, 60) if small else (10_000, 2_000)))
    if images.train.images is None:
        raise InputError("This lab needs images as arrays (IDX files or a .npz); pass other data.")
    shape = {"width": 16, "depth": 2, "heads": 2} if small else {"width": 48, "depth": 4, "heads": 4}
    epochs = 2 if small else 20 if data is None else 10
    changes: dict[str, Any] = {
        "model": lecture_model_fields(images) | shape,
        "batch": 40 if small else 64,
        "epochs": epochs,
    }
    recipes = [
        resolve_arm("mnist-notes", images, {}, changes, _LR, seed) for seed in range(2 if small else 5)
    ]
    runs = [CustomRun(recipe, snapshot_epochs=(epochs,)) for recipe in recipes]
    results = map_in_processes(partial(train_run, data=images), runs, process_count(size))
    snapshots = [result.snapshots[epochs] for result in results]
    trained = [measure_heads(*pair, images) for pair in zip(recipes, snapshots, strict=True)]
    untrained = [measure_heads(recipe, None, images) for recipe in recipes]
    changed = [measure_changed_heads(*pair, images) for pair in zip(recipes, snapshots, strict=True)]
    accuracy = [result.score for result in results]
    numbers = {
        "trained": trained,
        "untrained": untrained,
        "accuracy without a head": [without for without, _ in changed],
        SWAPPED: [swapped for _, swapped in changed],
        "accuracy": accuracy,
        "held out": len(images.eval_split),
        "heads": shape["heads"],
        "lr": _LR,
    }
    disagree = [one["disagree"] for one in trained]
    return LabResult(
        number=fmean(disagree),
        unit="of the tokens attend most to different tokens in two heads of a layer",
        n=len(disagree),
        setting=f"ViTs with {shape['heads']} heads per layer on {describe_dataset(images)}, {epochs} "
        "epochs; which "
        "relations they capture is not tested.",
        figure=draw(recipes[0], snapshots[0], images, numbers),
        interval=share_interval(disagree),
        numbers=numbers,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Training must set two heads apart, in their strongest token and in all weights; that must matter."""

    def changes(name: str) -> list[float]:
        pairs = zip(numbers["trained"], numbers["untrained"], strict=True)
        return [after[name] - before[name] for after, before in pairs]

    def lost(name: str) -> list[float]:
        return [100 * (a - b) for a, b in zip(numbers["accuracy"], numbers[name], strict=True)]

    compared = (
        ("tokens attend most to different tokens in two heads, more often than before training", "disagree"),
        ("heads differ more than before training, by total variation", "distance"),
    )
    without = "heads contribute: accuracy lost without one"
    swapped = "a head cannot be replaced by another of its layer: accuracy lost with its attention weights"
    return Verdict(
        [
            *(exceeds(text, changes(name), 0, NO_DIFFERENCE, form="+.3f") for text, name in compared),
            exceeds(without, lost("accuracy without a head"), 0, NO_DIFFERENCE, form=".1f", unit=" points"),
            exceeds(swapped, lost(SWAPPED), 0, NO_DIFFERENCE, form=".1f", unit=" points"),
        ]
    )


# ---- measurements ---------------------------------------------------------------------------


def _load_batch(recipe: Recipe, data: Dataset) -> torch.Tensor:
    split = data.eval_split.take(np.arange(min(_MEASURED_IMAGES, len(data.eval_split))))
    assert split.images is not None
    return from_pixels(split.images, recipe.preprocess, split.names).images


def _build_model(recipe: Recipe, weights: Weights | None) -> ViT:
    torch.manual_seed(recipe.train.seed)
    model = ViT(recipe.model)
    return (model if weights is None else set_weights(model, weights)).eval()


@torch.no_grad()
def attention_weights(model: ViT, images: torch.Tensor) -> torch.Tensor:
    """(L, B, k, T, T)."""
    with record(model, "blocks.*.attention.weights") as tape:
        model(images)
    return torch.stack(list(tape.values()))


def measure_heads(recipe: Recipe, weights: Weights | None, data: Dataset) -> dict[str, float]:
    """`compare_heads` for a recipe's model on held-out images, in the mean over layers, images and tokens."""
    return compare_heads(attention_weights(_build_model(recipe, weights), _load_batch(recipe, data)))


def compare_heads(attention: torch.Tensor) -> dict[str, float]:
    """Fraction of tokens whose strongest token differs between two heads, and total variation distance."""
    heads = attention.shape[2]
    pairs = [(a, b) for a in range(heads) for b in range(a)]
    strongest = attention.argmax(dim=-1)  # (L, B, k, T)
    disagree = [(strongest[:, :, a] != strongest[:, :, b]).double().mean().item() for a, b in pairs]
    distance = [
        (attention[:, :, a] - attention[:, :, b]).abs().sum(dim=-1).mean().item() / 2 for a, b in pairs
    ]
    return {"disagree": fmean(disagree), "distance": fmean(distance)}


def measure_changed_heads(recipe: Recipe, weights: Weights, data: Dataset) -> tuple[float, float]:
    """Held-out accuracy in the mean over the heads, without one and with the attention of another one."""
    split, model = data.eval_split, _build_model(recipe, weights)
    assert split.images is not None
    images = from_pixels(split.images, recipe.preprocess, split.names).images
    found = ablation.compute(model, images, split.labels.tolist())
    assert found.accuracy is not None
    swapped = accuracy_with_swaps(model, images, torch.from_numpy(split.labels))
    return float(found.accuracy.mean()), swapped


@torch.no_grad()
def accuracy_with_swaps(model: ViT, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy if one head has the attention weights of another head of its layer, the mean over all pairs.

    It keeps its own values and projection. Heads that attend alike can be swapped without loss.
    """
    correct = []
    for block in range(model.config.depth):
        for head, other in permutations(range(model.config.heads), 2):

            def swap(attention: torch.Tensor, head: int = head, other: int = other) -> torch.Tensor:
                swapped = attention.clone()  # (B, k, T, T)
                swapped[:, head] = attention[:, other]
                return swapped

            with edit(model, {f"blocks.{block}.attention.weights": swap}):
                predicted = torch.cat([model(part).argmax(dim=1) for part in images.split(256)])
            correct.append((predicted == labels).double().mean().item())
    return fmean(correct)


# ---- summary and figure ---------------------------------------------------------------------


@styled
def draw(recipe: Recipe, weights: Weights | None, data: Dataset, numbers: Mapping[str, Any]) -> Figure:
    """Attention of the middle patch in each head of the first layer, and the measurements of every seed."""
    figure = new_figure(8.4, 3.0)
    parts: Any = figure.subfigures(1, 2, width_ratios=[1.3, 1])
    left, right = parts
    model, image = _build_model(recipe, weights), _load_batch(recipe, data)[:1]
    maps = _middle_patch_maps(model, image)
    axes = left.subplots(1, len(maps), squeeze=False)[0]
    for head, (axis, values) in enumerate(zip(axes, maps, strict=True)):
        axis.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=float(maps.max()))
        axis.plot(values.shape[1] // 2, values.shape[0] // 2, "o", markersize=6, markerfacecolor="none")
        axis.set(xticks=[], yticks=[], title=f"head {head}")
    left.suptitle("attention of the middle patch, first layer", fontsize=9)
    axis = right.subplots()
    for n, kind in enumerate(("untrained", "trained")):
        for row, name in enumerate(("disagree", "distance")):
            values = [one[name] for one in numbers[kind]]
            label = kind if row == 0 else ""
            axis.plot(values, [row] * len(values), "o", color=LINES[n], alpha=0.4, markersize=5, label=label)
    rows = ["strongest token\ndiffers", "total variation\ndistance"]
    axis.set(yticks=[0, 1], yticklabels=rows, xlim=(0, 1), ylim=(1.5, -0.7), xlabel="two heads of a layer")
    axis.legend(loc="upper left", fontsize=7.5, ncols=2)
    return figure


def _middle_patch_maps(model: ViT, image: torch.Tensor) -> NDArray[np.float32]:
    """(k, h, w): the attention of the middle patch to all patches in the first layer."""
    (h, w), prefix = model.config.grid, model.config.prefix
    weights = attention_weights(model, image)[0, 0]  # (k, T, T)
    return weights[:, prefix + h // 2 * w + w // 2, prefix:].unflatten(1, (h, w)).numpy()
