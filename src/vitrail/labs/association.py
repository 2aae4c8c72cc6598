"""Lab `association`: note 004's first function that attention can represent and a convolution cannot.

f(v_1, ..., v_n) = sum of those v_j that equal U v_1, by softmax(alpha v_1^T U^-1 v_j). Each condition
that the slide leaves out is tried by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.model import attend_explicitly

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "association"
NOTE = '004 "Self-Attention can associate patches", the first'
CLAIM = (
    "With Q K^T = alpha U^-1 and a large alpha, self-attention adds up the patches that equal U v_1; a "
    "convolution cannot."
)
TAKES = ""

WIDTH, PATCHES = 16, 16
ALPHA = 100.0
BETWEEN = 0.95  # a sink's cosine: below a match, above all that chance brings
RIGHT, WRONG = 0.01, 0.3
ROUNDING = 1e-12


@dataclass(frozen=True)
class Sample:
    """Patches of norm one, (B, n, d), the first of which asks for its partner U v_1."""

    v: Tensor
    U: Tensor
    wanted: Tensor
    """(B, d) what f is."""


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    count = 20_000 if size == "full" else 1_500
    alphas = [1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
    one = draw_sample(count, 1)
    mixed = draw_sample(count, "none or one")
    by_alpha = [error(answer(one, one.U.inverse(), alpha), one.wanted) for alpha in alphas]
    bent = draw_sample(count, 1, orthogonal=False)
    found = {
        "one match": error(answer(one, one.U.inverse()), one.wanted),
        "one match, U not orthogonal": error(answer(bent, bent.U.inverse()), bent.wanted),
        "the same with U^T": error(answer(bent, bent.U.T), bent.wanted),
        "three matches": error(answer(s := draw_sample(count, 3), s.U.inverse()), s.wanted),
        "none or one match": error(answer(mixed, mixed.U.inverse()), mixed.wanted),
        "the same with a sink": error(answer(mixed, mixed.U.inverse(), sink=True), mixed.wanted),
        "convolution, one match": best_linear(one),
        "convolution, none or one": best_linear(mixed),
    }
    sentence = (
        f"With exactly one match and an orthogonal U the error is {found['one match']:.1e} at alpha = "
        f"{ALPHA:g} and {by_alpha[0]:.2f} at alpha = 1; but then f is U v_1, and a convolution has no error "
        f"either. With U not orthogonal the error is "
        f"{found['one match, U not orthogonal']:.2f}, and {found['the same with U^T']:.1e} with U^T for "
        f"U^-1. Three matches give their mean, not their sum: {found['three matches']:.2f}. Where a match "
        f"may be missing, attention alone errs by {found['none or one match']:.2f}, with a sink token by "
        f"{found['the same with a sink']:.1e}, and the best linear map of all patches, which every "
        f"convolution is, by {found['convolution, none or one']:.2f}."
    )
    return Result(
        number=found["the same with a sink"],
        unit="of the size of f, attention's error where a match is there or not (convolution: "
        f"{found['convolution, none or one']:.2f})",
        n=count,
        verdict=judge(found),
        sentence=sentence,
        figure=draw(alphas, by_alpha, found),
        numbers={**found, "alpha": dict(zip(map(str, alphas), by_alpha, strict=True))},
    )


def judge(found: dict[str, float]) -> Verdict:
    """Each condition counts if the error is large without it and small with it."""
    if found["one match"] > RIGHT or found["convolution, none or one"] < WRONG:
        return Verdict("does not hold", ": attention errs even with one match, or a convolution does not")
    needed = []
    if found["one match, U not orthogonal"] > WRONG and found["the same with U^T"] < RIGHT:
        needed.append("U is orthogonal (or U^T stands for U^-1)")
    if found["three matches"] > WRONG:
        needed.append("at most one patch matches")
    if found["none or one match"] > WRONG and found["the same with a sink"] < RIGHT:
        needed.append("a sink token takes the attention where none does")
    return Verdict("holds if", ", ".join(needed)) if needed else Verdict("holds")


# ---- patches --------------------------------------------------------------------------------


def draw_sample(count: int, matches: int | str, *, orthogonal: bool = True) -> Sample:
    """Random patches of norm one, among which so many are U v_1."""
    chance = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=chance)

    U, _ = torch.linalg.qr(normal(WIDTH, WIDTH))
    v = F.normalize(normal(count, PATCHES, WIDTH), dim=-1)
    if not orthogonal:  # half of the directions three times as long, half of them shorter
        stretch = torch.full((WIDTH,), 3.0, dtype=torch.float64)
        stretch[::2] = 0.5
        U = U * stretch
        v[:, 0] = kept_in_length(v[:, 0], stretch)
    partner = v[:, 0] @ U.T  # (B, d), of norm one
    how_many = torch.randint(2, (count,), generator=chance) if isinstance(matches, str) else matches
    there = torch.rand(count, PATCHES - 1, generator=chance).argsort(dim=1).argsort(dim=1)
    match = there < torch.as_tensor(how_many).reshape(-1, 1)  # at random places among the others
    v[:, 1:] = torch.where(match[..., None], partner[:, None], v[:, 1:])
    return Sample(v, U, match.sum(dim=1, keepdim=True) * partner)


def kept_in_length(v: Tensor, stretch: Tensor) -> Tensor:
    """Vectors of norm one whose image has norm one: the slide has both, for v_1 and for its match."""
    short = stretch < 1
    a, b = F.normalize(v * short, dim=-1), F.normalize(v * ~short, dim=-1)
    small, large = stretch.min() ** 2, stretch.max() ** 2
    share = (1 - small) / (large - small)  # of the long directions: share large + (1 - share) small = 1
    return (1 - share).sqrt() * a + share.sqrt() * b


# ---- attention and convolution --------------------------------------------------------------


def answer(sample: Sample, middle: Tensor, alpha: float = ALPHA, *, sink: bool = False) -> Tensor:
    """What v_1 gets from all patches by softmax(alpha v_1^T middle v_j): (B, d).

    A sink is one token more, worth nothing, whose score lies between a match and the rest.
    """
    q = (sample.v[:, :1] @ middle)[:, None]  # (B, 1, 1, d)
    k = v = sample.v[:, None]  # (B, 1, n, d)
    bias = None
    if sink:
        k = v = F.pad(v, (0, 0, 0, 1))
        bias = torch.zeros(v.shape[2], dtype=v.dtype)
        bias[-1] = alpha * BETWEEN
    return attend_explicitly(q, k, v, scale=alpha, bias=bias)[:, 0, 0]


def best_linear(sample: Sample) -> float:
    """The error of the best linear map of all patches, fitted on half of the samples.

    004's convolution is a sum of patches with weights that depend on places alone, so it is one of these.
    """
    x, half = sample.v.flatten(1), len(sample.v) // 2
    fitted = torch.linalg.lstsq(x[:half], sample.wanted[:half]).solution
    return error(x[half:] @ fitted, sample.wanted[half:])


def error(got: Tensor, wanted: Tensor) -> float:
    """Root mean square, as a share of that of what is wanted; what is rounding alone is no error."""
    share = ((got - wanted).square().sum() / wanted.square().sum()).sqrt().item()
    return share if share > ROUNDING else 0.0


@in_our_style
def draw(alphas: list[float], by_alpha: list[float], found: dict[str, float]) -> Figure:
    figure = canvas(7.6, 3.0)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.3])
    left.plot(alphas, by_alpha, "o-", color=LINES[0], markersize=4)
    left.set(xscale="log", yscale="log", xlabel="alpha", ylabel="error", title="one match, U orthogonal")
    colours = [LINES[1] if name.startswith("conv") else LINES[0] for name in found]
    right.barh(list(found), [max(value, 1e-16) for value in found.values()], color=colours)
    right.set(xscale="log", xlim=(1e-16, 10), xlabel=f"error, alpha = {ALPHA:g}")
    right.invert_yaxis()
    return figure
