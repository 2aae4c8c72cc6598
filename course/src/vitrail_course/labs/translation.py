"""Lab `translation`: the inductive bias of convolutions, and when it helps.

Compares a CNN, a ViT and a hybrid (a ViT with a stem of two convolutions) with about the same number of
parameters: first, how their features change when the image is shifted; then, their accuracy with few images
and few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import Difference, edge_note
from vitrail.experiment.trial import ProcessPool
from vitrail.images.formats.sources import Dataset, Split
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.datasets import TINY_SIDE, describe_dataset, load_dataset, stratified_subset
from vitrail_course.labs.equivariance import (
    SHIFTED_ARMS,
    STRIDE,
    build_random,
    builders_for,
    feature_changes,
    influenced_pixels,
)
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.lr_sweep import ClassifierRun, SweepResult, sweep_learning_rates
from vitrail_course.labs.verdict import (
    Statement,
    Verdict,
    compare_arms,
    confirming,
    decide,
    equal_within,
    fact,
    format_interval,
    gain,
    is_above,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "translation"
TITLE = "few images: CNN, many: ViT"
NOTE = '002 "Convolutional Neural Networks", "Notes", "Combining vision transformers and convolution?"'
CLAIM = (
    "CNNs are equivariant to translation and local. That helps with small data sets, but a transformer "
    "learns the structure from enough data. Hybrids are better with less training; the advantage vanishes "
    "with more."
)
ACCEPTS = "labeled images in arrays"

_Pair = tuple[list[float], list[float]]  # the scores of two arms, by seed

ARMS = ("ViT", "CNN", "hybrid")
_FRACTIONS = (0.01, 0.1, 1.0)  # of the training images
_STEPS = {"few": 40, "more": 130, "many": 400, "most": 1_200}  # for up to a few thousand images
EQUIVARIANCE_CONDITION = "the CNN has no pooling or the shift is a multiple of its stride"
_MARGIN = 0.01  # of accuracy, within which two models count as equal
_LEARNED = 0.5  # accuracy below which a model has not learned enough for a comparison
_MAX_UNCHANGED, _MIN_CHANGED = 1e-3, 0.05  # feature changes, as a fraction of the distance between two images


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    images = load_dataset(data) if full else load_dataset(data, 64, 64)
    held_out = load_inputs(images.eval_split)
    builders = builders_for(held_out[0], len(images.classes))
    lrs, seeds = ([3e-3, 3e-4, 1e-3, 1e-2, 3e-2], 5) if full else ([3e-3], 2)
    step_factor = max(1, len(images.train) // 2_000)  # so that the number of epochs stays about the same
    steps = {name: step_factor * count for name, count in _STEPS.items()} if full else {"few": 3, "many": 8}
    fractions = _FRACTIONS if full else _FRACTIONS[1:]

    def train_arms(
        names: Sequence[str], fraction: float, duration: str, weights_only: bool = False
    ) -> dict[str, SweepResult]:
        """Train every arm at its best learning rate; if only weights are needed, once at the first one."""
        count = max(len(images.classes), round(fraction * len(images.train)))
        subsets = [load_inputs(stratified_subset(images.train, count, seed)) for seed in range(seeds)]

        def plan(name: str, lr: float, seed: int) -> ClassifierRun:
            return ClassifierRun(builders[name], *subsets[seed], held_out, steps[duration], lr, seed)

        if weights_only:
            return sweep_learning_rates(plan, names, lrs[:1], 1, pool)
        return sweep_learning_rates(plan, names, lrs, seeds, pool)

    with ProcessPool(process_count(size)) as pool:
        by_fraction = {fraction: train_arms(ARMS, fraction, "many") for fraction in fractions}
        by_steps = {
            duration: by_fraction[1.0] if duration == "many" else train_arms(ARMS, 1.0, duration)
            for duration in steps
        }
        others = train_arms(["CNN without pooling", "ViT without positions"], 1.0, "many", weights_only=True)
    weights = {name: result.state for name, result in (by_fraction[1.0] | others).items()}
    feature_change = feature_changes(builders, weights, held_out[0][:32])
    influenced = {
        name: influenced_pixels(build_random(builders[name]), held_out[0][:8]) for name in SHIFTED_ARMS
    }
    few = by_fraction[fractions[0]]
    cnn_gain = compare_arms(few["CNN"].scores, few["ViT"].scores, len(held_out[1]))
    return LabResult(
        number=100 * cnn_gain.mean,
        unit=f"percentage points of accuracy, CNN minus ViT with {fractions[0]:.0%} of the images",
        n=cnn_gain.n,
        sentence=summarize(
            images, by_fraction, by_steps, feature_change, influenced, steps, held_out[0].shape[-1]
        ),
        figure=draw(feature_change, by_fraction, by_steps, steps),
        interval=cnn_gain.interval and (100 * cnn_gain.interval[0], 100 * cnn_gain.interval[1]),
        numbers={
            "parameters": {name: _parameter_count(build) for name, build in builders.items()},
            "change when shifted": feature_change,
            "pixels influenced by one pixel": influenced,
            "accuracy by fraction": {
                str(fraction): _arm_numbers(arms) for fraction, arms in by_fraction.items()
            },
            "accuracy by steps": {
                str(steps[duration]): _arm_numbers(arms) for duration, arms in by_steps.items()
            },
            "held out": len(held_out[1]),
        },
        warnings=[
            *_edge_notes(
                {f"{fraction:.0%} of the images": arms for fraction, arms in by_fraction.items()}, lrs
            ),
            *_edge_notes({f"{steps[d]} steps": arms for d, arms in by_steps.items() if d != "many"}, lrs),
        ],
    )


# ---- verdict --------------------------------------------------------------------------------


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Every statement of the claim, each from all of its points."""
    images, by_fraction, by_steps = (
        numbers[key] for key in ("held out", "accuracy by fraction", "accuracy by steps")
    )
    few, *_, all_images = (_paired(arms, "CNN", "ViT") for arms in by_fraction.values())
    learned = [
        steps
        for steps, arms in by_steps.items()
        if max(arms["hybrid"]["mean"], arms["ViT"]["mean"]) > _LEARNED
    ]
    statements = [
        _equivariance(numbers["change when shifted"]),
        _locality(numbers["pixels influenced by one pixel"]),
        gain(
            f"a CNN is better than a ViT with {min(map(float, by_fraction)):.0%} of the images",
            compare_arms(*few, images),
        ),
        _shrinks_with_all(few, all_images, images),
        _vanished(
            "a ViT learns the structure: with all of these images it is as accurate as a CNN",
            compare_arms(*all_images, images),
            "more images were",
        ),
    ]
    if len(learned) < 2:
        return decide([*statements, Statement("hybrids are better with less training", None, "not learned")])
    least, most = learned[0], learned[-1]
    hybrid = {steps: _paired(by_steps[steps], "hybrid", "ViT") for steps in learned}
    by_length = f"after {least} steps, the fewest after which one of the two is above {_LEARNED:.0%}"
    return decide(
        [
            *statements,
            gain(f"a hybrid is better than a ViT {by_length}", compare_arms(*hybrid[least], images)),
            gain(
                f"a hybrid is better than a CNN after {least} steps",
                compare_arms(*_paired(by_steps[least], "hybrid", "CNN"), images),
            ),
            _shrinks(
                f"the hybrid's gain over the ViT shrinks from {least} to {most} steps",
                hybrid[least],
                hybrid[most],
                images,
            ),
            _vanished(
                f"the hybrid's gain over the ViT has vanished after {most} steps",
                compare_arms(*hybrid[most], images),
                "longer training was",
            ),
        ]
    )


