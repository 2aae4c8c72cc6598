"""Lab `association`: the two functions of note 004 that attention can represent and a convolution cannot.

    association   f(v_1, ..., v_n) = sum of the v_j that equal U v_1, by softmax(alpha v_1^T U^-1 v_j)
    double if     f(v_1, ..., v_n) = sum of 1[v_1 = a and v_j = b], by softmax(alpha (v_1^T a)(b^T v_j))

Each condition that the slides do not state is tested separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model import attend_explicitly
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import OURS, Verdict, identity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "association"
TITLE = "attention associates patches"
NOTE = '004 "Self-Attention can associate patches"'
CLAIM = (
    'A function that can be easily represented by self-attention, but not convolution is the "association" '
    'function [and] the "double if" function.'
)
ACCEPTS = ""

_WIDTH, _PATCHES = 16, 16
_ALPHA, _ALPHAS = 100.0, [1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
_SINK_COSINE = 0.95  # the score of the sink: below a match, above random patches
_MAX_CORRECT, _MIN_WRONG = (
    0.01,
    0.3,
)  # relative errors of a function that is represented, and of one that is not
_A, _B = 0, 1  # indices of a and b in the dictionary
_CORRECT = 0.99


@dataclass(frozen=True)
class _AssociationSample:
    """Patches of norm one and the value of f."""

    v: Tensor
    """(B, n, d) patches."""
    U: Tensor
    target: Tensor
    """(B, d) f."""


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    count = 20_000 if size == "full" else 2_000
    one_match = draw_sample(count, 1)
    stretched = draw_sample(count, 1, orthogonal=False)
    three = draw_sample(count, 3)
    zero_or_one = draw_sample(count, "none or one")
    inverse = zero_or_one.U.inverse()
    errors = {
        "one match": _relative_error(_attend(one_match, inverse), one_match.target),
        "one match, U not orthogonal": _relative_error(
            _attend(stretched, stretched.U.inverse()), stretched.target
        ),
        "the same with U^T": _relative_error(_attend(stretched, stretched.U.T), stretched.target),
        "three matches": _relative_error(_attend(three, inverse), three.target),
        "none or one match": _relative_error(_attend(zero_or_one, inverse), zero_or_one.target),
        "the same with a sink": _relative_error(_attend(zero_or_one, inverse, sink=True), zero_or_one.target),
        "convolution, one match": _best_linear_error(one_match),
        "convolution, none or one": _best_linear_error(zero_or_one),
    }
    by_alpha = [_relative_error(_attend(one_match, inverse, alpha), one_match.target) for alpha in _ALPHAS]
    double_if = _measure_double_if(count)
    return LabResult(
        number=errors["the same with a sink"],
        unit="relative error of attention with a sink token, with no match or one (convolution: "
        f"{errors['convolution, none or one']:.2f})",
        n=count,
        setting=f"{_PATCHES} random patches of norm one and width {_WIDTH}, alpha = {_ALPHA:g}; a "
        "convolution "
        "is the best linear map of all patches, fitted on half of the samples.",
        figure=draw(by_alpha, errors, double_if),
        numbers={
            "error": errors,
            "error by alpha": dict(zip(map(str, _ALPHAS), by_alpha, strict=True)),
            "double if": double_if,
        },
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """A condition is needed if the error is large without it and small with it."""
    error, double = numbers["error"], numbers["double if"]
    conditions = []
    if error["one match, U not orthogonal"] > _MIN_WRONG and error["the same with U^T"] < _MAX_CORRECT:
        conditions.append("U is orthogonal (or U^T replaces U^-1)")
    if error["three matches"] > _MIN_WRONG:
        conditions.append("at most one patch matches")
    if error["none or one match"] > _MIN_WRONG and error["the same with a sink"] < _MAX_CORRECT:
        conditions.append("a sink token takes the attention where none matches")
    convolution, sink = error["convolution, none or one"], error["the same with a sink"]
    accuracy = double["accuracy"]
    return Verdict(
        [
            identity(
                "attention represents the association",
                max(error["one match"], sink) <= _MAX_CORRECT,
                f"relative error {sink:.1e} with no match or one, {error['three matches']:.2f} with three",
                f"{_MAX_CORRECT:g}",
                OURS,
                ", ".join(conditions),
            ),
            identity(
                "a convolution does not",
                convolution >= _MIN_WRONG,
                f"relative error {convolution:.2f}; {error['convolution, one match']:g} with exactly one "
                "match",
                f"{_MIN_WRONG:g}",
                OURS,
            ),
            identity(
                "attention counts the patches equal to b",
                double["error as a count"] <= _MAX_CORRECT,
                f"relative error {double['error as a count']:.2f}: it shows whether b occurs, not how often",
                f"{_MAX_CORRECT:g}",
                OURS,
            ),
            identity(
                "with a threshold at 0.5 attention decides the double if",
                accuracy["attention"] >= _CORRECT,
                f"{accuracy['attention']:.1%} correct, {accuracy['random directions']:.1%} if different "
                "patches "
                "are not orthogonal",
                f"{_CORRECT:.0%}",
                OURS,
                "different patches are orthogonal" if accuracy["random directions"] < _CORRECT else "",
            ),
            identity(
                "a convolution with a threshold does not",
                accuracy["convolution"] < _CORRECT,
                f"{accuracy['convolution']:.1%} correct if it reaches all patches",
                f"{_CORRECT:.0%}",
                OURS,
            ),
        ]
    )


# ---- association ----------------------------------------------------------------------------


def draw_sample(count: int, matches: int | str, *, orthogonal: bool = True) -> _AssociationSample:
    """Random patches of norm one, of which `matches` equal U v_1."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=rng)

    U, _ = torch.linalg.qr(normal(_WIDTH, _WIDTH))
    v = F.normalize(normal(count, _PATCHES, _WIDTH), dim=-1)
    if not orthogonal:  # stretches half of the directions and shrinks the others
        stretch = torch.full((_WIDTH,), 3.0, dtype=torch.float64)
        stretch[::2] = 0.5
        U = U * stretch
        v[:, 0] = _with_unit_image(v[:, 0], stretch)
    match = v[:, 0] @ U.T  # (B, d), of norm one
    counts = torch.randint(2, (count,), generator=rng) if isinstance(matches, str) else matches
    order = torch.rand(count, _PATCHES - 1, generator=rng).argsort(dim=1).argsort(dim=1)
    is_match = order < torch.as_tensor(counts).reshape(-1, 1)  # at random positions
    v[:, 1:] = torch.where(is_match[..., None], match[:, None], v[:, 1:])
    return _AssociationSample(v, U, is_match.sum(dim=1, keepdim=True) * match)


