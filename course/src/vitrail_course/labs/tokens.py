"""Lab `tokens`: an unchanged ViT with pixels, patches, rows or columns of an image as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import InputError
from vitrail.experiment.interval import fraction_interval
from vitrail.experiment.study import Arm, draw_arm, study
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.datasets import describe_dataset, input_fields, load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Verdict, confirming, reaches

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NAME = "tokens"
TITLE = "anything can become tokens"
NOTE = '003 "Different input domains" and "Tokens"'
CLAIM = (
    "Just patch it, encode it and throw it in a transformer... [Tokens of an] image: pixel, image patch, "
    "row/column of pixels."
)
ACCEPTS = "labeled images in arrays"

_CHANCE_SOURCE = "five times the accuracy of guessing one of ten classes"
_MIN_ACCURACY = 0.5


def token_sizes(sides: tuple[int, int], patch: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """(height, width) in pixels of each kind of tokens."""
    return {"patches": patch, "columns": (sides[0], 1), "rows": (1, sides[1]), "pixels": (1, 1)}


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    images = load_dataset(data, *((2_000, 400) if full else (200, 60)))
    if images.train.images is None:
        raise InputError("This lab needs images as arrays (IDX files or a .npz); pass other data.")
    fields, epochs = input_fields(images), 20 if full else 1
    sizes = token_sizes(fields["size"], fields["patch"])
    width, depth = (64, 3) if full else (16, 1)
    with TemporaryDirectory(prefix="runs-", dir=out) as runs:
        result = study(
            images,
            arms={name: {"model": {"patch": patch}} for name, patch in sizes.items()},
            out=runs,
            seeds=4 if full else 2,
            lrs=[1e-3, 2e-3, 4e-3, 8e-3] if full else [3e-3],
            recipe="small",
            processes=process_count(size),
            epochs=epochs,
            evaluate_every=epochs,
            save_every=epochs,
            ema=0.98,
            model={**fields, "width": width, "depth": depth, "heads": 4},
        )
    counted = confirming(result.arms["patches"].scores)
    return LabResult(
        number=fmean(counted),
        unit="accuracy on held-out images with square patches",
        n=len(counted),
        setting=f"A ViT of width {width} and depth {depth} on {describe_dataset(images)}, {epochs} epochs.",
        figure=draw(images.train.images[0].mean(axis=2), sizes, result.arms),
        interval=fraction_interval(counted, len(images.eval_split)),
        numbers={
            "tokens": {name: arm.numbers() for name, arm in result.arms.items()},
            "held out": len(images.eval_split),
        },
        warnings=result.notes,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """A model must learn from each kind of tokens."""
    return Verdict(
        [
            reaches(
                f"a model learns with {name} as tokens",
                confirming(arm["scores"]),
                numbers["held out"],
                _MIN_ACCURACY,
                _CHANCE_SOURCE,
            )
            for name, arm in numbers["tokens"].items()
        ]
    )


@styled
def draw(image: NDArray[Any], sizes: Mapping[str, tuple[int, int]], arms: Mapping[str, Arm]) -> Figure:
    """An image with each kind of tokens; below, their accuracies."""
    figure = new_figure(7.2, 4.0)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.2, 1))[:, 0]
    for axis, (name, (height, width)) in zip(above.subplots(1, len(sizes)), sizes.items(), strict=True):
        H, W = image.shape
        axis.imshow(image, cmap="gray")
        for row in range(height, H, height):
            axis.axhline(row - 0.5, color=LINES[1], linewidth=1)
        for column in range(width, W, width):
            axis.axvline(column - 0.5, color=LINES[1], linewidth=1)
        axis.set(xticks=[], yticks=[], title=f"{(H // height) * (W // width)} {name}")
    axis = below.subplots()
    for n, (arm, color) in enumerate(zip(arms.values(), LINES, strict=False)):
        draw_arm(axis, n, arm, color)
    axis.set(yticks=range(len(arms)), yticklabels=list(arms), xlabel="held-out accuracy")
    axis.invert_yaxis()
    return figure
