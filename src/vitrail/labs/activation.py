"""Lab `activation`: what article 001 says of GELU and ReLU, formula by formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.model.mlp import build_activation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "activation"
NOTE = '001 "Intermediate"'
CLAIM = (
    "GELU is the distribution function of the standard normal; a tanh formula is close to it. ReLU is "
    "monotonic, convex and linear above zero; GELU is none of the three, and smooth."
)
TAKES = ""

EXACT, CLOSE = 1e-6, 1e-3


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    x = torch.linspace(-8, 8, 1_600_001 if size == "full" else 16_001, dtype=torch.float64)
    exact, tanh, relu = (activation(name, x) for name in ("gelu", "gelu-tanh", "relu"))
    phi = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    away = {"x Phi(x)": (exact - x * phi), "Phi(x)": (exact - phi), "tanh": (exact - tanh)}
    worst = {name: value.abs().max().item() for name, value in away.items()}
    where = abs(x[away["tanh"].abs().argmax()].item())
    said = {
        "relu is monotonic": monotonic(relu),
        "relu is convex": convex(x, relu),
        "relu is linear above zero": linear(x, relu),
        "gelu is not monotonic": not monotonic(exact),
        "gelu is not convex": not convex(x, exact),
        "gelu is not linear above zero": not linear(x, exact),
        "gelu is smooth": smooth(x, exact) and not smooth(x, relu),
    }
    lowest = x[exact.argmin()].item()
    wrong = [name for name, true in said.items() if not true]
    sentence = (
        f"GELU is x Phi(x) to {worst['x Phi(x)']:.0e}; Phi(x) alone is off by up to {worst['Phi(x)']:.1f} "
        f"between -8 and 8. The tanh formula differs most at x = ±{where:.2f}, by {worst['tanh']:.2e}. "
        f"GELU falls until x = {lowest:.3f} and rises from there. "
        + (f"Not so: {', '.join(wrong)}." if wrong else "All seven properties are so.")
    )
    return Result(
        number=worst["tanh"],
        unit=f"at most between GELU and its tanh formula, at x = ±{where:.2f}",
        n=len(x),
        verdict=judge(worst, said),
        sentence=sentence,
        figure=draw(x, phi),
        numbers={"differences": worst, "lowest at": lowest, "properties": said},
    )


def judge(worst: dict[str, float], said: dict[str, bool]) -> Verdict:
    wrong = [name for name, true in said.items() if not true]
    if wrong or worst["tanh"] > CLOSE:
        return Verdict("does not hold", f": not so: {', '.join(wrong) or 'the tanh formula is close'}")
    if worst["Phi(x)"] > CLOSE and worst["x Phi(x)"] < EXACT:
        return Verdict("holds if", "GELU is x times the distribution function, not the function itself")
    return Verdict("holds")


def activation(name: str, x: Tensor) -> Tensor:
    """As our models compute it."""
    named: Any = name
    return build_activation(ViTConfig(width=4, depth=1, heads=1, patch=16, activation=named))(x)


# ---- properties, on a fine grid -------------------------------------------------------------


def monotonic(y: Tensor) -> bool:
    return bool((y.diff() >= -1e-12).all())


def convex(x: Tensor, y: Tensor) -> bool:
    return bool((y.diff().diff() / (x[1] - x[0]) ** 2 >= -1e-2).all())


def linear(x: Tensor, y: Tensor) -> bool:
    above = y[x > 0]
    return bool((above.diff().diff().abs() / (x[1] - x[0]) ** 2 < 1e-2).all())


def smooth(x: Tensor, y: Tensor) -> bool:
    """Whether the slope changes little from each point to the next: it has no jump."""
    slope = y.diff() / (x[1] - x[0])
    return bool(slope.diff().abs().max() < 0.1)


@in_our_style
def draw(x: Tensor, phi: Tensor) -> Figure:
    few = slice(None, None, max(1, len(x) // 1_600))
    x, phi = x[few], phi[few]
    figure = canvas(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    near = (x >= -4) & (x <= 3)
    lines = {name: activation(name, x) for name in ("gelu", "relu", "quick-gelu", "silu")}
    for (name, y), colour in zip(lines.items(), LINES, strict=False):
        left.plot(x[near], y[near], label=name, color=colour)
    left.plot(x[near], phi[near], "--", label="Phi(x), as printed", color=FAINT)
    left.set(title="activations", xlabel="x")
    left.legend()
    right.plot(x, activation("gelu-tanh", x) - lines["gelu"], color=LINES[0])
    right.axhline(0, color=FAINT, linewidth=0.5)
    right.set(title="tanh formula minus GELU", xlabel="x")
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    return figure
