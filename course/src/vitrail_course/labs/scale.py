"""Lab `scale`: the factor before softmax, for which three notes give three formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.experiment.interval import share_interval
from vitrail.model.attention import attention_scale
from vitrail.model.config import ViTConfig
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import IDENTITY, OURS, TOY, Statement, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "scale"
TITLE = "scores are divided by sqrt(d)"
NOTE = '000 "Breaking the equations down - 2", 003 "Attention", 004 "Self Attention Layer"'
CLAIM = (
    "Scale along embedding dimension [by 1/sqrt(d_model)] (000). Attention(Q, K, V) = softmax(Q K^T / "
    "sqrt(d_k)) V (003). softmax(v_i^T Q K^T v_j + p_ij) (004, without a factor)."
)
ACCEPTS = ""

_TOKENS = 197
_HEADS = 12
_HEAD_WIDTH = 64  # d of all published ViTs except the largest
_SCALES: dict[Any, str] = {
    "head": "1/sqrt(d), note 003",
    "width": "1/sqrt(D), note 000",
    "none": "1, note 004",
}
_MAX_REMAINING = 0.5  # fraction of the entropy that remains if softmax saturates
_VASWANI = "Vaswani et al. 2017, footnote 4"


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    widths, seeds = ([4, 8, 16, 32, 64, 128, 256, 512, 1024], 20) if size == "full" else ([4, 64, 256], 3)
    factors = {
        scale: [
            attention_scale(ViTConfig(width=_HEADS * d, depth=1, heads=_HEADS, patch=16, scale=scale))
            for d in widths
        ]
        for scale in _SCALES
    }
    entropy = {
        scale: [
            [_entropy(d, factor, seed) for seed in range(seeds)]
            for d, factor in zip(widths, of_scale, strict=True)
        ]
        for scale, of_scale in factors.items()
    }
    means = {scale: [sum(trials) / seeds for trials in by_width] for scale, by_width in entropy.items()}
    at_64 = entropy["none"][widths.index(_HEAD_WIDTH)]
    # q and k have independent entries of variance 1, so that q^T k has variance d.
    variance = {
        scale: [factor**2 * d for factor, d in zip(of_scale, widths, strict=True)]
        for scale, of_scale in factors.items()
    }
    return LabResult(
        number=sum(at_64) / seeds,
        unit=f"of the maximum entropy without a divisor at d = {_HEAD_WIDTH}",
        n=seeds,
        setting=f"Random q and k of variance 1, {_TOKENS} tokens, D = {_HEADS} d, d from {widths[0]} to "
        f"{widths[-1]}.",
        figure=draw(widths, means, variance),
        interval=share_interval(at_64),
        numbers={"d": widths, "entropy": means, "variance of the scores": variance},
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Scores must keep variance 1, as those of one factor do; without any, softmax must saturate."""
    remaining = numbers["entropy"]["none"][-1] / numbers["entropy"]["none"][0]
    statements = [
        Statement(
            f"with {name} scores have variance 1",
            IDENTITY,
            all(math.isclose(value, 1) for value in numbers["variance of the scores"][scale]),
            f"{numbers['variance of the scores'][scale][-1]:.3g} at d = {numbers['d'][-1]}",
            "1",
            _VASWANI,
        )
        for scale, name in _SCALES.items()
        if scale != "none"
    ]
    saturates = Statement(
        "without a factor (004) softmax saturates as heads get wider",
        TOY,
        remaining < _MAX_REMAINING,
        f"{remaining:.0%} of its entropy remain from d = {numbers['d'][0]} to {numbers['d'][-1]}",
        f"{_MAX_REMAINING:.0%}",
        OURS,
    )
    return Verdict([*statements, saturates])


def _entropy(d: int, factor: float, seed: int) -> float:
    """Mean entropy of softmax as a fraction of the maximum."""
    rng = torch.Generator().manual_seed(1_000 * d + seed)
    q, k = (torch.randn(_TOKENS, d, dtype=torch.float64, generator=rng) for _ in range(2))
    p = (factor * q @ k.T).softmax(dim=-1)  # (T, T)
    return -(p * p.clamp(min=1e-300).log()).sum(dim=-1).mean().item() / math.log(_TOKENS)


@styled
def draw(widths: list[int], entropy: dict[str, list[float]], variance: dict[str, list[float]]) -> Figure:
    figure = new_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    for (scale, label), color in zip(_SCALES.items(), LINES, strict=False):
        left.plot(widths, variance[scale], "o-", color=color, label=label, markersize=4)
        right.plot(widths, entropy[scale], "o-", color=color, markersize=4)
    left.set(xscale="log", yscale="log", xlabel="head width d", title="variance of the scores")
    left.legend()
    right.set(xscale="log", xlabel="head width d", ylim=(0, 1.02), title="entropy of softmax (1: uniform)")
    for axis in (left, right):
        axis.set_xticks(widths, [str(d) for d in widths], rotation=45)
        axis.minorticks_off()
    return figure
