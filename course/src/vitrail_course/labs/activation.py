"""Lab `activation`: the formulas and properties of GELU and ReLU in note 001, and a ViT trained with each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.experiment.study import draw_arm, study
from vitrail.model.config import ViTConfig
from vitrail.model.layers import build_activation
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail_course.labs.datasets import describe_dataset, load_dataset, plain_settings
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import OURS, Verdict, compare_arms, gain, identity, percent_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.experiment.study import Study

NAME = "activation"
TITLE = "GELU instead of ReLU"
NOTE = '001 "Intermediate"'
CLAIM = (
    "It is defined as the cumulative distribution function of the standard normal distribution [...]. "
    "GeLU is non-monotonic, non-convex and non-linear in the positive domain and thus can approximate "
    "more easily complicated functions. [...] GeLU function is smooth [...], making it more amenable to "
    "gradient-based optimization during training."
)
ACCEPTS = "labeled images"

_CLOSE = 1e-3
GELU, RELU = "GELU", "ReLU"
ARMS: dict[str, dict[str, Any]] = {GELU: {}, RELU: {"model": {"activation": "relu"}}}


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    images = load_dataset(data) if full else load_dataset(data, 128, 64)
    epochs = 16 if full else 1
    model = {"width": 48, "depth": 2, "heads": 4} if full else {"width": 16, "depth": 1, "heads": 2}
    with TemporaryDirectory(prefix="runs-", dir=out) as runs:
        result = study(
            images,
            arms=ARMS,
            out=runs,
            seeds=6 if full else 2,
            lrs=[1e-3, 3e-3, 1e-2, 3e-2] if full else [3e-3],
            processes=process_count(size),
            batch=64,
            **plain_settings(images, epochs, **model),
        )
    difference = compare_arms(result.arms[GELU].scores, result.arms[RELU].scores, len(images.eval_split))
    return LabResult(
        number=100 * difference.mean,
        unit="percentage points of accuracy, a ViT with GELU minus one with ReLU",
        n=difference.n,
        setting=f"The formulas on a grid from -8 to 8; ViTs on {describe_dataset(images)}, {epochs} epochs.",
        figure=draw(torch.linspace(-8, 8, 1_601, dtype=torch.float64), result),
        interval=percent_interval(difference),
        numbers={
            **measure_formulas(1_600_001 if full else 16_001),
            "accuracy": {name: arm.numbers() for name, arm in result.arms.items()},
            "images": len(images.train),
            "held out": len(images.eval_split),
        },
        warnings=result.notes,
    )


def measure_formulas(points: int) -> dict[str, Any]:
    """How far the formulas of the note are from GELU, and which of the stated properties hold."""
    x = torch.linspace(-8, 8, points, dtype=torch.float64)
    exact, tanh, relu = (_apply_activation(name, x) for name in ("gelu", "gelu-tanh", "relu"))
    shapes = {"gelu": _shape(x, exact), "relu": _shape(x, relu)}
    stated = ("monotonic", "convex", "linear above zero")
    phi = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    errors = {"x Phi(x)": exact - x * phi, "Phi(x)": exact - phi, "tanh": exact - tanh}
    return {
        "differences": {name: value.abs().max().item() for name, value in errors.items()},
        "minimum at": x[exact.argmin()].item(),
        "properties": {
            **{f"relu is {name}": shapes["relu"][name] for name in stated},
            **{f"gelu is not {name}": not shapes["gelu"][name] for name in stated},
            "gelu is smooth": shapes["gelu"]["smooth"] and not shapes["relu"]["smooth"],
        },
    }


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    errors, accuracy = numbers["differences"], numbers["accuracy"]
    violated = [name for name, holds in numbers["properties"].items() if not holds]
    difference = compare_arms(accuracy[GELU]["scores"], accuracy[RELU]["scores"], numbers["held out"])
    return Verdict(
        [
            identity(
                "GELU is the cumulative distribution function",
                errors["Phi(x)"] <= _CLOSE,
                f"off by up to {errors['Phi(x)']:.1f} from -8 to 8; x times the function, "
                f"{errors['x Phi(x)']:.0e}",
                f"{_CLOSE:g}",
                OURS,
            ),
            identity(
                "the tanh formula approximates GELU",
                errors["tanh"] <= _CLOSE,
                f"to {errors['tanh']:.1e}",
                f"{_CLOSE:g}",
                OURS,
            ),
            identity(
                "GELU is neither monotonic nor convex nor linear above zero, but smooth; ReLU is all but "
                "smooth",
                not violated,
                f"not: {', '.join(violated)}" if violated else "on a grid",
                "each of 7",
                "Hendrycks and Gimpel 2016, Discussion",
            ),
            gain("a ViT with GELU is more accurate than one with ReLU", difference),
        ]
    )


def _apply_activation(name: str, x: Tensor) -> Tensor:
    """The activation as the models compute it."""
    choice: Any = name
    return build_activation(ViTConfig(width=4, depth=1, heads=1, patch=16, activation=choice))(x)


def _shape(x: Tensor, y: Tensor) -> dict[str, bool]:
    """Properties of a function, checked on a fine grid."""
    step = x[1] - x[0]
    slope = y.diff() / step
    curvature = slope.diff() / step
    return {
        "monotonic": bool((slope >= -1e-7).all()),
        "convex": bool((curvature >= -1e-2).all()),
        "linear above zero": bool((curvature[x[:-2] > 0].abs() < 1e-2).all()),
        "smooth": bool(slope.diff().abs().max() < 0.1),
    }


@styled
def draw(x: Tensor, result: Study) -> Figure:
    figure = new_figure(8.6, 2.9)
    left, middle, right = figure.subplots(1, 3)
    visible = x[(x >= -4) & (x <= 3)]
    for name, color in zip(("gelu", "relu", "quick-gelu", "silu"), LINES, strict=False):
        left.plot(visible, _apply_activation(name, visible), label=name, color=color)
    left.plot(visible, 0.5 * (1 + torch.erf(visible / math.sqrt(2))), "--", label="Phi(x)", color=FAINT)
    left.set(title="activations", xlabel="x")
    left.legend()
    middle.plot(x, _apply_activation("gelu-tanh", x) - _apply_activation("gelu", x), color=LINES[0])
    middle.axhline(0, color=FAINT, linewidth=0.5)
    middle.set(title="tanh formula minus GELU", xlabel="x")
    middle.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for n, arm in enumerate(result.arms.values()):
        draw_arm(right, n, arm, LINES[n])
    right.set(yticks=range(len(ARMS)), yticklabels=list(ARMS), xlabel="held-out accuracy", ylim=(1.5, -0.5))
    right.set_title(f"ViT, {len(result.seeds)} seeds, 95 % interval")
    return figure
