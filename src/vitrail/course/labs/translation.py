"""Lab `translation`: the inductive bias of convolutions, and when it helps.

Compares a CNN, a ViT and a hybrid (a ViT with a stem of two convolutions) with about the same number of
parameters: first, how their features change when the image is shifted; then, their accuracy with few images
and few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.course.labs.datasets import TINY_SIDE, describe_dataset, load_dataset, stratified_subset
from vitrail.course.labs.equivariance import (
    SHIFTED_ARMS,
    STRIDE,
    build_random,
    builders_for,
    feature_changes,
    influenced_pixels,
)
from vitrail.course.labs.lab import LabResult, LabSize, Verdict, process_count
from vitrail.course.labs.lr_sweep import ClassifierRun, SweepResult, sweep_learning_rates
from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError
from vitrail.experiment.study import Difference
from vitrail.experiment.trial import ProcessPool
from vitrail.inspect.canvas import LINES, new_figure, styled

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

ARMS = ("ViT", "CNN", "hybrid")
_FRACTIONS = (0.01, 0.1, 1.0)  # of the training images
_STEPS = {"few": 40, "more": 130, "many": 400}  # for up to a few thousand images
EQUIVARIANCE_CONDITION = "the CNN has no pooling or the shift is a multiple of its stride"
_MAX_UNCHANGED, _MIN_CHANGED = 1e-3, 0.05  # feature changes, as a fraction of the distance between two images


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    images = load_dataset(data) if full else load_dataset(data, 64, 64)
    held_out = load_inputs(images.eval_split)
    builders = builders_for(held_out[0], len(images.classes))
    lrs, seeds = ([3e-3, 1e-3, 1e-2], 4) if full else ([3e-3], 2)
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
        by_steps = {duration: train_arms(ARMS, 1.0, duration) for duration in steps if duration != "many"}
        others = train_arms(["CNN without pooling", "ViT without positions"], 1.0, "many", weights_only=True)
    by_steps["many"] = by_fraction[1.0]
    weights = {name: result.state for name, result in (by_fraction[1.0] | others).items()}
    feature_change = feature_changes(builders, weights, held_out[0][:32])
    influenced = {
        name: influenced_pixels(build_random(builders[name]), held_out[0][:8]) for name in SHIFTED_ARMS
    }
    cnn_gain, hybrid_gain = _differences(by_fraction, "CNN", "ViT"), _differences(by_steps, "hybrid", "ViT")
    hybrid_minus_cnn = _differences(by_steps, "hybrid", "CNN")
    gain = cnn_gain[fractions[0]]
    return LabResult(
        number=100 * gain.mean,
        unit=f"percentage points of accuracy, CNN minus ViT with {fractions[0]:.0%} of the images",
        n=gain.n,
        verdict=decide_verdict(check_statements(feature_change, cnn_gain, hybrid_gain, hybrid_minus_cnn)),
        sentence=summarize(
            images, by_fraction, by_steps, feature_change, influenced, steps, held_out[0].shape[-1]
        ),
        figure=draw(feature_change, by_fraction, by_steps, steps),
        interval=None if gain.interval is None else (100 * gain.interval[0], 100 * gain.interval[1]),
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
            "CNN minus ViT": {str(fraction): vars(difference) for fraction, difference in cnn_gain.items()},
            "hybrid minus ViT": {
                str(steps[duration]): vars(difference) for duration, difference in hybrid_gain.items()
            },
            "hybrid minus CNN": {
                str(steps[duration]): vars(difference) for duration, difference in hybrid_minus_cnn.items()
            },
        },
    )


# ---- verdict --------------------------------------------------------------------------------


def decide_verdict(statements: Mapping[str, tuple[bool, str]]) -> Verdict:
    """Whether all, some or none of the statements hold, with the reasons.

    Args:
        statements: for each statement, whether it holds, and why.
    """
    reasons = "; ".join(f"{name}: {why}" for name, (_, why) in statements.items())
    true_statements = [name for name, (holds, _) in statements.items() if holds]
    if not true_statements:
        return Verdict("does not hold", reasons)
    if len(true_statements) < len(statements):
        verb = "holds" if len(true_statements) == 1 else "hold"
        return Verdict("partly", f"only {' and '.join(true_statements)} {verb} ({reasons})")
    if EQUIVARIANCE_CONDITION in reasons:
        return Verdict("partly", f"only if {EQUIVARIANCE_CONDITION}")
    return Verdict("holds")


def check_statements(
    feature_change: Mapping[str, Mapping[str, float]],
    cnn_gain: Mapping[Any, Difference],
    hybrid_gain: Mapping[Any, Difference],
    hybrid_minus_cnn: Mapping[Any, Difference],
) -> dict[str, tuple[bool, str]]:
    """For each statement of the claim, whether it holds, and why.

    Args:
        feature_change: change of the features by model and shift.
        cnn_gain: accuracy, CNN minus ViT, from the fewest images to all.
        hybrid_gain: accuracy, hybrid minus ViT, from the fewest steps to the most.
        hybrid_minus_cnn: accuracy, hybrid minus CNN, likewise.
    """
    without_pooling, with_pooling, vit = (
        feature_change[f"{name}, trained"] for name in ("CNN without pooling", "CNN", "ViT")
    )
    equivariant = without_pooling["1 pixel"] < _MAX_UNCHANGED and vit["1 pixel"] > _MIN_CHANGED
    reason = "holds" if equivariant else "does not hold"
    if equivariant and with_pooling["1 pixel"] > _MAX_UNCHANGED > with_pooling["1 patch"]:
        reason += f" if {EQUIVARIANCE_CONDITION}"
    hybrid_holds, why = check_fading_gain(hybrid_gain, "with the fewest steps", "with the most")
    first_gain = next(iter(hybrid_minus_cnn.values()))
    return {
        "equivariance": (equivariant, reason),
        "small data": check_fading_gain(cnn_gain, "with the fewest images", "with all"),
        "hybrids": (hybrid_holds, f"{why}, compared with a CNN {100 * first_gain.mean:+.1f} with the fewest"),
    }


def check_fading_gain(gains: Mapping[Any, Difference], first: str, last: str) -> tuple[bool, str]:
    """Whether a gain is clear at first, and smaller or not clear at last."""
    first_gain, *_, last_gain = gains.values()
    is_clear = first_gain.significant and first_gain.mean > 0
    shrinks = not last_gain.significant or last_gain.mean < first_gain.mean
    verdict = "holds" if is_clear and shrinks else "does not hold"
    gains_text = f"{100 * first_gain.mean:+.1f} points {first}, {100 * last_gain.mean:+.1f} {last}"
    return is_clear and shrinks, f"{verdict} ({gains_text})"


def _differences(
    results: Mapping[Any, Mapping[str, SweepResult]], first: str, second: str
) -> dict[Any, Difference]:
    """Accuracy of one arm minus that of another, for every condition."""
    return {key: Difference.of(arms[first].scores, arms[second].scores) for key, arms in results.items()}


def _arm_numbers(arms: Mapping[str, SweepResult]) -> dict[str, Any]:
    return {
        name: {"mean": result.mean, "lr": result.lr, "scores": result.scores} for name, result in arms.items()
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
    fewest = next(iter(by_steps))
    n = len(by_steps[fewest]["ViT"].scores)
    return (
        "When the image is shifted by a pixel or a patch and the features are shifted back, they change by "
        f"{format_change('CNN without pooling, trained')} of the distance between two images in a CNN "
        f"without pooling, {format_change('CNN, trained')} in a CNN with pooling, "
        f"{format_change('ViT, trained')} in a ViT and {format_change('ViT without positions, trained')} in "
        f"a ViT without positions. One pixel influences {influenced['CNN without pooling']}, "
        f"{influenced['CNN']} and {influenced['ViT']} of {side} pixels in CNNs without and with pooling and "
        f"in a ViT. Accuracy on {describe_dataset(data)}, no augmentation, each arm at its own best learning "
        f"rate, {n} seeds: {fractions} after {steps['many']} steps; with all images after {steps[fewest]} "
        f"steps: {scores(by_steps[fewest])}."
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
