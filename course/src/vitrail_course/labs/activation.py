"""Lab `activation`: the formulas and properties of GELU and ReLU in note 001."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.model.config import ViTConfig
from vitrail.model.layers import build_activation
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import Verdict, decide, fact

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "activation"
TITLE = "GELU instead of ReLU"
NOTE = '001 "Intermediate"'
CLAIM = (
    "GELU is the cumulative distribution function of the standard normal; a tanh formula approximates it. "
    "ReLU is monotonic, convex and linear above zero; GELU is none of the three, and smooth."
)
ACCEPTS = ""

_CLOSE = 1e-3


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    x = torch.linspace(-8, 8, 1_600_001 if size == "full" else 16_001, dtype=torch.float64)
    exact, tanh, relu = (_apply_activation(name, x) for name in ("gelu", "gelu-tanh", "relu"))
    phi = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    errors = {"x Phi(x)": (exact - x * phi), "Phi(x)": (exact - phi), "tanh": (exact - tanh)}
    max_error = {name: value.abs().max().item() for name, value in errors.items()}
    worst_x = abs(x[errors["tanh"].abs().argmax()].item())
    properties = {
        "relu is monotonic": _monotonic(relu),
        "relu is convex": _convex(x, relu),
        "relu is linear above zero": _linear(x, relu),
        "gelu is not monotonic": not _monotonic(exact),
        "gelu is not convex": not _convex(x, exact),
        "gelu is not linear above zero": not _linear(x, exact),
        "gelu is smooth": _smooth(x, exact) and not _smooth(x, relu),
    }
    minimum = x[exact.argmin()].item()
    violated = [name for name, holds in properties.items() if not holds]
    sentence = (
        f"GELU equals x Phi(x) to {max_error['x Phi(x)']:.0e}; Phi(x) alone is off by up to "
        f"{max_error['Phi(x)']:.1f} between -8 and 8. The tanh approximation differs most at x = "
        f"±{worst_x:.2f}, by {max_error['tanh']:.2e}. GELU decreases until x = {minimum:.3f} and increases "
        "from there. "
        + (
            f"These properties do not hold: {', '.join(violated)}."
            if violated
            else "All seven properties hold."
        )
    )
    return LabResult(
        number=max_error["tanh"],
        unit=f"maximum difference between GELU and its tanh approximation, at x = ±{worst_x:.2f}",
        n=len(x),
        sentence=sentence,
        figure=draw(x, phi),
        numbers={"differences": max_error, "minimum at": minimum, "properties": properties},
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    errors, properties = numbers["differences"], numbers["properties"]
    violated = [name for name, holds in properties.items() if not holds]
    return decide(
        [
            fact(
                "GELU is the cumulative distribution function",
                errors["Phi(x)"] <= _CLOSE,
                f"it differs by up to {errors['Phi(x)']:.1f} from -8 to 8; x times the function, by "
                f"{errors['x Phi(x)']:.0e}",
            ),
            fact(
                "the tanh formula approximates GELU",
                errors["tanh"] <= _CLOSE,
                f"to {errors['tanh']:.1e}, threshold {_CLOSE:g}",
            ),
            fact(
                "GELU and ReLU have the stated properties",
                not violated,
                f"{len(properties) - len(violated)} of {len(properties)}"
                + (f"; not: {', '.join(violated)}" if violated else ""),
            ),
        ]
    )


def _apply_activation(name: str, x: Tensor) -> Tensor:
    """The activation as the models compute it."""
    choice: Any = name
    return build_activation(ViTConfig(width=4, depth=1, heads=1, patch=16, activation=choice))(x)


# ---- properties, checked on a fine grid ------------------------------------------------------


def _monotonic(y: Tensor) -> bool:
    return bool((y.diff() >= -1e-12).all())


def _convex(x: Tensor, y: Tensor) -> bool:
    return bool((y.diff().diff() / (x[1] - x[0]) ** 2 >= -1e-2).all())


def _linear(x: Tensor, y: Tensor) -> bool:
    above = y[x > 0]
    return bool((above.diff().diff().abs() / (x[1] - x[0]) ** 2 < 1e-2).all())


def _smooth(x: Tensor, y: Tensor) -> bool:
    """Whether the slope has no jump between neighboring points."""
    slope = y.diff() / (x[1] - x[0])
    return bool(slope.diff().abs().max() < 0.1)


@styled
def draw(x: Tensor, phi: Tensor) -> Figure:
    every = slice(None, None, max(1, len(x) // 1_600))
    x, phi = x[every], phi[every]
    figure = new_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    visible = (x >= -4) & (x <= 3)
    curves = {name: _apply_activation(name, x) for name in ("gelu", "relu", "quick-gelu", "silu")}
    for (name, y), color in zip(curves.items(), LINES, strict=False):
        left.plot(x[visible], y[visible], label=name, color=color)
    left.plot(x[visible], phi[visible], "--", label="Phi(x), as printed", color=FAINT)
    left.set(title="activations", xlabel="x")
    left.legend()
    right.plot(x, _apply_activation("gelu-tanh", x) - curves["gelu"], color=LINES[0])
    right.axhline(0, color=FAINT, linewidth=0.5)
    right.set(title="tanh approximation minus GELU", xlabel="x")
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    return figure
