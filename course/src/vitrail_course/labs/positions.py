"""Lab `positions`: accuracy with no, fixed and learned positions, and the structure of learned ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.experiment.study import Arm, Study, best_lr, draw_arm, resolve_arm, study
from vitrail.experiment.trial import Trial, map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.views import positions
from vitrail.views.canvas import LINES, add_colorbar, new_figure, styled
from vitrail.views.positions import Positions
from vitrail_course.labs.custom_run import CustomRun, set_weights, train_run
from vitrail_course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import (
    NO_DIFFERENCE,
    REPLICATION,
    TOY,
    Kind,
    Verdict,
    compare_arms,
    exceeds,
    gain,
    percent_interval,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

NAME = "positions"
TITLE = "position embeddings matter"
NOTE = '002 "Positional Encodings do Matter", "How does positional encoding turn out?"'
CLAIM = (
    "Positional Encodings do Matter: [...] 68% after 10 epochs [...] 95% after 10 epochs. Closer patches "
    "tend to have more similar position embeddings."
)
ACCEPTS = "MNIST as IDX files, a .npz, or a folder of images"

RECIPE = "mnist-notes"
NONE, RANDOM, SINUSOIDAL, LEARNED = "none", "frozen random", "fixed sinusoidal", "learned"
_ARMS: dict[str, dict[str, Any]] = {
    NONE: {"model": {"position": "none"}},
    SINUSOIDAL: {"model": {"position": "sincos1d"}},
    LEARNED: {},
}
_SIGMA = 0.5**0.5  # of random position embeddings; gives them the norm of sinusoidal ones
_CLAIMED_IMAGES, _CLAIMED_EPOCHS = 60_000, 50  # on the slides
_USED = 0.1  # fraction of the training images in which a patch must have more than one pixel value
_CORRELATION, _NEIGHBORS = "correlation of similarity and distance", "adjacent minus other pairs"

_SimilarityMaps = dict[int, list[Positions]]


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    small, has_data = size == "small", data is not None
    images = load_dataset(data, *((300, 100) if small else (60_000, 10_000)))
    lrs, seeds = ([1e-2], 2) if small else ([3e-4, 1e-3, 3e-3, 1e-2, 3e-2], 5)
    epochs, long_epochs = (3, 5) if small else (10 if has_data else 20, 50)
    batch = 30 if small else 256 if has_data else 64
    shared: dict[str, Any] = {"model": lecture_model_fields(images), "batch": batch}
    if small:
        shared["model"] |= {"width": 16, "depth": 1, "heads": 2}
    length = {"epochs": epochs, "evaluate_every": epochs, "save_every": epochs}
    processes = process_count(size)
    with TemporaryDirectory(prefix="runs-", dir=out) as runs:
        result = study(
            images,
            out=runs,
            arms=_ARMS,
            lrs=lrs,
            seeds=seeds,
            recipe=RECIPE,
            processes=processes,
            **shared,
            **length,
        )
    result = _add_frozen_arm(result, images, {**shared, **length}, processes)
    lr, changes = result.arms[LEARNED].lr, {**shared, "epochs": long_epochs}
    similarity_maps = _train_learned_positions(images, changes, lr, min(seeds, 3), processes)
    learned_gain = compare_arms(result.arms[LEARNED].scores, result.arms[NONE].scores, len(images.eval_split))
    correlations = {
        epoch: [one_map.correlation for one_map in maps] for epoch, maps in similarity_maps.items()
    }
    neighbors = compare_neighbors(similarity_maps, images)
    return LabResult(
        number=100 * learned_gain.mean,
        unit="percentage points of accuracy, learned positions minus none",
        n=learned_gain.n,
        setting=f"The model of note 002 on {describe_dataset(images)}: {epochs} epochs with each kind of "
        "positions, "
        f"{long_epochs} for the similarities, without patches that are blank in 90 % of the images.",
        figure=draw(result, similarity_maps, neighbors),
        interval=percent_interval(learned_gain),
        numbers={
            "arms": {arm.name: arm.numbers() for arm in result.arms.values()},
            _CORRELATION: correlations,
            _NEIGHBORS: neighbors,
            "images": len(images.train),
            "held out": len(images.eval_split),
            "epochs": epochs,
        },
        warnings=result.notes,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Positions must help, and learned ones must show where the patches are; in the setting of the slides?"""
    arms, correlations = numbers["arms"], numbers[_CORRELATION]
    (first, _), *_, (last, r) = correlations.items()
    by_epoch = numbers[_NEIGHBORS]
    early, late = by_epoch[first], by_epoch[last]
    change = [b - a for a, b in zip(early, late, strict=True)]
    is_of_slides = numbers["images"] >= _CLAIMED_IMAGES and int(last) >= _CLAIMED_EPOCHS
    kind: Kind = REPLICATION if is_of_slides else TOY
    better = compare_arms(arms[LEARNED]["scores"], arms[NONE]["scores"], numbers["held out"])
    statements = [gain("accuracy is higher with learned positions than without", better, kind=kind)]
    similar = {
        f"after {last} epochs, adjacent patches are more similar than other pairs": late,
        f"more so than after {first} epoch": change,
    }
    for text, values in similar.items():
        if values:
            statements.append(exceeds(text, values, 0, NO_DIFFERENCE, form="+.2f", kind=kind))
    falls = "similarity falls with distance over all pairs: r below 0"
    statements.append(exceeds(falls, r, 0, NO_DIFFERENCE, form="+.2f", below=True, kind=kind))
    return Verdict(statements)


