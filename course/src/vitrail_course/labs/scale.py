"""Lab `scale`: the effect of the factor before softmax, for which three notes give three formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.experiment.interval import share_interval
from vitrail.model.attention import attention_scale
from vitrail.model.config import ViTConfig
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import Verdict, decide, fact

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "scale"
TITLE = "scores are divided by sqrt(d)"
NOTE = '000 "Breaking the equations down - 2", 003 "Attention", 004 "Self Attention Layer"'
CLAIM = (
    "Dividing the scores by sqrt(d) (003), or by sqrt(D) (000), keeps softmax from saturating as heads get "
    "wider; 004 divides by nothing."
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
_MAX_CHANGE = 0.05  # of a steady entropy
_MAX_REMAINING = 0.5  # fraction of the entropy that remains if softmax saturates
_MIN_JACOBIAN = 0.01  # below it a query gets almost no gradient; about 0.07 for uniform weights on 197 tokens


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    widths, seeds = ([4, 8, 16, 32, 64, 128, 256, 512, 1024], 20) if size == "full" else ([4, 64, 256], 3)
    entropy: dict[str, list[float]] = {scale: [] for scale in _SCALES}
    saturated: dict[str, list[float]] = {scale: [] for scale in _SCALES}
    entropy_at_64: list[float] = []
    for d in widths:
        for scale in _SCALES:
            factor = attention_scale(
                ViTConfig(width=_HEADS * d, depth=1, heads=_HEADS, patch=16, scale=scale)
            )
            trials = [_measure(d, factor, seed) for seed in range(seeds)]
            entropy[scale].append(sum(value for value, _ in trials) / seeds)
            saturated[scale].append(sum(value for _, value in trials) / seeds)
            if scale == "none" and d == _HEAD_WIDTH:
                entropy_at_64 = [value for value, _ in trials]
    first, last, at_64 = widths[0], widths[-1], widths.index(_HEAD_WIDTH)
    sentence = (
        f"From d = {first} to {last}, the entropy of softmax over {_TOKENS} tokens stays at "
        f"{format_range(entropy['head'])} of the maximum with 1/sqrt(d), and at "
        f"{format_range(entropy['width'])} with 1/sqrt(D) and {_HEADS} heads. Without "
        f"a divisor it falls from {entropy['none'][0]:.2f} to {entropy['none'][-1]:.2f}, and the fraction of "
        f"queries with almost no gradient (norm of softmax's Jacobian below {_MIN_JACOBIAN}) rises to "
        f"{saturated['none'][at_64]:.0%} at d = {_HEAD_WIDTH} and {saturated['none'][-1]:.0%} at d = {last}; "
        f"with either divisor it is {max(saturated['head'] + saturated['width']):.0%}."
    )
    return LabResult(
        number=sum(entropy_at_64) / seeds,
        unit=f"of the maximum entropy without a divisor at d = {_HEAD_WIDTH}",
        n=seeds,
        sentence=sentence,
        figure=draw(widths, entropy, saturated),
        interval=share_interval(entropy_at_64),
        numbers={"d": widths, "entropy": entropy, "saturated queries": saturated},
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """The entropy must be steady with either divisor and fall without one."""
    entropy = numbers["entropy"]
    change = {scale: max(entropy[scale]) - min(entropy[scale]) for scale in ("head", "width")}
    remaining = entropy["none"][-1] / entropy["none"][0]
    widths = f"from d = {numbers['d'][0]} to {numbers['d'][-1]}"
    steady = f"threshold {_MAX_CHANGE:g} of the maximum"
    return decide(
        [
            fact(
                "with 1/sqrt(d) the entropy of softmax does not depend on d",
                change["head"] < _MAX_CHANGE,
                f"it changes by {change['head']:.3f} {widths}, {steady}",
            ),
            fact(
                "without a divisor softmax saturates",
                remaining < _MAX_REMAINING,
                f"{remaining:.0%} of the entropy remain {widths}, threshold {_MAX_REMAINING:.0%}",
            ),
            fact(
                "with 1/sqrt(D) and a fixed number of heads the entropy does not depend on d, either",
                change["width"] < _MAX_CHANGE,
                f"it changes by {change['width']:.4f}, {steady}",
            ),
        ]
    )


def format_range(values: Sequence[float]) -> str:
    """ "0.70 to 0.91", or "0.91" if both round to it."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _measure(d: int, factor: float, seed: int) -> tuple[float, float]:
    """Entropy of softmax as a fraction of the maximum, and the fraction of queries with almost no gradient.

    q and k have entries of variance 1, as after a norm. The gradient of a query is proportional to softmax's
    Jacobian, diag(p) - p p^T, which is zero if one token has all the weight.
    """
    rng = torch.Generator().manual_seed(1_000 * d + seed)
    q, k = (torch.randn(_TOKENS, d, dtype=torch.float64, generator=rng) for _ in range(2))
    p = (factor * q @ k.T).softmax(dim=-1)  # (T, T)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(dim=-1).mean().item()
    return entropy / math.log(_TOKENS), (jacobian_norm(p) < _MIN_JACOBIAN).double().mean().item()


def jacobian_norm(p: Tensor) -> Tensor:
    """The Frobenius norm of diag(p) - p p^T for each row, without forming the matrix: (T,)."""
    square, cube, fourth = ((p**power).sum(dim=-1) for power in (2, 3, 4))
    off = square**2 - fourth  # the sum of (p_i p_j)^2 over i != j
    return (square - 2 * cube + fourth + off).clamp(min=0).sqrt()


@styled
def draw(widths: list[int], entropy: dict[str, list[float]], saturated: dict[str, list[float]]) -> Figure:
    figure = new_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    for (scale, label), color in zip(_SCALES.items(), LINES, strict=False):
        left.plot(widths, entropy[scale], "o-", color=color, label=label, markersize=4)
        right.plot(widths, saturated[scale], "o-", color=color, markersize=4)
    left.set(xscale="log", xlabel="head width d", ylim=(0, 1.02), title="entropy of softmax (1: uniform)")
    left.legend()
    right.set(xscale="log", xlabel="head width d", ylim=(-0.02, 1), title="queries with almost no gradient")
    for axis in (left, right):
        axis.set_xticks(widths, [str(d) for d in widths], rotation=45)
        axis.minorticks_off()
    return figure
