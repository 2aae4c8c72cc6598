"""Lab `scale`: what the factor before softmax does, which three notes write in three ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.interval import interval
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.model.attention import scale_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "scale"
NOTE = '000 "Breaking the equations down - 2", 003 "Attention", 004 "Self Attention Layer"'
CLAIM = (
    "Scores are divided by sqrt(d) before softmax (003); 000 divides by sqrt(D), 004 by nothing. The divisor "
    "is what keeps softmax from saturating as heads get wider."
)
TAKES = ""

TOKENS = 197
HEADS = 12
WIDE = 64  # d of every published ViT but the largest
WAYS: dict[Any, str] = {"head": "1/sqrt(d), note 003", "width": "1/sqrt(D), note 000", "none": "1, note 004"}
STEADY, SATURATED = 0.05, 0.5  # of the entropy: how much may change, how much may be left
DEAD = 0.01  # softmax's derivative, which is about 0.07 for uniform weights on so many tokens


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    widths, draws = ([4, 8, 16, 32, 64, 128, 256, 512, 1024], 20) if size == "full" else ([4, 64, 256], 3)
    entropy: dict[str, list[float]] = {way: [] for way in WAYS}
    dead: dict[str, list[float]] = {way: [] for way in WAYS}
    wide: list[float] = []
    for d in widths:
        for way in WAYS:
            factor = scale_of(ViTConfig(width=HEADS * d, depth=1, heads=HEADS, patch=16, scale=way))
            measured = [measure(d, factor, seed) for seed in range(draws)]
            entropy[way].append(sum(one for one, _ in measured) / draws)
            dead[way].append(sum(one for _, one in measured) / draws)
            if way == "none" and d == WIDE:
                wide = [one for one, _ in measured]
    first, last, at = widths[0], widths[-1], widths.index(WIDE)
    sentence = (
        f"From d = {first} to {last} the entropy of softmax over {TOKENS} tokens stays at "
        f"{entropy['head'][0]:.2f} to {entropy['head'][-1]:.2f} of the largest with 1/sqrt(d), and at "
        f"{entropy['width'][0]:.2f} to {entropy['width'][-1]:.2f} with 1/sqrt(D) for {HEADS} heads. Without "
        f"a divisor it falls from {entropy['none'][0]:.2f} to {entropy['none'][-1]:.2f}, and the share of "
        f"queries that hardly learn any more (derivative below {DEAD}) rises to {dead['none'][at]:.0%} at "
        f"d = {WIDE} and {dead['none'][-1]:.0%} at d = {last}; with either divisor it is "
        f"{max(dead['head'] + dead['width']):.0%}."
    )
    return Result(
        number=sum(wide) / draws,
        unit=f"of the largest entropy is left without a divisor at d = {WIDE}",
        n=draws,
        verdict=judge(entropy),
        sentence=sentence,
        figure=draw(widths, entropy, dead),
        interval=interval(wide),
        numbers={"d": widths, "entropy": entropy, "hardly learn": dead},
    )


def judge(entropy: dict[str, list[float]]) -> Verdict:
    """Steady with sqrt(d), lost without; and whether sqrt(D) is as good."""

    def steady(way: str) -> bool:
        return max(entropy[way]) - min(entropy[way]) < STEADY

    if not steady("head"):
        return Verdict("does not hold", ": 1/sqrt(d) does not keep the entropy")
    if entropy["none"][-1] > SATURATED * entropy["none"][0]:
        return Verdict("does not hold", ": softmax does not saturate without a divisor")
    if steady("width"):
        return Verdict(
            "holds if", "the divisor grows as sqrt(d); sqrt(D) does too, if the number of heads stays"
        )
    return Verdict("holds")


def measure(d: int, factor: float, seed: int) -> tuple[float, float]:
    """Entropy of softmax as a share of the largest; and the share of queries that it lets learn nothing.

    q and k have entries of variance 1, as a norm leaves them. A query learns by softmax's derivative,
    diag(p) - p p^T, which is zero where one token has all the weight.
    """
    chance = torch.Generator().manual_seed(1_000 * d + seed)
    q, k = (torch.randn(TOKENS, d, dtype=torch.float64, generator=chance) for _ in range(2))
    p = (factor * q @ k.T).softmax(dim=-1)  # (T, T)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(dim=-1).mean().item()
    return entropy / math.log(TOKENS), (jacobian_size(p) < DEAD).double().mean().item()


def jacobian_size(p: Tensor) -> Tensor:
    """The Frobenius norm of diag(p) - p p^T for each row, without forming it: (T,)."""
    square, cube, fourth = ((p**power).sum(dim=-1) for power in (2, 3, 4))
    off = square**2 - fourth  # the sum of (p_i p_j)^2 for i and j apart
    return (square - 2 * cube + fourth + off).clamp(min=0).sqrt()


@in_our_style
def draw(widths: list[int], entropy: dict[str, list[float]], dead: dict[str, list[float]]) -> Figure:
    figure = canvas(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    for (way, label), colour in zip(WAYS.items(), LINES, strict=False):
        left.plot(widths, entropy[way], "o-", color=colour, label=label, markersize=4)
        right.plot(widths, dead[way], "o-", color=colour, markersize=4)
    left.set(
        xscale="log", xlabel="d, width of a head", ylim=(0, 1.02), title="entropy of softmax, 1 is uniform"
    )
    left.legend()
    right.set(xscale="log", xlabel="d, width of a head", ylim=(-0.02, 1), title="queries that hardly learn")
    for axis in (left, right):
        axis.set_xticks(widths, [str(d) for d in widths], rotation=45)
        axis.minorticks_off()
    return figure