# ---- runs -----------------------------------------------------------------------------------


def _add_frozen_arm(result: Study, data: Dataset, changes: dict[str, Any], processes: int) -> Study:
    """The study with another arm, which it cannot run itself: random positions that are not trained."""

    def custom_run(lr: float, seed: int) -> CustomRun:
        recipe = resolve_arm(RECIPE, data, {}, changes, lr, seed)
        return CustomRun(
            recipe, frozen_positions=random_positions(recipe.model.tokens, recipe.model.width, seed)
        )

    def trials(lrs: list[float], seeds: list[int]) -> list[Trial]:
        keys = [(lr, seed) for lr in lrs for seed in seeds]
        results = map_in_processes(
            partial(train_run, data=data), [custom_run(*key) for key in keys], processes
        )
        return [Trial(RANDOM, *key, r.score, r.loss, r.seconds) for key, r in zip(keys, results, strict=True)]

    first, *others = result.seeds
    sweep = trials(result.lrs, [first])
    lr = best_lr(sweep)
    more = trials([lr], others)
    scores = [next(trial.score for trial in sweep if trial.lr == lr), *(trial.score for trial in more)]
    seconds = round(sum(trial.seconds for trial in (*sweep, *more)), 3)
    frozen = Arm(
        RANDOM,
        {"positions": "frozen random"},
        lr,
        scores,
        sweep,
        result.arms[NONE].parameters,
        seconds,
        len(data.eval_split),
    )
    arms = {NONE: result.arms[NONE], RANDOM: frozen, **result.arms}
    return replace(result, arms=arms)