def _with_unit_image(v: Tensor, stretch: Tensor) -> Tensor:
    """Vectors of norm one whose product with U has norm one: the slide assumes both."""
    short = stretch < 1
    a, b = F.normalize(v * short, dim=-1), F.normalize(v * ~short, dim=-1)
    small, large = stretch.min() ** 2, stretch.max() ** 2
    fraction = (1 - small) / (large - small)  # of the squared norm that is stretched
    return (1 - fraction).sqrt() * a + fraction.sqrt() * b


def _attend(
    sample: _AssociationSample, matrix: Tensor, alpha: float = _ALPHA, *, sink: bool = False
) -> Tensor:
    """Attention output of v_1 with weights softmax(alpha v_1^T matrix v_j): (B, d).

    A sink is an extra token with value zero, whose score lies between a match and the other patches.
    """
    q = (sample.v[:, :1] @ matrix)[:, None]  # (B, 1, 1, d)
    k = v = sample.v[:, None]  # (B, 1, n, d)
    bias = None
    if sink:
        k = v = F.pad(v, (0, 0, 0, 1))
        bias = torch.zeros(v.shape[2], dtype=v.dtype)
        bias[-1] = alpha * _SINK_COSINE
    return attend_explicitly(q, k, v, scale=alpha, bias=bias)[:, 0, 0]


def _best_linear_error(sample: _AssociationSample) -> float:
    """Error of the best linear map of all patches, fitted on half of the samples.

    The convolution of note 004 is a sum of patches with position-dependent weights, a special case.
    """
    x, train_count = sample.v.flatten(1), len(sample.v) // 2
    solution = torch.linalg.lstsq(x[:train_count], sample.target[:train_count]).solution
    return _relative_error(x[train_count:] @ solution, sample.target[train_count:])


