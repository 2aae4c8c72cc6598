"""Lab `positions`: whether a ViT needs positions, whether learned ones, and what it learns of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.sources import Dataset
from vitrail.inspect import positions
from vitrail.inspect.canvas import LINES, bar, canvas, in_our_style
from vitrail.inspect.positions import Positions
from vitrail.labs.given import described, of_the_notes, opened
from vitrail.labs.interval import interval
from vitrail.labs.job import Job, do, fill
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import Arm, Difference, Study, best_rate, draw_arm, settled, study
from vitrail.labs.trial import Trial, each, processes_for
from vitrail.model import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NAME = "positions"
NOTE = '002 "Positional Encodings do Matter", "Learning positional encodings"'
CLAIM = (
    "Positional encodings matter: 68 % right after 10 epochs with the worse, 95 % with the better, 27 points "
    "more. Learned ones come to show where patches lie: their similarities after 50 epochs are other than "
    "after one."
)
TAKES = "MNIST as IDX files, a .npz, or a folder of pictures"

RECIPE = "mnist-notes"
NONE, RANDOM, SINES, LEARNED = "none", "frozen random", "fixed sines", "learned"
ARMS: dict[str, dict[str, Any]] = {
    NONE: {"model": {"position": "none"}},
    SINES: {"model": {"position": "sincos1d"}},
    LEARNED: {},
}
SIGMA = 0.5**0.5  # of random rows: then they are as long as those of sines and cosines
SAID = 0.27  # by the slide, more with the better encodings
NEAR = -0.2  # correlation with distance, below which near patches have positions that are alike

Grids = dict[int, list[Positions]]


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    small, given = size == "small", data is not None
    pictures = opened(data, *((300, 100) if small else (10_000, 10_000)))
    rates, seeds = ([1e-2], 2) if small else ([1e-3, 3e-3, 1e-2], 5)
    epochs, later = (3, 5) if small else (10, 10) if given else (20, 50)
    shared: dict[str, Any] = {"model": of_the_notes(pictures), "batch": 30 if small else 64}
    if small:
        shared["model"] |= {"width": 16, "depth": 1, "heads": 2}
    length = {"epochs": epochs, "evaluate_every": epochs, "save_every": epochs}
    count = processes_for(size)
    with TemporaryDirectory(prefix="runs-", dir=place) as runs:
        found = study(
            pictures,
            out=runs,
            arms=ARMS,
            rates=rates,
            seeds=seeds,
            recipe=RECIPE,
            processes=count,
            **shared,
            **length,
        )
    found = with_frozen(found, pictures, {**shared, **length}, count)
    grids = learn(pictures, {**shared, "epochs": later}, found.arms[LEARNED].rate, min(seeds, 3), count)
    gain = found.compare(LEARNED, NONE)
    gains = {name: found.compare(name, NONE) for name in (RANDOM, SINES, LEARNED)}
    rest = {name: found.compare(LEARNED, name) for name in (RANDOM, SINES)}
    near = {epoch: [one.correlation for one in some] for epoch, some in grids.items()}
    return Result(
        number=100 * gain.mean,
        unit="percentage points more right with learned positions than without any",
        n=gain.n,
        verdict=judge(gains, rest, near),
        sentence=tell(found, gains, near, pictures, epochs),
        figure=draw(found, grids),
        interval=gain.interval and (100 * gain.interval[0], 100 * gain.interval[1]),
        numbers={
            "arms": {
                arm.name: {"mean": arm.mean, "interval": arm.interval, "scores": arm.scores, "rate": arm.rate}
                for arm in found.arms.values()
            },
            "more than none": {name: (one.mean, one.interval) for name, one in gains.items()},
            "learned more than": {name: (one.mean, one.interval) for name, one in rest.items()},
            "correlation of similarity and distance": near,
            "pictures": len(pictures.train),
            "epochs": epochs,
        },
    )


def judge(
    gains: Mapping[str, Difference], rest: Mapping[str, Difference], near: Mapping[int, list[float]]
) -> Verdict:
    """Positions must help; then it is asked whether they have to be learned, and what learned ones show."""
    gain = gains[LEARNED]
    if not gain.clear or gain.mean < 0:
        return Verdict("does not hold", f": learned positions gain nothing clear ({points(gain.mean)})")
    needed = []
    as_good = [name for name, one in rest.items() if gains[name].clear and not (one.clear and one.mean > 0)]
    if as_good:
        needed.append(f"positions of any kind are meant: {' and '.join(as_good)} gain as much as learned")
    if gain.interval is not None and not gain.interval[0] <= SAID <= gain.interval[1]:
        needed.append(f"not by how much: {points(gain.mean)} here, 27 there")
    last = interval(near[max(near)])
    if last is None or last[1] > NEAR:
        r = fmean(near[max(near)])
        after = f"similarity and distance after {max(near)} epochs: r = {r:+.2f}"
        needed.append(f"nearness is not asked of learned rows ({after})")
    return Verdict("holds if", "; ".join(needed)) if needed else Verdict("holds")


def points(difference: float) -> str:
    return f"{100 * difference:.1f} points"


def tell(
    found: Study, gains: Mapping[str, Difference], near: Mapping[int, list[float]], data: Dataset, epochs: int
) -> str:
    arms = ", ".join(f"{arm.mean:.1%} {name}" for name, arm in found.arms.items())
    first, last = min(near), max(near)
    r = fmean(near[last])
    alike = "more alike" if r < NEAR else "less alike" if r > -NEAR else "hardly more alike than others"
    return (
        f"On {described(data)} ({epochs} epochs, the notes' model) the share right of those held out is, by "
        f"positions: {arms}; the notes have 68 and 95 % on MNIST. Each arm has the best of its rates. Random "
        f"rows that never learn gain {points(gains[RANDOM].mean)}, learned ones "
        f"{points(gains[LEARNED].mean)}. The similarity of learned rows correlates with the distance of "
        f"their patches by {fmean(near[first]):+.2f} after {first} epoch and {r:+.2f} after "
        f"{last}: rows of nearer patches are {alike}."
    )


# ---- runs -----------------------------------------------------------------------------------


def with_frozen(found: Study, data: Dataset, changes: dict[str, Any], processes: int) -> Study:
    """The study with one arm more, which a study cannot run: random rows that do not learn."""

    def job(rate: float, seed: int) -> Job:
        chosen = settled(RECIPE, data, {}, changes, rate, seed)
        return Job(chosen, rows=random_rows(chosen.model.tokens, chosen.model.width, seed))

    def trials(rates: list[float], seeds: list[int]) -> list[Trial]:
        both = [(rate, seed) for rate in rates for seed in seeds]
        done = each(partial(do, data=data), [job(*one) for one in both], processes)
        return [
            Trial(RANDOM, *key, one.score, one.loss, one.seconds) for key, one in zip(both, done, strict=True)
        ]

    first, *others = found.seeds
    sweep = trials(found.rates, [first])
    rate = best_rate(sweep)
    more = trials([rate], others)
    scores = [next(one.score for one in sweep if one.rate == rate), *(one.score for one in more)]
    seconds = round(sum(one.seconds for one in (*sweep, *more)), 3)
    frozen = Arm(RANDOM, {"rows": "random"}, rate, scores, sweep, found.arms[NONE].parameters, seconds)
    arms = {NONE: found.arms[NONE], RANDOM: frozen, **found.arms}
    return replace(found, arms=arms)


def random_rows(tokens: int, width: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng([seed, tokens]).normal(0, SIGMA, (tokens, width)).astype(np.float32)


def learn(data: Dataset, changes: dict[str, Any], rate: float, seeds: int, processes: int) -> Grids:
    """How alike learned positions are after the first epoch and after the last of a longer run."""
    epochs = changes["epochs"]
    chosen = [settled(RECIPE, data, {}, changes, rate, seed) for seed in range(seeds)]
    done = each(partial(do, data=data), [Job(one, keep=(1, epochs)) for one in chosen], processes)
    model = ViT(chosen[0].model)
    return {
        epoch: [positions.compute(fill(model, one.states[epoch])) for one in done if one.states]
        for epoch in (1, epochs)
    }


# ---- the picture ----------------------------------------------------------------------------


@in_our_style
def draw(found: Study, grids: Grids) -> Figure:
    """Every seed of every arm; and similarities of learned rows, a tile for each patch."""
    figure = canvas(8.4, 5.2)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.7])
    upper, lower = parts
    axis = upper.subplots()
    for n, arm in enumerate(found.arms.values()):
        draw_arm(axis, n, arm, LINES[n])
    axis.set(yticks=range(len(found.arms)), yticklabels=list(found.arms))
    axis.set(xlabel="held-out pictures right", ylim=(len(found.arms) - 0.5, -0.5))
    axis.set_title(f"{len(found.seeds)} seeds, mean and 95 % interval", loc="left")
    least, most = axis.get_xlim()
    axis.set_xlim(max(0.0, least), min(1.0, most))
    shown = {epoch: some[0] for epoch, some in grids.items()}
    colours = positions.scale(*shown.values())
    axes = lower.subplots(1, len(shown))
    image = None
    for axis, (epoch, one) in zip(axes, shown.items(), strict=True):
        h, w = one.grid
        places = positions.chosen(h, 7, 7), positions.chosen(w, 7, 7)
        image = positions.mosaic(axis, one, *places, colours)
        axis.set(xlabel="", ylabel="")
        word = "epoch" if epoch == 1 else "epochs"
        axis.set_title(f"learned, after {epoch} {word}: r with distance {one.correlation:+.2f}")
    bar(figure=lower, image=image, axes=axes, label="cosine (itself: 1)")
    return figure
