"""Lab `double-if`: the second function of note 004 that attention can represent and a convolution cannot.

f(v_1, ..., v_n) = sum over j of 1[v_1 = a and v_j = b], by softmax(alpha (v_1^T a)(b^T v_j)), projected on b.
The patches come from a dictionary of directions that includes a and b and is orthogonal or random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.experiment.interval import wilson_interval
from vitrail.model import attend_explicitly
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import Statement, Verdict, decide, fact, reaches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "double-if"
TITLE = "attention computes a double if"
NOTE = '004 "Self-Attention can associate patches", the second'
CLAIM = (
    "With Q K^T = alpha a b^T and a large alpha, self-attention counts the patches equal to b if v_1 equals "
    "a; a convolution cannot."
)
ACCEPTS = ""

_WIDTH, _PATCHES = 16, 16
_ALPHA = 100.0
_A, _B = 0, 1  # indices of a and b in the dictionary
_CORRECT, _MAX_COUNT_ERROR = 0.99, 0.1
_REACH = 2  # patches that a convolution with as many parameters covers: v_1 and one more


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    count = 20_000 if size == "full" else 2_000
    dictionary = _build_dictionary(orthogonal=True)
    indices, first_is_a, b_count = _draw_sample(count)
    expected = first_is_a & (b_count > 0)
    v, a, b = dictionary[indices], dictionary[_A], dictionary[_B]
    output = _attend_along_b(v, a, b)
    oblique = _build_dictionary(orthogonal=False)
    accuracy = {
        "attention": _accuracy_of(output > 0.5, expected),
        "attention, random directions": _accuracy_of(
            _attend_along_b(oblique[indices], oblique[_A], oblique[_B]) > 0.5, expected
        ),
        "convolution of all patches": _accuracy_of(_convolve(v, a, b, _PATCHES) > 0, expected),
        f"convolution of {_REACH} patches": _accuracy_of(_convolve(v, a, b, _REACH) > 0, expected),
        "always no": _accuracy_of(torch.zeros_like(expected), expected),
    }
    target_count = (first_is_a * b_count).double()
    target_rms = target_count.square().mean().sqrt()
    count_error = ((output - target_count).square().mean().sqrt() / target_rms).item()
    linear_error = ((_best_linear(v, target_count) - target_count).square().mean().sqrt() / target_rms).item()
    leak = output[~first_is_a & (b_count > 0)].max().item()
    max_output = output[first_is_a & (b_count > 1)].max().item()
    sentence = (
        f"Projected on b, attention gives at most {max_output:.3f} if v_1 = a and b occurs, no matter how "
        "often, so it shows whether b occurs and not how many times: as a count its relative error is "
        f"{count_error:.2f}, that of the best linear map {linear_error:.2f}. If v_1 is not a, all patches "
        f"get equal weight and up to {leak:.2f} leaks through: a threshold at 0.5 classifies "
        f"{accuracy['attention']:.1%} correctly, and {accuracy['attention, random directions']:.1%} if the "
        "directions are not orthogonal. A convolution that reaches all patches, with a threshold, also "
        f"classifies {accuracy['convolution of all patches']:.1%} correctly; one that reaches {_REACH} "
        f"patches, {accuracy[f'convolution of {_REACH} patches']:.1%}; always answering no, "
        f"{accuracy['always no']:.1%}."
    )
    return LabResult(
        number=accuracy["attention"],
        unit="accuracy, attention with a threshold (convolution of all patches with a threshold: "
        f"{accuracy['convolution of all patches']:.3f})",
        n=count,
        interval=wilson_interval(accuracy["attention"], count),
        sentence=sentence,
        figure=draw(output, first_is_a, b_count, accuracy),
        numbers={
            "accuracy": accuracy,
            "relative error as a count": count_error,
            "best linear map": linear_error,
            "leak": leak,
            "samples": count,
        },
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Attention must count and classify, and a convolution must not."""
    accuracy, error = numbers["accuracy"], numbers["relative error as a count"]
    small_reach = accuracy[f"convolution of {_REACH} patches"]
    full_reach = accuracy["convolution of all patches"]
    random_directions = accuracy["attention, random directions"]
    condition = "different patches are orthogonal" if random_directions < _CORRECT else ""

    def correct(text: str, fraction: float) -> Statement:
        return reaches(text, fraction, wilson_interval(fraction, numbers["samples"]), _CORRECT)

    def wrong(text: str, fraction: float) -> Statement:
        found = correct(text, fraction)
        return replace(found, true=None if found.true is None else not found.true)

    decides = correct(
        "with a threshold at 0.5 it decides whether v_1 = a and b occurs", accuracy["attention"]
    )
    evidence = f"{decides.evidence}; with random directions {random_directions:.1%}"
    return decide(
        [
            fact(
                "self-attention counts the patches equal to b",
                error <= _MAX_COUNT_ERROR,
                f"relative error {error:.2f}, threshold {_MAX_COUNT_ERROR:g}: it shows whether b occurs, not "
                "how often",
            ),
            replace(decides, evidence=evidence, condition=condition),
            wrong(f"a convolution that reaches {_REACH} patches does not", small_reach),
            wrong("a convolution that reaches all patches does not", full_reach),
        ]
    )


