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

from vitrail.base.errors import InputError
from vitrail.experiment.study import Difference, edge_note
from vitrail.experiment.trial import ProcessPool
from vitrail.images.formats.sources import Split
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
    OURS,
    Verdict,
    compare_arms,
    equal_within,
    gain,
    identity,
    percent_interval,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "translation"
TITLE = "few images: CNN, many: ViT"
NOTE = '002 "Convolutional Neural Networks", "Notes", "Combining vision transformers and convolution?"'
CLAIM = (
    "Translation equivariance [...] Locality [...] Inductive bias of CNN helps with small datasets, but "
    "transformer learns the relevant structures with enough data. [...] Hybrid networks perform better "
    "than ViT or BiT when trained less. The advantage vanishes as training goes on."
)
ACCEPTS = "labeled images in arrays"

ARMS = ("ViT", "CNN", "hybrid")
_FRACTIONS = (0.01, 0.1, 1.0)  # of the training images
_STEPS = {"few": 40, "more": 130, "many": 400, "most": 1_200}  # for up to a few thousand images
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
        setting=f"Models of about as many parameters on {describe_dataset(images)}; {steps['many']} steps "
        "where "
        "the number of images differs.",
        figure=draw(feature_change, by_fraction, by_steps, steps),
        interval=percent_interval(cnn_gain),
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
    """A gain must be there with few images, or after few steps, and have gone with all, or after the most."""
    by_fraction, by_steps = numbers["accuracy by fraction"], numbers["accuracy by steps"]
    shifted = {
        name: numbers["change when shifted"][name]["1 pixel"]
        for name in ("CNN without pooling", "CNN", "ViT")
    }
    influenced = numbers["pixels influenced by one pixel"]

    def compare(arms: Mapping[str, Any], first: str) -> Difference:
        return compare_arms(arms[first]["scores"], arms["ViT"]["scores"], numbers["held out"])

    few, *_, everything = by_fraction
    learned = [
        steps
        for steps, arms in by_steps.items()
        if max(arms["hybrid"]["mean"], arms["ViT"]["mean"]) > _LEARNED
    ]
    statements = [
        identity(
            "CNNs are equivariant to translation",
            shifted["CNN without pooling"] < _MAX_UNCHANGED and shifted["ViT"] > _MIN_CHANGED,
            f"features change by {shifted['CNN without pooling']:.1g} if the image moves by a pixel, by "
            f"{shifted['CNN']:.2g} with pooling and {shifted['ViT']:.2g} in a ViT",
            f"{_MAX_UNCHANGED:g}",
            "rounding of float32",
            "it has no pooling, or the shift is a multiple of its stride"
            if shifted["CNN"] > _MAX_UNCHANGED
            else "",
        ),
        identity(
            "CNNs are local",
            influenced["CNN without pooling"] < influenced["ViT"],
            f"one pixel influences {influenced['CNN without pooling']} in a row, {influenced['CNN']} with "
            "pooling",
            f"{influenced['ViT']}",
            "the ViT",
            "" if influenced["CNN"] < influenced["ViT"] else "it has no pooling",
        ),
        gain(f"a CNN beats a ViT with {float(few):.0%} of the images", compare(by_fraction[few], "CNN")),
        equal_within(
            "with all of these images a ViT is as accurate as a CNN",
            compare(by_fraction[everything], "CNN"),
            _MARGIN,
            OURS,
        ),
    ]
    if len(learned) > 1:
        least, most = learned[0], learned[-1]
        after_most = compare(by_steps[most], "hybrid")
        statements += [
            gain(f"a hybrid beats a ViT after {least} steps", compare(by_steps[least], "hybrid")),
            equal_within(f"the hybrid's gain has vanished after {most} steps", after_most, _MARGIN, OURS),
        ]
    return Verdict(statements)


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
