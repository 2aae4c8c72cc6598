"""Lab `double-if`: note 004's second function that attention can represent and a convolution cannot.

f(v_1, ..., v_n) = sum over j of 1[v_1 = a and v_j = b], by softmax(alpha (v_1^T a)(b^T v_j)), read off
along b. The patches are taken from a dictionary of directions, a and b among them: at right angles, or
at random ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.model import attend_explicitly

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "double-if"
NOTE = '004 "Self-Attention can associate patches", the second'
CLAIM = (
    "With Q K^T = alpha a b^T and a large alpha, self-attention counts the patches equal to b where v_1 is "
    "a, and a convolution cannot."
)
TAKES = ""

WIDTH, PATCHES = 16, 16
ALPHA = 100.0
A, B = 0, 1  # which directions of the dictionary
NEAR = 2  # how many patches a convolution with as many parameters reaches: v_1 and one more


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    count = 20_000 if size == "full" else 2_000
    dictionary = directions(right_angles=True)
    words, first, others = draw_sample(count)
    there = first & (others > 0)
    v, a, b = dictionary[words], dictionary[A], dictionary[B]
    got = answer(v, a, b)
    askew = directions(right_angles=False)
    decided = {
        "attention": right(got > 0.5, there),
        "the same at random angles": right(answer(askew[words], askew[A], askew[B]) > 0.5, there),
        "convolution of all patches": right(by_convolution(v, a, b, PATCHES) > 0, there),
        f"convolution of {NEAR} patches": right(by_convolution(v, a, b, NEAR) > 0, there),
        "always no": right(torch.zeros_like(there), there),
    }
    counted = (first * others).double()
    size_of = counted.square().mean().sqrt()
    off = ((got - counted).square().mean().sqrt() / size_of).item()
    best = ((best_linear(v, counted) - counted).square().mean().sqrt() / size_of).item()
    leak = got[~first & (others > 0)].max().item()
    several = got[first & (others > 1)].max().item()
    sentence = (
        f"Read along b, attention gives {several:.3f} at most where v_1 = a and b is there, however often, "
        f"so it says whether and not how many: as a count it is off by {off:.2f} of its size, the best "
        f"linear map by {best:.2f}. Where v_1 is not a, all patches count alike and up to {leak:.2f} leaks "
        f"through: a threshold at 0.5 makes {decided['attention']:.1%} right, and "
        f"{decided['the same at random angles']:.1%} where directions are not at right angles. A convolution "
        f"that reaches all patches, with a threshold, makes {decided['convolution of all patches']:.1%} "
        f"right too; one that reaches {NEAR}, {decided[f'convolution of {NEAR} patches']:.1%}; always no, "
        f"{decided['always no']:.1%}."
    )
    return Result(
        number=decided["attention"],
        unit="of the samples right by attention and a threshold (convolution of all patches and a threshold: "
        f"{decided['convolution of all patches']:.3f})",
        n=count,
        verdict=judge(decided, off),
        sentence=sentence,
        figure=draw(got, first, others, decided),
        numbers={"right": decided, "as a count, off by": off, "best linear map": best, "leak": leak},
    )


def judge(decided: dict[str, float], off: float) -> Verdict:
    """Whether attention decides it; whether it counts; and which convolutions do not decide it."""
    near, every = decided[f"convolution of {NEAR} patches"], decided["convolution of all patches"]
    if decided["attention"] < 0.99 or near > 0.99:
        return Verdict("does not hold", ": attention errs, or a small convolution does not")
    needed = []
    if off > 0.1:
        needed.append("it is asked whether b is there, not how often, by a threshold")
    if decided["the same at random angles"] < 0.99:
        needed.append("patches that differ are at right angles")
    if every > 0.99:
        needed.append("the convolution does not reach every patch (one that does decides it too)")
    return Verdict("holds if", "; ".join(needed)) if needed else Verdict("holds")


def draw_sample(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Patches as numbers in the dictionary (B, n); whether the first is a; how many others are b, 0 to 3."""
    chance = torch.Generator().manual_seed(0)
    words = torch.randint(2, WIDTH, (count, PATCHES), generator=chance)  # neither a nor b
    first = torch.rand(count, generator=chance) < 0.5
    words[:, 0] = torch.where(first, A, words[:, 0])
    others = torch.randint(4, (count,), generator=chance)
    order = torch.rand(count, PATCHES - 1, generator=chance).argsort(dim=1).argsort(dim=1)
    words[:, 1:] = torch.where(order < others[:, None], B, words[:, 1:])
    return words, first, others


def directions(*, right_angles: bool) -> Tensor:
    """A dictionary of patches of norm one (d, d)."""
    chance = torch.Generator().manual_seed(1)
    drawn = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=chance)
    return torch.linalg.qr(drawn)[0] if right_angles else F.normalize(drawn, dim=1)


def answer(v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What v_1 gets by softmax(alpha (v_1^T a)(b^T v_j)), along b: (B,)."""
    q = (v[:, :1] @ a)[..., None] * b  # (B, 1, d)
    return attend_explicitly(q[:, None], v[:, None], v[:, None], scale=ALPHA)[:, 0, 0] @ b


def by_convolution(v: Tensor, a: Tensor, b: Tensor, reach: int) -> Tensor:
    """n v_1^T a + the sum of b^T v_j - n, of the patches in reach: above 0 where both are there."""
    return PATCHES * v[:, 0] @ a + (v[:, 1:reach] @ b).sum(dim=1) - PATCHES - 0.5


def best_linear(v: Tensor, wanted: Tensor) -> Tensor:
    """By least squares from all patches and a constant: no convolution without a threshold is nearer."""
    x = torch.cat([v.flatten(1), torch.ones(len(v), 1, dtype=v.dtype)], dim=1)
    return x @ torch.linalg.lstsq(x, wanted[:, None], driver="gelsd").solution[:, 0]


def right(said: Tensor, true: Tensor) -> float:
    return (said == true).double().mean().item()


@in_our_style
def draw(got: Tensor, first: Tensor, others: Tensor, decided: dict[str, float]) -> Figure:
    figure = canvas(7.6, 2.8)
    left, right_axis = figure.subplots(1, 2, width_ratios=[1.2, 1])
    for is_a, colour in ((True, LINES[0]), (False, LINES[1])):
        means = [got[(first == is_a) & (others == n)].mean().item() for n in range(4)]
        left.plot(range(4), means, "o-", color=colour, label="v_1 is a" if is_a else "v_1 is not a")
    left.plot(range(4), range(4), ":", color=FAINT, label="the count, as claimed")
    left.set(
        xticks=range(4), xlabel="patches equal to b", ylim=(-0.1, 3.1), title="what attention gives, along b"
    )
    left.legend()
    right_axis.barh(
        list(decided), list(decided.values()), color=[LINES[0], LINES[0], LINES[1], LINES[1], FAINT]
    )
    right_axis.set(xlim=(0, 1.02), xlabel="right, with a threshold")
    right_axis.invert_yaxis()
    return figure