def _draw_sample(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices into the dictionary (B, n); whether the first patch is a; how many others are b, 0 to 3."""
    rng = torch.Generator().manual_seed(0)
    indices = torch.randint(2, _WIDTH, (count, _PATCHES), generator=rng)  # neither a nor b
    first_is_a = torch.rand(count, generator=rng) < 0.5
    indices[:, 0] = torch.where(first_is_a, _A, indices[:, 0])
    b_count = torch.randint(4, (count,), generator=rng)
    order = torch.rand(count, _PATCHES - 1, generator=rng).argsort(dim=1).argsort(dim=1)
    indices[:, 1:] = torch.where(order < b_count[:, None], _B, indices[:, 1:])
    return indices, first_is_a, b_count


def _build_dictionary(*, orthogonal: bool) -> Tensor:
    """A dictionary of patches of norm one (d, d)."""
    rng = torch.Generator().manual_seed(1)
    directions_drawn = torch.randn(_WIDTH, _WIDTH, dtype=torch.float64, generator=rng)
    return torch.linalg.qr(directions_drawn)[0] if orthogonal else F.normalize(directions_drawn, dim=1)


def _attend_along_b(v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Attention output of v_1 with softmax(alpha (v_1^T a)(b^T v_j)), projected on b: (B,)."""
    q = (v[:, :1] @ a)[..., None] * b  # (B, 1, d)
    return attend_explicitly(q[:, None], v[:, None], v[:, None], scale=_ALPHA)[:, 0, 0] @ b


def _convolve(v: Tensor, a: Tensor, b: Tensor, reach: int) -> Tensor:
    """n v_1^T a + sum of b^T v_j - n over the patches in reach: above 0 if both a and b occur."""
    return _PATCHES * v[:, 0] @ a + (v[:, 1:reach] @ b).sum(dim=1) - _PATCHES - 0.5


def _best_linear(v: Tensor, target: Tensor) -> Tensor:
    """Least-squares prediction from all patches and a constant, which includes every linear convolution."""
    x = torch.cat([v.flatten(1), torch.ones(len(v), 1, dtype=v.dtype)], dim=1)
    return x @ torch.linalg.lstsq(x, target[:, None], driver="gelsd").solution[:, 0]


def _accuracy_of(predicted: Tensor, expected: Tensor) -> float:
    return (predicted == expected).double().mean().item()


@styled
def draw(output: Tensor, first_is_a: Tensor, b_count: Tensor, accuracy: dict[str, float]) -> Figure:
    figure = new_figure(7.6, 2.8)
    left, right_axis = figure.subplots(1, 2, width_ratios=[1.2, 1])
    for is_a, color in ((True, LINES[0]), (False, LINES[1])):
        means = [output[(first_is_a == is_a) & (b_count == n)].mean().item() for n in range(4)]
        left.plot(range(4), means, "o-", color=color, label="v_1 is a" if is_a else "v_1 is not a")
    left.plot(range(4), range(4), ":", color=FAINT, label="the count, as claimed")
    left.set(
        xticks=range(4),
        xlabel="patches equal to b",
        ylim=(-0.1, 3.1),
        title="attention output, projected on b",
    )
    left.legend()
    right_axis.barh(
        list(accuracy), list(accuracy.values()), color=[LINES[0], LINES[0], LINES[1], LINES[1], FAINT]
    )
    right_axis.set(xlim=(0, 1.02), xlabel="accuracy, with a threshold")
    right_axis.invert_yaxis()
    return figure