def _vanished(text: str, gained: Difference, untried: str) -> Statement:
    """The statement that a gain has vanished with as much as was tried; with more it may."""
    found = equal_within(text, gained, _MARGIN)
    return found if found.true else replace(found, evidence=f"{found.evidence}; {untried} not tried")


def _equivariance(feature_change: Mapping[str, Mapping[str, float]]) -> Statement:
    """The statement that CNNs are equivariant to translation."""
    without_pooling, with_pooling, vit = (
        feature_change[f"{name}, trained"] for name in ("CNN without pooling", "CNN", "ViT")
    )
    equivariant = without_pooling["1 pixel"] < _MAX_UNCHANGED and vit["1 pixel"] > _MIN_CHANGED
    condition = EQUIVARIANCE_CONDITION if with_pooling["1 pixel"] > _MAX_UNCHANGED else ""
    evidence = (
        f"features of images shifted by a pixel change by {without_pooling['1 pixel']:.1g}, threshold "
        f"{_MAX_UNCHANGED:g}; {with_pooling['1 pixel']:.2g} with pooling, {vit['1 pixel']:.2g} in a ViT"
    )
    return fact("CNNs are equivariant to translation", equivariant, evidence, condition)


def _locality(influenced: Mapping[str, int]) -> Statement:
    """The statement that CNNs are local: one pixel influences fewer pixels of the features than in a ViT."""
    cnn, vit = influenced["CNN without pooling"], influenced["ViT"]
    pooled = influenced["CNN"]
    evidence = (
        f"one pixel influences {cnn} pixels in a row without pooling, threshold: the {vit} of a ViT; "
        f"{pooled} with pooling"
    )
    return fact("CNNs are local", cnn < vit, evidence, "" if pooled < vit else "the CNN has no pooling")


