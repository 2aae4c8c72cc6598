"""Lab `blocks`: accuracy with more blocks, compared with the same parameters spent on width."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import torch

from vitrail.experiment.study import Difference, Study, study
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.datasets import arm_recipe, describe_dataset, load_dataset, plain_settings
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Verdict, compare_arms, confirming, decide, format_points, gain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "blocks"
TITLE = "to scale, add more blocks"
NOTE = '003 "How to scale?"'
CLAIM = "A transformer is scaled by adding more blocks."
ACCEPTS = "labeled images"

WIDTH = 32  # the width at which blocks are added
_HEAD_WIDTH = 16  # wider models get more heads of the same width
# By number of blocks of width WIDTH: (blocks, width) with about as many parameters, 12 width^2 per block.
WIDER_SHAPES = {4: [(1, 64)], 16: [(4, 64), (1, 128)]}
_BATCH = 64
_TICKS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)  # milliseconds


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    depths, epochs = ([1, 2, 4, 8, 16], 16) if full else ([1, 4], 1)
    images = load_dataset(data) if full else load_dataset(data, 256, 256)
    wider = {depth: shapes for depth, shapes in WIDER_SHAPES.items() if depth in depths}
    shapes = [(depth, WIDTH) for depth in depths] + list(chain.from_iterable(wider.values()))
    arms = {shape_name(shape): {"model": shape_fields(shape)} for shape in shapes}
    shared = plain_settings(images, epochs)
    result = study(
        images,
        arms=arms,
        out=out / "runs",
        seeds=13 if full else 2,
        lrs=[1e-3, 3e-3, 1e-2, 3e-2, 1e-1] if full else [2e-3],
        processes=process_count(size),
        batch=_BATCH,
        **shared,
    )
    shutil.rmtree(result.out)
    step_seconds = {name: _measure_step_seconds(images, shared, arm) for name, arm in arms.items()}

    def compare(first: tuple[int, int], second: tuple[int, int]) -> Difference:
        scores = [result.arms[shape_name(shape)].scores for shape in (first, second)]
        return compare_arms(scores[0], scores[1], len(images.eval_split))

    width_differences = {
        f"{shape_name((depth, WIDTH))} minus {shape_name(shape)}": compare((depth, WIDTH), shape)
        for depth, alternatives in wider.items()
        for shape in alternatives
    }
    depth_gain = compare((depths[-1], WIDTH), (depths[0], WIDTH))
    return LabResult(
        number=100 * depth_gain.mean,
        unit=f"percentage points of accuracy, {depths[-1]} blocks minus {depths[0]}",
        n=depth_gain.n,
        sentence=summarize(images, epochs, depths, result, step_seconds, width_differences),
        figure=draw(depths, wider, result, step_seconds),
        interval=None
        if depth_gain.interval is None
        else (100 * depth_gain.interval[0], 100 * depth_gain.interval[1]),
        numbers={
            "accuracy": {
                name: {**arm.numbers(), "parameters": arm.parameters} for name, arm in result.arms.items()
            },
            "seconds per step": step_seconds,
            "depths": depths,
            "images": len(images.train),
            "held out": len(images.eval_split),
        },
        warnings=result.notes,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Accuracy must grow with the number of blocks, over all of them and from the fewest to the most.

    Whether the same parameters do more as width is no part of the claim.
    """
    depths, where = numbers["depths"], f"with {numbers['images']:,} images"
    scores = [numbers["accuracy"][shape_name((depth, WIDTH))]["scores"] for depth in depths]
    by_seed = zip(*(confirming(of_depth) for of_depth in scores), strict=True)
    doublings = [math.log2(depth) for depth in depths]
    slopes = [linear_regression(doublings, by_depth).slope for by_depth in by_seed]
    trend = Difference.of(slopes, [0.0] * len(slopes))
    ends = compare_arms(scores[-1], scores[0], numbers["held out"])
    return decide(
        [
            gain(f"each doubling of the blocks raises accuracy {where}", trend),
            gain(f"{depths[-1]} blocks are better than {depths[0]} {where}", ends),
        ]
    )


# ---- shapes and timing ----------------------------------------------------------------------


def shape_name(shape: tuple[int, int]) -> str:
    """Blocks x width."""
    return f"{shape[0]} x {shape[1]}"


