"""Lab `blocks`: whether a transformer gets better by adding blocks, and what else those could buy."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.data.sources import Dataset
from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.given import described, opened, plainly, recipe_of
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import Difference, Study, study
from vitrail.labs.trial import processes_for
from vitrail.model import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "blocks"
NOTE = '003 "How to scale?"'
CLAIM = "A transformer is scaled by adding more blocks."
TAKES = "labelled pictures"

D = 32  # the width at which blocks are added
HEAD = 16  # d: wider models get more heads, not wider ones
# For a number of blocks of width D, others with as many parameters: a block has about 12 D^2.
INSTEAD = {4: [(1, 64)], 16: [(4, 64), (1, 128)]}
BATCH = 64
TICKS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)  # milliseconds


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    full = size == "full"
    depths, epochs = ([1, 2, 4, 8, 16], 16) if full else ([1, 4], 1)
    pictures = opened(data) if full else opened(data, 256, 256)
    wide = {many: others for many, others in INSTEAD.items() if many in depths}
    shapes = [(depth, D) for depth in depths] + [shape for others in wide.values() for shape in others]
    arms = {called(shape): {"model": model_of(shape)} for shape in shapes}
    shared = plainly(pictures, epochs)
    found = study(
        pictures,
        arms=arms,
        out=place / "runs",
        seeds=4 if full else 2,
        rates=[1e-3, 3e-3, 1e-2, 3e-2] if full else [2e-3],
        processes=processes_for(size),
        batch=BATCH,
        **shared,
    )
    shutil.rmtree(found.out)
    steps = {name: seconds_for_a_step(pictures, shared, arm) for name, arm in arms.items()}
    pairs = {
        f"{many} x {D} more than {called(shape)}": found.compare(called((many, D)), called(shape))
        for many, others in wide.items()
        for shape in others
    }
    answer = found.compare(called((depths[-1], D)), called((depths[0], D)))
    return Result(
        number=100 * answer.mean,
        unit=f"points of accuracy, {depths[-1]} blocks more than {depths[0]}",
        n=answer.n,
        verdict=judge(depths, {pair: compared(found, *pair) for pair in deeper(depths)}, pairs),
        sentence=sentence(pictures, epochs, depths, found, steps),
        figure=draw(depths, wide, found, steps),
        interval=None if answer.interval is None else (100 * answer.interval[0], 100 * answer.interval[1]),
        numbers={
            "accuracy": {
                name: {
                    "mean": arm.mean,
                    "interval": arm.interval,
                    "rate": arm.rate,
                    "scores": arm.scores,
                    "parameters": arm.parameters,
                }
                for name, arm in found.arms.items()
            },
            "seconds for a step": steps,
            "as many parameters": {name: vars(one) for name, one in pairs.items()},
            "notes": found.notes,
        },
    )


def judge(
    depths: Sequence[int], gains: Mapping[tuple[int, int], Difference], width: Mapping[str, Difference]
) -> Verdict:
    """Enough is the fewest blocks than which no larger number is clearly better.

    Args:
        gains: for (more, fewer) blocks, how much better more are.
        width: how much better blocks are than the same parameters spent on width.
    """

    def beaten(depth: int) -> bool:
        return any(one.clear and one.mean > 0 for (_, fewer), one in gains.items() if fewer == depth)

    enough = next(depth for depth in depths if not beaten(depth))
    said = spent(width)
    if enough == depths[0]:
        return Verdict("does not hold", f": more than {enough} brings no clear gain here{said}")
    if enough == depths[-1] and not said:
        return Verdict("holds")
    limit = f"there are fewer than {enough}: beyond, no gain is clear at this scale"
    if enough == depths[-1]:
        limit = f"width is not forgotten, though {enough} blocks are clearly better than fewer"
    lost = [more for more, fewer in gains if fewer == enough and clearly_worse(gains[more, fewer])]
    if lost:
        limit += f", and {' and '.join(map(str, lost))} are clearly worse"
    return Verdict("holds if", limit + said)


def clearly_worse(gain: Difference) -> bool:
    return gain.clear and gain.mean < 0


def spent(width: Mapping[str, Difference]) -> str:
    """Where width would have been the better buy, in words."""
    worse = [name.partition(" more than ") for name, one in width.items() if clearly_worse(one)]
    return "".join(f"; {other} (blocks x width) is clearly better than {many}" for many, _, other in worse)


# ---- parts ----------------------------------------------------------------------------------


def called(shape: tuple[int, int]) -> str:
    """Blocks x width."""
    return f"{shape[0]} x {shape[1]}"


def model_of(shape: tuple[int, int]) -> dict[str, int]:
    depth, width = shape
    return {"depth": depth, "width": width, "heads": width // HEAD}


def deeper(depths: Sequence[int]) -> list[tuple[int, int]]:
    return [(more, fewer) for fewer in depths for more in depths if more > fewer]


def compared(found: Study, more: int, fewer: int) -> Difference:
    return found.compare(called((more, D)), called((fewer, D)))


def seconds_for_a_step(data: Dataset, shared: Mapping[str, Any], arm: Mapping[str, Any]) -> float:
    """Forward and backward for one batch, one thread: the fastest of several, as other work only adds."""
    model = ViT(recipe_of(data, shared, arm).model)
    images = torch.rand(BATCH, *model.config.input_shape)
    clocks = []
    for _ in range(8):
        start = time.perf_counter()
        model(images).square().mean().backward()
        clocks.append(time.perf_counter() - start)
    return min(clocks)


# ---- words and picture ----------------------------------------------------------------------


def sentence(
    data: Dataset, epochs: int, depths: Sequence[int], found: Study, steps: Mapping[str, float]
) -> str:
    ours = {called((depth, D)) for depth in depths}
    scores = ", ".join(f"{name} {arm.mean:.1%}" for name, arm in found.arms.items() if name in ours)
    others = ", ".join(
        f"{name} {arm.mean:.1%} in {1000 * steps[name]:.0f} ms"
        for name, arm in found.arms.items()
        if name not in ours
    )
    few, many = called((depths[0], D)), called((depths[-1], D))
    return (
        f"Blocks x width, {described(data)}, {epochs} epoch{'s' * (epochs > 1)}, each at its own best rate, "
        f"{found.arms[few].n} seeds: {scores}. A step of {BATCH} pictures takes {1000 * steps[few]:.0f} ms "
        f"with {depths[0]} and {1000 * steps[many]:.0f} ms with {depths[-1]}. As many parameters spent on "
        f"width: {others}."
    )


@in_our_style
def draw(
    depths: Sequence[int],
    wide: Mapping[int, Sequence[tuple[int, int]]],
    found: Study,
    steps: Mapping[str, float],
) -> Figure:
    """Accuracy by parameters and time by parameters, for blocks and for width."""
    figure = canvas(7.2, 3.3)
    left, right = figure.subplots(1, 2)
    groups = {
        "more blocks": ([(depth, D) for depth in depths], "o-"),
        "wider instead": ([shape for others in wide.values() for shape in others], "s"),
    }
    for (label, (shapes, mark)), colour in zip(groups.items(), LINES, strict=False):
        wider = label == "wider instead"
        arms = [found.arms[called(shape)] for shape in shapes]
        count = [arm.parameters * (1.08 if wider else 1) for arm in arms]  # a little aside, to be seen
        times = [1000 * steps[arm.name] for arm in arms]
        left.plot(count, [arm.mean for arm in arms], mark, color=colour, label=label, markersize=5)
        right.plot(count, times, mark, color=colour, markersize=5)
        for arm, x, time_of_step in zip(arms, count, times, strict=True):
            if arm.interval is not None:
                left.plot([x, x], arm.interval, color=colour, linewidth=1.5, alpha=0.5)
            place: dict[str, Any] = {
                "xytext": (6, -8) if wider else (-5, 3),
                "ha": "left" if wider else "right",
            }
            name = {"text": arm.name, "textcoords": "offset points", "fontsize": 7, "color": colour}
            right.annotate(xy=(x, time_of_step), **place, **name)
            if wider:  # of two that are as large, the better one's name goes above
                others = [one.mean for one, there in zip(arms, count, strict=True) if 0.9 < there / x < 1.1]
                place["xytext"] = (6, 2 if arm.mean > min(others) else -8)
                left.annotate(xy=(x, arm.mean), **place, **name)
    figure.legend(loc="outside lower center", ncols=2)
    left.set(xscale="log", xlabel="parameters", title="held-out pictures right, 95 % interval")
    left.margins(x=0.15)
    right.set(
        xscale="log", yscale="log", xlabel="parameters", title="milliseconds for a step, blocks x width"
    )
    right.margins(x=0.25, y=0.15)
    right.set_yticks([n for n in TICKS if min(steps.values()) < n / 1000 < max(steps.values())])
    right.yaxis.set_major_formatter("{x:g}")
    counts = [found.arms[called((depth, D))].parameters for depth in depths]
    for axis in (left, right):
        axis.set_xticks(counts, [f"{count / 1000:.0f}k" for count in counts])
        axis.minorticks_off()
    return figure