def _shrinks_with_all(few: _Pair, all_images: _Pair, images: int) -> Statement:
    """The statement that the CNN's gain over the ViT shrinks with all images."""
    found = _shrinks("the CNN's gain over the ViT shrinks with all images", few, all_images, images)
    cnn, vit = (fmean(confirming(scores)) for scores in all_images)
    ceiling = f"the CNN, at {cnn:.1%}, could not gain more than {1 - vit:.1%} over the ViT"
    return replace(found, evidence=f"{found.evidence}; with all images {ceiling}")


def _shrinks(text: str, early: _Pair, late: _Pair, images: int) -> Statement:
    """The statement that the gain of an arm over another shrinks, in points and in log-odds.

    Points alone shrink at the ceiling: of two arms above 99 % none can be a point better. So the statement is
    clear only if both agree.
    """
    points = gain(text, _shrinkage(early, late, images))
    gains = [
        [log_odds(a, images) - log_odds(b, images) for a, b in zip(*map(confirming, pair), strict=True)]
        for pair in (early, late)
    ]
    shrinkage = [a - b for a, b in zip(*gains, strict=True)]
    bounds = confidence_interval(shrinkage)
    agree = is_above(bounds, 0) == points.true
    evidence = (
        f"{points.evidence}; in log-odds from {fmean(gains[0]):+.2f} to {fmean(gains[1]):+.2f}, by "
        f"{format_interval(fmean(shrinkage), bounds, '+.2f')}"
    )
    return Statement(text, points.true if agree else None, evidence)


def log_odds(accuracy: float, images: int) -> float:
    """The logarithm of correct over wrong images, with half an image added to both: finite at 0 and 100 %."""
    correct = accuracy * images
    return math.log((correct + 0.5) / (images - correct + 0.5))


def _paired(arms: Mapping[str, Any], first: str, second: str) -> _Pair:
    """The scores of two arms, by seed."""
    return arms[first]["scores"], arms[second]["scores"]


def _shrinkage(early: _Pair, late: _Pair, images: int) -> Difference:
    """The early difference between two arms minus the late one, paired by seed."""
    gains = [[a - b for a, b in zip(*scores, strict=True)] for scores in (early, late)]
    return compare_arms(gains[0], gains[1], images)


def _edge_notes(results: Mapping[str, Mapping[str, SweepResult]], lrs: Sequence[float]) -> list[str]:
    """Warnings of learning rates at the edge of their sweep."""
    return [
        warning
        for where, arms in results.items()
        for name, result in arms.items()
        if (warning := edge_note(f"the {name} with {where}", result.lr, lrs))
    ]


def _arm_numbers(arms: Mapping[str, SweepResult]) -> dict[str, Any]:
    return {
        name: {"mean": result.mean, "lr": result.lr, "scores": result.scores, "sweep": result.sweep}
        for name, result in arms.items()
    }


# ---- data and models ------------------------------------------------------------------------