def shape_fields(shape: tuple[int, int]) -> dict[str, int]:
    depth, width = shape
    return {"depth": depth, "width": width, "heads": width // _HEAD_WIDTH}


def _measure_step_seconds(data: Dataset, shared: Mapping[str, Any], arm: Mapping[str, Any]) -> float:
    """Forward and backward pass of one batch on one thread; the fastest of several."""
    model = ViT(arm_recipe(data, shared, arm).model)
    images = torch.rand(_BATCH, *model.config.input_shape)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        model(images).square().mean().backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# ---- summary and figure ---------------------------------------------------------------------


def summarize(
    data: Dataset,
    epochs: int,
    depths: Sequence[int],
    result: Study,
    step_seconds: Mapping[str, float],
    width_differences: Mapping[str, Difference],
) -> str:
    depth_names = {shape_name((depth, WIDTH)) for depth in depths}
    scores = ", ".join(f"{name} {arm.mean:.1%}" for name, arm in result.arms.items() if name in depth_names)
    wider = ", ".join(
        f"{name} {arm.mean:.1%} in {1000 * step_seconds[name]:.0f} ms"
        for name, arm in result.arms.items()
        if name not in depth_names
    )
    differences = "; ".join(f"{name} {format_points(one)}" for name, one in width_differences.items())
    shallow, deep = shape_name((depths[0], WIDTH)), shape_name((depths[-1], WIDTH))
    return (
        f"Accuracy by blocks x width on {describe_dataset(data)}, {epochs} epoch{'s' * (epochs > 1)}, each "
        f"arm at its own best learning rate, {result.arms[shallow].n} seeds: {scores}. A training step with "
        f"{_BATCH} images takes {1000 * step_seconds[shallow]:.0f} ms at depth {depths[0]} and "
        f"{1000 * step_seconds[deep]:.0f} ms at depth {depths[-1]}. With the same parameters spent on width: "
        f"{wider}. With more blocks instead of more width, without the seed that chose the learning rates: "
        f"{differences}."
    )


@styled
def draw(
    depths: Sequence[int],
    wider: Mapping[int, Sequence[tuple[int, int]]],
    result: Study,
    step_seconds: Mapping[str, float],
) -> Figure:
    """Accuracy and time of a step by number of parameters, for more blocks and for more width."""
    figure = new_figure(7.2, 3.3)
    left, right = figure.subplots(1, 2)
    groups = {
        "more blocks": ([(depth, WIDTH) for depth in depths], "o-"),
        "more width": (list(chain.from_iterable(wider.values())), "s"),
    }
    for (label, (shapes, marker)), color in zip(groups.items(), LINES, strict=False):
        is_wide = label == "more width"
        arms = [result.arms[shape_name(shape)] for shape in shapes]
        count = [
            arm.parameters * (1.08 if is_wide else 1) for arm in arms
        ]  # offset, so that points do not overlap
        times = [1000 * step_seconds[arm.name] for arm in arms]
        left.plot(count, [arm.mean for arm in arms], marker, color=color, label=label, markersize=5)
        right.plot(count, times, marker, color=color, markersize=5)
        for arm, x, milliseconds in zip(arms, count, times, strict=True):
            if arm.interval is not None:
                left.plot([x, x], arm.interval, color=color, linewidth=1.5, alpha=0.5)
            style: dict[str, Any] = {
                "xytext": (6, -8) if is_wide else (-5, 3),
                "ha": "left" if is_wide else "right",
            }
            label_text = {"text": arm.name, "textcoords": "offset points", "fontsize": 7, "color": color}
            right.annotate(xy=(x, milliseconds), **style, **label_text)
            if is_wide:  # of two models of about the same size, the better one's label goes above
                means = [near.mean for near, size in zip(arms, count, strict=True) if 0.9 < size / x < 1.1]
                style["xytext"] = (6, 2 if arm.mean > min(means) else -8)
                left.annotate(xy=(x, arm.mean), **style, **label_text)
    figure.legend(loc="outside lower center", ncols=2)
    left.set(xscale="log", xlabel="parameters", title="held-out accuracy, 95 % confidence interval")
    left.margins(x=0.15)
    right.set(xscale="log", yscale="log", xlabel="parameters", title="milliseconds per step, blocks x width")
    right.margins(x=0.25, y=0.15)
    right.set_yticks(
        [n for n in _TICKS if min(step_seconds.values()) < n / 1000 < max(step_seconds.values())]
    )
    right.yaxis.set_major_formatter("{x:g}")
    counts = [result.arms[shape_name((depth, WIDTH))].parameters for depth in depths]
    for axis in (left, right):
        axis.set_xticks(counts, [f"{count / 1000:.0f}k" for count in counts])
        axis.minorticks_off()
    return figure