def random_positions(tokens: int, width: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng([seed, tokens]).normal(0, _SIGMA, (tokens, width)).astype(np.float32)


def _train_learned_positions(
    data: Dataset, changes: dict[str, Any], lr: float, seeds: int, processes: int
) -> _SimilarityMaps:
    """Similarities of learned position embeddings after the first and the last epoch of longer runs."""
    epochs = changes["epochs"]
    recipes = [resolve_arm(RECIPE, data, {}, changes, lr, seed) for seed in range(seeds)]
    runs = [CustomRun(recipe, snapshot_epochs=(1, epochs)) for recipe in recipes]
    results = map_in_processes(partial(train_run, data=data), runs, processes)
    model = ViT(recipes[0].model)
    return {
        epoch: [positions.compute(set_weights(model, r.snapshots[epoch])) for r in results if r.snapshots]
        for epoch in (1, epochs)
    }


# ---- neighbors ------------------------------------------------------------------------------


def compare_neighbors(maps: Mapping[int, Sequence[Positions]], data: Dataset) -> dict[int, list[float]]:
    """Compare adjacent patches with other pairs, by epoch and seed; empty where the patches are too few."""
    mask = used_patches(data, next(iter(maps.values()))[0].grid)
    found = {epoch: [neighbor_excess(one.similarity, mask) for one in some] for epoch, some in maps.items()}
    return {epoch: [value for value in values if value is not None] for epoch, values in found.items()}


def used_patches(data: Dataset, grid: tuple[int, int]) -> Mask:
    """(h, w): the patches with more than one pixel value in at least `_USED` of the training images.

    Image files are not read for it: all of their patches count as used.
    """
    images, (h, w) = data.train.images, grid
    if images is None:
        return np.ones(grid, dtype=bool)
    n, height, width, channels = images.shape
    patches = images.reshape(n, h, height // h, w, width // w, channels)
    varies = (patches != patches[:, :, :1, :, :1]).any(axis=(2, 4, 5))  # (n, h, w)
    return varies.mean(axis=0) >= _USED


def neighbor_excess(similarity: NDArray[np.float64], mask: Mask) -> float | None:
    """Mean similarity of pairs side by side or one above the other minus that of all other pairs.

    None if one of the two kinds has no pair.

    Args:
        similarity: (N, N), patches in row-major order.
        mask: (h, w), the patches to compare; pairs with another patch are left out.
    """
    row, column = np.nonzero(mask)
    steps = np.abs(row[:, None] - row) + np.abs(column[:, None] - column)
    values = similarity[np.ix_(mask.ravel(), mask.ravel())]
    adjacent, others = values[steps == 1], values[steps > 1]
    return float(adjacent.mean() - others.mean()) if adjacent.size and others.size else None


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(result: Study, similarity_maps: _SimilarityMaps, neighbors: Mapping[int, Sequence[float]]) -> Figure:
    """Accuracy of every seed; and the similarities of learned embeddings, a tile for each patch."""
    figure = new_figure(8.4, 5.2)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.7])
    upper, lower = parts
    axis = upper.subplots()
    for n, arm in enumerate(result.arms.values()):
        draw_arm(axis, n, arm, LINES[n])
    axis.set(yticks=range(len(result.arms)), yticklabels=list(result.arms))
    axis.set(xlabel="held-out accuracy", ylim=(len(result.arms) - 0.5, -0.5))
    axis.set_title(f"{len(result.seeds)} seeds, mean and 95 % confidence interval", loc="left")
    low, high = axis.get_xlim()
    axis.set_xlim(max(0.0, low), min(1.0, high))
    shown = {epoch: maps[0] for epoch, maps in similarity_maps.items()}
    colors = positions.color_scale(*shown.values())
    axes = lower.subplots(1, len(shown))
    image = None
    for axis, (epoch, similarity) in zip(axes, shown.items(), strict=True):
        h, w = similarity.grid
        rows, columns = positions.tile_indices(h, 7, 7), positions.tile_indices(w, 7, 7)
        image = positions.draw_tiles(axis, similarity, rows, columns, colors)
        axis.set(xlabel="", ylabel="")
        unit = "epoch" if epoch == 1 else "epochs"
        excess = "".join(f", adjacent minus others {one:+.2f}" for one in neighbors[epoch][:1])
        axis.set_title(f"learned, {epoch} {unit}: r {similarity.correlation:+.2f}{excess}")
    add_colorbar(figure=lower, image=image, axes=axes, label="cosine similarity")
    return figure