def _relative_error(output: Tensor, target: Tensor) -> float:
    """Root mean square error over that of the target; rounding errors count as 0."""
    fraction = ((output - target).square().sum() / target.square().sum()).sqrt().item()
    return fraction if fraction > 1e-12 else 0.0


# ---- double if ------------------------------------------------------------------------------


def _measure_double_if(count: int) -> dict[str, Any]:
    """Accuracy and error of attention and of convolutions; patches are directions of a dictionary."""
    rng = torch.Generator().manual_seed(0)
    directions = torch.randn(_WIDTH, _WIDTH, dtype=torch.float64, generator=rng)
    orthogonal, oblique = torch.linalg.qr(directions)[0].T, F.normalize(directions, dim=1)
    indices = torch.randint(2, _WIDTH, (count, _PATCHES), generator=rng)
    b_count = torch.randint(4, (count,), generator=rng)
    order = torch.rand(count, _PATCHES - 1, generator=rng).argsort(dim=1).argsort(dim=1)
    indices[:, 1:][order < b_count[:, None]] = _B
    first_is_a = torch.rand(count, generator=rng) < 0.5
    indices[first_is_a, 0] = _A
    expected = first_is_a & (b_count > 0)
    output = _attend_along_b(orthogonal, indices)
    target = (first_is_a * b_count).double()
    v, a, b = orthogonal[indices], orthogonal[_A], orthogonal[_B]
    # n v_1^T a + sum of b^T v_j - n: above 0 if both a and b occur.
    by_convolution = _PATCHES * v[:, 0] @ a + (v[:, 1:] @ b).sum(dim=1) - _PATCHES > 0.5
    return {
        "accuracy": {
            "attention": _accuracy_of(output > 0.5, expected),
            "random directions": _accuracy_of(_attend_along_b(oblique, indices) > 0.5, expected),
            "convolution": _accuracy_of(by_convolution, expected),
            "always no": _accuracy_of(torch.zeros_like(expected), expected),
        },
        "error as a count": _relative_error(output, target),
        "output": {
            name: [output[(first_is_a == is_a) & (b_count == n)].mean().item() for n in range(4)]
            for name, is_a in (("v_1 is a", True), ("v_1 is not a", False))
        },
    }


def _attend_along_b(dictionary: Tensor, indices: Tensor) -> Tensor:
    """The attention output of v_1 with Q K^T = alpha a b^T, projected on b: (B,)."""
    v, a, b = dictionary[indices], dictionary[_A], dictionary[_B]
    q = ((v[:, :1] @ a)[..., None] * b)[:, None]  # (B, 1, 1, d)
    return attend_explicitly(q, v[:, None], v[:, None], scale=_ALPHA)[:, 0, 0] @ b


def _accuracy_of(predicted: Tensor, expected: Tensor) -> float:
    return (predicted == expected).double().mean().item()


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(by_alpha: list[float], errors: dict[str, float], double_if: Mapping[str, Any]) -> Figure:
    figure = new_figure(8.6, 2.9)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1.2, 1.2])
    left.plot(_ALPHAS, by_alpha, "o-", color=LINES[0], markersize=4)
    left.set(xscale="log", yscale="log", xlabel="alpha", ylabel="relative error")
    left.set_title("association, one match")
    colors = [LINES[1] if name.startswith("conv") else LINES[0] for name in errors]
    middle.barh(list(errors), [max(value, 1e-16) for value in errors.values()], color=colors)
    middle.set(xscale="log", xlim=(1e-16, 10), xlabel=f"relative error, alpha = {_ALPHA:g}")
    middle.invert_yaxis()
    for (name, means), color in zip(double_if["output"].items(), LINES, strict=False):
        right.plot(range(4), means, "o-", color=color, label=name)
    right.plot(range(4), range(4), ":", color=FAINT, label="the count, as claimed")
    right.set(xticks=range(4), xlabel="patches equal to b", ylim=(-0.1, 3.1))
    right.set_title("double if, projected on b")
    right.legend(loc="upper left")
    return figure
