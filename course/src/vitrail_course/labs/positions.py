"""Lab `positions`: accuracy with no, fixed and learned positions, and the structure of learned ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import (
    Arm,
    Difference,
    Study,
    best_lr,
    draw_arm,
    resolve_arm,
    study,
)
from vitrail.experiment.trial import Trial, map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.views import positions
from vitrail.views.canvas import LINES, add_colorbar, new_figure, styled
from vitrail.views.positions import Positions
from vitrail_course.labs.custom_run import CustomRun, set_weights, train_run
from vitrail_course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.neighbors import NOT_BLANK, USED, Neighbors, compare_neighbors
from vitrail_course.labs.verdict import (
    Statement,
    Verdict,
    compare_arms,
    decide,
    equal_within,
    format_interval,
    format_points,
    gain,
    is_above,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NAME = "positions"
TITLE = "position embeddings matter"
NOTE = '002 "Positional Encodings do Matter", "Learning positional encodings"'
CLAIM = (
    "Positional encodings matter: after 10 epochs accuracy is 68 % with the worse ones and 95 % with the "
    "better ones, a gain of 27 points. Learned ones come to reflect the positions of the patches: after 50 "
    "epochs, those of close patches are similar, and more so than after one."
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
_CLAIMED_IMAGES, _CLAIMED_EPOCHS = 60_000, 50  # on the slides
_MARGIN = 0.02  # of the gain, within which it counts as that of the slide
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
    learned_gain = _compare(result, LEARNED, NONE)
    correlations = {
        epoch: [one_map.correlation for one_map in maps] for epoch, maps in similarity_maps.items()
    }
    neighbors = compare_neighbors(similarity_maps, images)
    return LabResult(
        number=100 * learned_gain.mean,
        unit="percentage points of accuracy, learned positions minus none",
        n=learned_gain.n,
        sentence=summarize(result, correlations, neighbors, images, epochs),
        figure=draw(result, similarity_maps, neighbors),
        interval=learned_gain.interval and (100 * learned_gain.interval[0], 100 * learned_gain.interval[1]),
        numbers={
            "arms": {arm.name: arm.numbers() for arm in result.arms.values()},
            _CORRELATION: correlations,
            _NEIGHBORS: neighbors.excess,
            "patches": neighbors.patches,
            "images": len(images.train),
            "held out": len(images.eval_split),
            "epochs": epochs,
        },
        warnings=result.notes,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Positions must help, by what the slide says, and learned ones must show where the patches are."""
    arms, images = numbers["arms"], numbers["held out"]
    (first, _), *_, (last, r) = numbers[_CORRELATION].items()
    by_epoch = numbers.get(_NEIGHBORS, {}).get(NOT_BLANK, {})
    early, late = by_epoch.get(first, []), by_epoch.get(last, [])
    change = [b - a for a, b in zip(early, late, strict=True)]

    def compare(first: str, second: str) -> Difference:
        return compare_arms(arms[first]["scores"], arms[second]["scores"], images)

    after = f"after {_CLAIMED_EPOCHS} epochs, embeddings of adjacent patches are more similar than others"
    matter = gain("accuracy is higher with learned positions than without", compare(LEARNED, NONE))
    others = ", ".join(
        f"{name} ones minus learned ones {format_points(compare(name, LEARNED))}"
        for name in (RANDOM, SINUSOIDAL)
    )
    return decide(
        [
            replace(matter, evidence=f"{matter.evidence}; {others}"),
            _in_the_setting(
                _gain_of_the_slide({name: compare(name, NONE) for name in (RANDOM, SINUSOIDAL, LEARNED)}),
                numbers["images"],
                _CLAIMED_IMAGES,
                "images",
            ),
            *(
                _in_the_setting(statement, int(last), _CLAIMED_EPOCHS, "epochs")
                for statement in (
                    _above_0(after, late),
                    _above_0(
                        f"adjacent patches are more similar, compared with others, than after {first} epoch",
                        change,
                    ),
                    _falls_with_distance(r),
                )
            ),
        ]
    )


def _above_0(text: str, values: Sequence[float]) -> Statement:
    """The statement that adjacent patches are more alike than others, among those that are not blank."""
    measured = f"{_format_mean(values)}, n = {len(values)}" if values else "not measured in this result"
    evidence = f"similarity of adjacent minus other pairs, without blank patches: {measured}"
    return Statement(text, is_above(confidence_interval(values), 0), evidence)


