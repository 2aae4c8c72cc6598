"""Lab `blocks`: accuracy and time of a training step with more blocks."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import torch

from vitrail.experiment.study import Study, study
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.datasets import arm_recipe, describe_dataset, load_dataset, plain_settings
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import (
    NO_DIFFERENCE,
    Verdict,
    compare_arms,
    confirming,
    exceeds,
    gain,
    percent_interval,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "blocks"
TITLE = "to scale, add more blocks"
NOTE = '003 "How to scale?"'
CLAIM = "How to scale? Just add more blocks..."
ACCEPTS = "labeled images"

WIDTH = 32  # the width at which blocks are added
_BATCH = 64


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    depths, epochs = ([1, 2, 4, 8, 16], 16) if full else ([1, 4], 1)
    images = load_dataset(data) if full else load_dataset(data, 256, 256)
    fields = {"width": WIDTH, "heads": 2}
    arms = {shape_name(depth): {"model": {"depth": depth, **fields}} for depth in depths}
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

    deep, shallow = (result.arms[shape_name(depth)].scores for depth in (depths[-1], depths[0]))
    depth_gain = compare_arms(deep, shallow, len(images.eval_split))
    return LabResult(
        number=100 * depth_gain.mean,
        unit=f"percentage points of accuracy, {depths[-1]} blocks minus {depths[0]}",
        n=depth_gain.n,
        setting=f"{describe_dataset(images)}, {epochs} epochs, width {WIDTH}, each depth at its own best "
        "learning "
        "rate.",
        figure=draw(depths, result, step_seconds),
        interval=percent_interval(depth_gain),
        numbers={
            "accuracy": {
                name: {**arm.numbers(), "parameters": arm.parameters} for name, arm in result.arms.items()
            },
            "seconds per step": step_seconds,
            "depths": depths,
            "epochs": epochs,
            "images": len(images.train),
            "held out": len(images.eval_split),
        },
        warnings=result.notes,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Accuracy must grow with the number of blocks, over all of them and from the fewest to the most.

    Whether the same parameters do more as width is no part of the claim.
    """
    depths, where = numbers["depths"], f"with {numbers['images']:,} images and {numbers['epochs']} epochs"
    scores = [numbers["accuracy"][shape_name(depth)]["scores"] for depth in depths]
    by_seed = zip(*(confirming(of_depth) for of_depth in scores), strict=True)
    doublings = [math.log2(depth) for depth in depths]
    slopes = [100 * linear_regression(doublings, by_depth).slope for by_depth in by_seed]
    ends = compare_arms(scores[-1], scores[0], numbers["held out"])
    return Verdict(
        [
            exceeds(
                f"each doubling of the blocks raises accuracy {where}",
                slopes,
                0,
                NO_DIFFERENCE,
                form="+.1f",
                unit=" points",
            ),
            gain(f"{depths[-1]} blocks are better than {depths[0]} {where}", ends),
        ]
    )


def shape_name(depth: int) -> str:
    """Blocks x width."""
    return f"{depth} x {WIDTH}"


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


@styled
def draw(depths: Sequence[int], result: Study, step_seconds: Mapping[str, float]) -> Figure:
    """Accuracy and time of a step by number of blocks."""
    figure = new_figure(7.2, 2.8)
    left, right = figure.subplots(1, 2)
    for depth in depths:
        if (interval := result.arms[shape_name(depth)].interval) is not None:
            left.plot([depth, depth], interval, color=LINES[0], linewidth=2, alpha=0.5)
    left.plot(depths, [result.arms[shape_name(depth)].mean for depth in depths], "o-", color=LINES[0])
    left.set(title="held-out accuracy, 95 % interval")
    right.plot(depths, [1000 * step_seconds[shape_name(depth)] for depth in depths], "o-", color=LINES[1])
    right.set(title="milliseconds per training step", ylim=(0, None))
    for axis in (left, right):
        axis.set(xscale="log", xlabel="blocks")
        axis.set_xticks(depths, [str(depth) for depth in depths])
        axis.minorticks_off()
    return figure
