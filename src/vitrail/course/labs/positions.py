"""Lab `positions`: accuracy with no, fixed and learned positions, and the structure of learned ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.course.labs.custom_run import CustomRun, set_weights, train_run
from vitrail.course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset
from vitrail.course.labs.lab import LabResult, LabSize, Verdict, process_count
from vitrail.data.sources import Dataset
from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import Arm, Difference, Study, best_lr, draw_arm, resolve_arm, study
from vitrail.experiment.trial import Trial, map_in_processes
from vitrail.inspect import positions
from vitrail.inspect.canvas import LINES, add_colorbar, new_figure, styled
from vitrail.inspect.positions import Positions
from vitrail.model import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NAME = "positions"
TITLE = "position embeddings matter"
NOTE = '002 "Positional Encodings do Matter", "Learning positional encodings"'
CLAIM = (
    "Positional encodings matter: after 10 epochs accuracy is 68 % with the worse ones and 95 % with the "
    "better ones, a gain of 27 points. Learned ones come to reflect the positions of the patches: their "
    "similarities after 50 epochs differ from those after one."
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
_CLAIMED_GAIN = 0.27  # of accuracy, on the slide
_SIMILAR = -0.2  # correlation with distance below which nearby patches have similar embeddings

_SimilarityMaps = dict[int, list[Positions]]


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    small, has_data = size == "small", data is not None
    images = load_dataset(data, *((300, 100) if small else (10_000, 10_000)))
    lrs, seeds = ([1e-2], 2) if small else ([1e-3, 3e-3, 1e-2], 5)
    epochs, long_epochs = (3, 5) if small else (10, 10) if has_data else (20, 50)
    shared: dict[str, Any] = {"model": lecture_model_fields(images), "batch": 30 if small else 64}
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
    learned_gain = result.compare(LEARNED, NONE)
    gains = {name: result.compare(name, NONE) for name in (RANDOM, SINUSOIDAL, LEARNED)}
    learned_minus = {name: result.compare(LEARNED, name) for name in (RANDOM, SINUSOIDAL)}
    correlations = {
        epoch: [one_map.correlation for one_map in maps] for epoch, maps in similarity_maps.items()
    }
    return LabResult(
        number=100 * learned_gain.mean,
        unit="percentage points of accuracy, learned positions minus none",
        n=learned_gain.n,
        verdict=decide_verdict(gains, learned_minus, correlations),
        sentence=summarize(result, gains, correlations, images, epochs),
        figure=draw(result, similarity_maps),
        interval=learned_gain.interval and (100 * learned_gain.interval[0], 100 * learned_gain.interval[1]),
        numbers={
            "arms": {
                arm.name: {"mean": arm.mean, "interval": arm.interval, "scores": arm.scores, "lr": arm.lr}
                for arm in result.arms.values()
            },
            "minus none": {name: (gain.mean, gain.interval) for name, gain in gains.items()},
            "learned minus": {name: (gain.mean, gain.interval) for name, gain in learned_minus.items()},
            "correlation of similarity and distance": correlations,
            "images": len(images.train),
            "epochs": epochs,
        },
    )


def decide_verdict(
    gains: Mapping[str, Difference],
    learned_minus: Mapping[str, Difference],
    correlations: Mapping[int, list[float]],
) -> Verdict:
    """Learned positions must help; then, whether fixed ones do as well, and what learned ones show."""
    learned_gain = gains[LEARNED]
    if not learned_gain.significant or learned_gain.mean < 0:
        return Verdict(
            "does not hold", f"learned positions bring no clear gain ({_format_points(learned_gain.mean)})"
        )
    conditions = []
    as_good = [
        name
        for name, gain in learned_minus.items()
        if gains[name].significant and not (gain.significant and gain.mean > 0)
    ]
    if as_good:
        conditions.append(f"{' and '.join(as_good)} positions gain as much as learned ones")
    if (
        learned_gain.interval is not None
        and not learned_gain.interval[0] <= _CLAIMED_GAIN <= learned_gain.interval[1]
    ):
        conditions.append(f"the gain is {_format_points(learned_gain.mean)}, not 27")
    last = confidence_interval(correlations[max(correlations)])
    if last is None or last[1] > _SIMILAR:
        r = fmean(correlations[max(correlations)])
        conditions.append(
            "learned embeddings of nearby patches are not clearly more similar (similarity and distance "
            f"after {max(correlations)} epochs: r = {r:+.2f})"
        )
    return Verdict("partly", "; ".join(conditions)) if conditions else Verdict("holds")


def _format_points(difference: float) -> str:
    return f"{100 * difference:.1f} points"


def summarize(
    result: Study,
    gains: Mapping[str, Difference],
    correlations: Mapping[int, list[float]],
    data: Dataset,
    epochs: int,
) -> str:
    arms = ", ".join(f"{arm.mean:.1%} {name}" for name, arm in result.arms.items())
    first, last = min(correlations), max(correlations)
    r = fmean(correlations[last])
    similarity = (
        "more similar than"
        if r < _SIMILAR
        else "less similar than"
        if r > -_SIMILAR
        else "hardly more similar than"
    )
    return (
        f"On {describe_dataset(data)} ({epochs} epochs, the model of the lecture notes), accuracy by kind of "
        f"positions is {arms}; the lecture notes report 68 and 95 % on MNIST. Each arm has its own best "
        f"learning rate. Frozen random positions gain {_format_points(gains[RANDOM].mean)}, learned ones "
        f"{_format_points(gains[LEARNED].mean)}. The cosine similarity of learned embeddings correlates with "
        f"the distance of their patches by {fmean(correlations[first]):+.2f} after {first} epoch and "
        f"{r:+.2f} after {last}: embeddings of nearby patches are {similarity} others."
    )


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
        RANDOM, {"positions": "frozen random"}, lr, scores, sweep, result.arms[NONE].parameters, seconds
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


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(result: Study, similarity_maps: _SimilarityMaps) -> Figure:
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
        axis.set_title(f"learned, after {epoch} {unit}: r with distance {similarity.correlation:+.2f}")
    add_colorbar(figure=lower, image=image, axes=axes, label="cosine similarity")
    return figure
