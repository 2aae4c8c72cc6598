"""Lab `pool`: what the class token is for, and whether the mean of the patches does as well."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vitrail.data.sources import Dataset
from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.given import described, of_the_notes, opened
from vitrail.labs.job import Job, do
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import Difference, Study, draw_arm, mean_at, settled, study
from vitrail.labs.trial import each, processes_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "pool"
NOTE = '001 "Pooler", 002 "What happens when removing the cls token"'
CLAIM = (
    "The class token gathers what the classifier reads (001); what happens without it, 002 asks. The paper "
    "(D.3, Fig. 9): the mean of the patches does as well, but needs a learning rate of its own."
)
TAKES = "MNIST as IDX files, a .npz, or a folder of pictures"

RECIPE = "mnist-notes"
CLASS, MEAN = "class token", "mean of patches"
ARMS: dict[str, dict[str, Any]] = {CLASS: {}, MEAN: {"model": {"class_token": False, "pool": "mean"}}}


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    small = size == "small"
    pictures = opened(data, *((300, 100) if small else (10_000, 10_000)))
    rates, seeds = ([3e-3, 1e-2], 2) if small else ([3e-4, 1e-3, 3e-3, 1e-2], 5)
    epochs = 3 if small else 20 if data is None else 10
    model = of_the_notes(pictures) | ({"width": 16, "depth": 1, "heads": 2} if small else {})
    changes: dict[str, Any] = {"model": model, "batch": 30 if small else 64, "epochs": epochs}
    changes |= {"evaluate_every": epochs, "save_every": epochs}
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
            **changes,
        )
    own = found.compare(MEAN, CLASS)
    borrowed = at_the_others_rate(found, pictures, changes, count)
    return Result(
        number=100 * own.mean,
        unit="percentage points more right by the mean of the patches than by the class token",
        n=own.n,
        verdict=judge(own, borrowed),
        sentence=tell(found, own, borrowed, pictures, epochs),
        figure=draw(found),
        interval=own.interval and (100 * own.interval[0], 100 * own.interval[1]),
        numbers={
            "arms": {
                arm.name: {
                    "mean": arm.mean,
                    "interval": arm.interval,
                    "scores": arm.scores,
                    "rate": arm.rate,
                    "sweep": {f"{rate:g}": mean_at(arm.sweep, rate) for rate in found.rates},
                }
                for arm in found.arms.values()
            },
            "at the class token's rate": (borrowed.mean, borrowed.interval),
            "pictures": len(pictures.train),
            "epochs": epochs,
        },
    )


def judge(own: Difference, borrowed: Difference) -> Verdict:
    """Alike at rates of their own; and whether they are not at one rate."""
    if own.clear:
        how = "more" if own.mean > 0 else "less"
        return Verdict(
            "does not hold", f": the mean of the patches gets {100 * abs(own.mean):.1f} points {how} right"
        )
    if own.interval is None:
        return Verdict("does not hold", ": a single seed says nothing")
    if borrowed.clear and borrowed.mean < 0:
        return Verdict("holds if", "each has a learning rate of its own")
    reach = 100 * max(map(abs, own.interval))
    return Verdict("holds if", f"less than {reach:.1f} points do not count; no rate of its own is needed")


def at_the_others_rate(found: Study, data: Dataset, changes: dict[str, Any], processes: int) -> Difference:
    """The mean of the patches at the class token's rate, less the class token at it."""
    theirs = found.arms[CLASS]
    scores = found.arms[MEAN].scores
    if found.arms[MEAN].rate != theirs.rate:
        jobs = [Job(settled(RECIPE, data, ARMS[MEAN], changes, theirs.rate, seed)) for seed in found.seeds]
        scores = [one.score for one in each(partial(do, data=data), jobs, processes)]
    return Difference.of(scores, theirs.scores)


def tell(found: Study, own: Difference, borrowed: Difference, data: Dataset, epochs: int) -> str:
    ours, theirs = found.arms[MEAN], found.arms[CLASS]
    reach = "" if own.interval is None else f" [{100 * own.interval[0]:+.1f}, {100 * own.interval[1]:+.1f}]"
    said = (
        f"On {described(data)} ({epochs} epochs, {own.n} seeds, the notes' model) the class token gets "
        f"{theirs.mean:.1%} right at its best rate, {theirs.rate:g}, and the mean of the patches "
        f"{ours.mean:.1%} at {ours.rate:g}: {100 * own.mean:+.1f}{reach} points. "
    )
    if ours.rate == theirs.rate:
        return said + "The best rate is the same for both here; in the paper it is not."
    return said + f"At the class token's rate it would be {100 * borrowed.mean:+.1f} points."


@in_our_style
def draw(found: Study) -> Figure:
    """Every seed at its arm's best rate; and the sweep that chose it."""
    figure = canvas(7.6, 2.6)
    left, right = figure.subplots(1, 2)
    for n, arm in enumerate(found.arms.values()):
        draw_arm(left, n, arm, LINES[n])
        values = [mean_at(arm.sweep, rate) for rate in found.rates]
        right.plot(found.rates, values, "o-", color=LINES[n], markersize=4)
    left.set(yticks=range(len(found.arms)), yticklabels=list(found.arms), ylim=(len(found.arms) - 0.5, -0.5))
    left.set(xlabel="held-out pictures right")
    left.set_title(f"each at its own rate, {len(found.seeds)} seeds, 95 % interval", loc="left")
    least, most = left.get_xlim()
    left.set_xlim(max(0.0, least), min(1.0, most))
    right.set(xscale="log", xlabel="learning rate")
    right.set_xticks(found.rates, [f"{rate:g}" for rate in found.rates])
    right.minorticks_off()
    right.set_title("the sweep, one seed, in the same colours", loc="left")
    return figure