def _falls_with_distance(r: Sequence[float]) -> Statement:
    """The statement that embeddings are less similar the farther apart their patches are: r < 0."""
    above = is_above(confidence_interval(r), 0)
    evidence = (
        "r of similarity and distance over all pairs of patches, blank ones too: "
        f"{_format_mean(r)}, n = {len(r)}, below 0 if it falls"
    )
    return Statement("similarity falls with distance", None if above is None else not above, evidence)


def _gain_of_the_slide(gains: Mapping[str, Difference]) -> Statement:
    """The statement that the gain is that of the slide, which does not say which encodings it compares.

    Judged by learned ones; the evidence names the largest gain over none.
    """
    text = "the gain from none to learned ones is 27 points"
    found = equal_within(text, gains[LEARNED], _MARGIN, _CLAIMED_GAIN)
    best = max(gains, key=lambda name: gains[name].mean)
    largest = f"the largest gain over none, of {best} ones, is {format_points(gains[best])}"
    return replace(
        found, evidence=f"{found.evidence}; the slide does not say which it compares: here {largest}"
    )


def _in_the_setting(statement: Statement, actual: int, claimed: int, unit: str) -> Statement:
    """The statement; not clear if it was measured with fewer images or epochs than the slide has."""
    if actual >= claimed:
        return statement
    evidence = f"{statement.evidence}, but with {actual:,} {unit} instead of {claimed:,}"
    return replace(statement, true=None, evidence=evidence)


def _compare(result: Study, first: str, second: str) -> Difference:
    """First minus second, without the seed that chose the learning rates."""
    arms = result.arms
    return compare_arms(arms[first].scores, arms[second].scores, arms[first].images)


def _format_mean(values: Sequence[float]) -> str:
    return format_interval(fmean(values), confidence_interval(values), "+.2f")


def summarize(
    result: Study,
    correlations: Mapping[int, list[float]],
    neighbors: Neighbors,
    data: Dataset,
    epochs: int,
) -> str:
    arms = ", ".join(f"{arm.mean:.1%} {name}" for name, arm in result.arms.items())
    first, last = min(correlations), max(correlations)
    gains = "; ".join(
        f"{name} {format_points(_compare(result, name, NONE))}" for name in (RANDOM, SINUSOIDAL, LEARNED)
    )
    others = " and ".join(
        f"{format_points(_compare(result, name, LEARNED))} for {name} ones" for name in (RANDOM, SINUSOIDAL)
    )
    return (
        f"On {describe_dataset(data)} ({epochs} epochs, the model of the lecture notes, "
        f"{len(result.seeds)} seeds), accuracy by kind of positions is {arms}; the lecture notes report 68 "
        "and 95 % on MNIST. Each arm has its own best learning rate. Without the seed that chose it, minus "
        f"none: {gains}; minus learned positions: {others}. The cosine similarity of learned embeddings "
        f"correlates with the distance of their patches by r = {_format_mean(correlations[first])} after "
        f"{first} epoch and {_format_mean(correlations[last])} after {last}, over all pairs. "
        f"{_describe_neighbors(neighbors)}"
    )


def _describe_neighbors(neighbors: Neighbors) -> str:
    found = {
        kind: " and ".join(f"{_format_mean(values)} after {epoch}" for epoch, values in by_epoch.items())
        for kind, by_epoch in neighbors.excess.items()
        if all(by_epoch.values())
    }
    texts = "; ".join(f"{text} among {kind} ({neighbors.patches[kind]})" for kind, text in found.items())
    return (
        "The mean similarity of adjacent patches, side by side or one above the other, minus that of other "
        f"pairs: {texts or 'too few patches'}. Blank patches have a single pixel value in more than "
        f"{1 - USED:.0%} of the training images."
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


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(result: Study, similarity_maps: _SimilarityMaps, neighbors: Neighbors) -> Figure:
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
        excess = "".join(
            f", adjacent minus others {one:+.2f}" for one in neighbors.excess[NOT_BLANK][epoch][:1]
        )
        axis.set_title(f"learned, {epoch} {unit}: r {similarity.correlation:+.2f}{excess}")
    add_colorbar(figure=lower, image=image, axes=axes, label="cosine similarity")
    return figure