def load_inputs(split: Split) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) from -1 to 1, and their labels.

    Tiny images are upsampled by 2, so that a stride of 4 gives more than four tokens; images are cropped to a
    multiple of the stride.
    """
    if split.images is None or split.labels.ndim == 2:
        problem = "image files" if split.images is None else "multi-label images"
        raise InputError(
            f"This lab needs images as arrays (IDX files or a .npz) with one class each, not {problem}; pass "
            "other data, or remove --data."
        )
    images = torch.from_numpy(split.images).permute(0, 3, 1, 2).float() / 127.5 - 1
    if max(images.shape[2:]) < TINY_SIDE:
        images = F.interpolate(images, scale_factor=2)
    H, W = (side - side % STRIDE for side in images.shape[2:])
    return images[:, :, :H, :W].contiguous(), torch.from_numpy(split.labels)


def _parameter_count(build: Callable[[], nn.Module]) -> int:
    return sum(parameter.numel() for parameter in build().parameters())


# ---- summary and figure ---------------------------------------------------------------------


def summarize(
    data: Dataset,
    by_fraction: Mapping[float, Mapping[str, SweepResult]],
    by_steps: Mapping[str, Mapping[str, SweepResult]],
    feature_change: Mapping[str, Mapping[str, float]],
    influenced: Mapping[str, int],
    steps: Mapping[str, int],
    side: int,
) -> str:
    def scores(arms: Mapping[str, SweepResult]) -> str:
        return ", ".join(f"{name} {arms[name].mean:.1%}" for name in ARMS)

    def format_change(name: str) -> str:
        return f"{feature_change[name]['1 pixel']:.2g} and {feature_change[name]['1 patch']:.2g}"

    fractions = "; ".join(
        f"{fraction:.0%} of the images: {scores(arms)}" for fraction, arms in by_fraction.items()
    )
    lengths = "; ".join(
        f"{steps[duration]} steps: {scores(arms)}"
        for duration, arms in by_steps.items()
        if duration != "many"
    )
    n = len(by_steps["many"]["ViT"].scores)
    return (
        "When the image is shifted by a pixel or a patch and the features are shifted back, they change by "
        f"{format_change('CNN without pooling, trained')} of the distance between two images in a CNN "
        f"without pooling, {format_change('CNN, trained')} in a CNN with pooling, "
        f"{format_change('ViT, trained')} in a ViT and {format_change('ViT without positions, trained')} in "
        f"a ViT without positions. One pixel influences {influenced['CNN without pooling']}, "
        f"{influenced['CNN']} and {influenced['ViT']} of {side} pixels in CNNs without and with pooling and "
        f"in a ViT. Accuracy on {describe_dataset(data)}, no augmentation, each arm at its own best learning "
        f"rate, {n} seeds: {fractions} after {steps['many']} steps. With all images, after fewer: {lengths}."
    )


@styled
def draw(
    feature_change: Mapping[str, Mapping[str, float]],
    by_fraction: Mapping[float, Mapping[str, SweepResult]],
    by_steps: Mapping[str, Mapping[str, SweepResult]],
    steps: Mapping[str, int],
) -> Figure:
    figure = new_figure(9.6, 3.2)
    left, center, right = figure.subplots(1, 3, width_ratios=[1.1, 1, 1])
    for n, shift in enumerate(("1 pixel", "1 patch")):
        rows = [row + 0.36 * n for row in range(len(feature_change))]
        left.barh(
            rows, [change[shift] for change in feature_change.values()], 0.34, color=LINES[3 + n], label=shift
        )
    left.set(yticks=[row + 0.18 for row in range(len(feature_change))], yticklabels=list(feature_change))
    left.tick_params(axis="y", labelsize=7)
    left.set(xlabel="1: distance to another image", title="change of features when shifted")
    left.invert_yaxis()
    lines = (
        (center, {100 * fraction: arms for fraction, arms in by_fraction.items()}, "% of the images"),
        (right, {steps[duration]: arms for duration, arms in by_steps.items()}, "steps, with all images"),
    )
    for axis, results, label in lines:
        for name, color in zip(ARMS, LINES, strict=False):
            (line,) = axis.plot(
                list(results), [arms[name].mean for arms in results.values()], "o-", color=color
            )
            line.set_label(name if axis is center else "")  # once in the legend
            for x, arms in results.items():
                scores = arms[name].scores
                axis.plot([x] * len(scores), scores, "o", color=color, alpha=0.3, markersize=3)
        axis.set(xscale="log", xlabel=label, title="held-out accuracy")
        axis.set_xticks(list(results), [f"{x:g}" for x in results])
        axis.minorticks_off()
    figure.legend(loc="outside lower center", ncols=5)
    return figure
