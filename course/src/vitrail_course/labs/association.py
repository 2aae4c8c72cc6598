"""Lab `association`: the first function of note 004 that attention can represent and a convolution cannot.

f(v_1, ..., v_n) = sum of the v_j that equal U v_1, by softmax(alpha v_1^T U^-1 v_j). Each condition that the
slide does not state is tested separately.
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
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import Verdict, decide, fact

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "association"
TITLE = "attention associates patches"
NOTE = '004 "Self-Attention can associate patches", the first'
CLAIM = (
    "With Q K^T = alpha U^-1 and a large alpha, self-attention sums the patches that equal U v_1; a "
    "convolution cannot."
)
ACCEPTS = ""

_WIDTH, _PATCHES = 16, 16
_ALPHA = 100.0
_SINK_COSINE = 0.95  # the score of the sink: below a match, above random patches
_MAX_CORRECT, _MIN_WRONG = 0.01, 0.3
_ROUNDING = 1e-12


@dataclass(frozen=True)
class _AssociationSample:
    """Patches of norm one and the value of f."""

    v: Tensor
    """(B, n, d) patches."""
    U: Tensor
    target: Tensor
    """(B, d) f."""


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    count = 20_000 if size == "full" else 1_500
    alphas = [1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
    one_match = draw_sample(count, 1)
    zero_or_one = draw_sample(count, "none or one")
    by_alpha = [
        _relative_error(_attend(one_match, one_match.U.inverse(), alpha), one_match.target)
        for alpha in alphas
    ]
    non_orthogonal = draw_sample(count, 1, orthogonal=False)
    errors = {
        "one match": _relative_error(_attend(one_match, one_match.U.inverse()), one_match.target),
        "one match, U not orthogonal": _relative_error(
            _attend(non_orthogonal, non_orthogonal.U.inverse()), non_orthogonal.target
        ),
        "the same with U^T": _relative_error(
            _attend(non_orthogonal, non_orthogonal.U.T), non_orthogonal.target
        ),
        "three matches": _relative_error(_attend(s := draw_sample(count, 3), s.U.inverse()), s.target),
        "none or one match": _relative_error(
            _attend(zero_or_one, zero_or_one.U.inverse()), zero_or_one.target
        ),
        "the same with a sink": _relative_error(
            _attend(zero_or_one, zero_or_one.U.inverse(), sink=True), zero_or_one.target
        ),
        "convolution, one match": _best_linear_error(one_match),
        "convolution, none or one": _best_linear_error(zero_or_one),
    }
    sentence = (
        f"With exactly one match and an orthogonal U, the relative error is {errors['one match']:.1e} at "
        f"alpha = {_ALPHA:g} and {by_alpha[0]:.2f} at alpha = 1; but then f is U v_1, and a convolution has "
        f"no error either. If U is not orthogonal, the error is {errors['one match, U not orthogonal']:.2f}, "
        f"and {errors['the same with U^T']:.1e} with U^T instead of U^-1. Three matches give their mean, not "
        f"their sum: error {errors['three matches']:.2f}. If there may be no match, the error is "
        f"{errors['none or one match']:.2f} for attention alone, {errors['the same with a sink']:.1e} with a "
        f"sink token, and {errors['convolution, none or one']:.2f} for the best linear map of all patches, "
        "which includes every convolution."
    )
    return LabResult(
        number=errors["the same with a sink"],
        unit="relative error of attention with a sink token, with no match or one (convolution: "
        f"{errors['convolution, none or one']:.2f})",
        n=count,
        sentence=sentence,
        figure=draw(alphas, by_alpha, errors),
        numbers={**errors, "alpha": dict(zip(map(str, alphas), by_alpha, strict=True))},
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """A condition is needed if the error is large without it and small with it."""
    conditions = []
    if numbers["one match, U not orthogonal"] > _MIN_WRONG and numbers["the same with U^T"] < _MAX_CORRECT:
        conditions.append("U is orthogonal (or U^T replaces U^-1)")
    if numbers["three matches"] > _MIN_WRONG:
        conditions.append("at most one patch matches")
    if numbers["none or one match"] > _MIN_WRONG and numbers["the same with a sink"] < _MAX_CORRECT:
        conditions.append("a sink token takes the attention where none matches")
    convolution, sink = numbers["convolution, none or one"], numbers["the same with a sink"]
    return decide(
        [
            fact(
                "self-attention represents f",
                max(numbers["one match"], sink) <= _MAX_CORRECT,
                f"relative error {sink:.1e} with no match or one, {numbers['one match']:.1e} with one, "
                f"threshold {_MAX_CORRECT:g}; {numbers['three matches']:.2f} with three",
                ", ".join(conditions),
            ),
            fact(
                "a convolution does not",
                convolution >= _MIN_WRONG,
                f"relative error {convolution:.2f} with no match or one, threshold {_MIN_WRONG:g}; none with "
                "exactly one",
            ),
        ]
    )


# ---- patches --------------------------------------------------------------------------------


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


# ---- attention and convolution --------------------------------------------------------------


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
    return fraction if fraction > _ROUNDING else 0.0


@styled
def draw(alphas: list[float], by_alpha: list[float], errors: dict[str, float]) -> Figure:
    figure = new_figure(7.6, 3.0)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.3])
    left.plot(alphas, by_alpha, "o-", color=LINES[0], markersize=4)
    left.set(xscale="log", yscale="log", xlabel="alpha", ylabel="error", title="one match, U orthogonal")
    colors = [LINES[1] if name.startswith("conv") else LINES[0] for name in errors]
    right.barh(list(errors), [max(value, 1e-16) for value in errors.values()], color=colors)
    right.set(xscale="log", xlim=(1e-16, 10), xlabel=f"error, alpha = {_ALPHA:g}")
    right.invert_yaxis()
    return figure
