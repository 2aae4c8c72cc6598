"""Lab `filters`: the principal components of E of a trained model, compared with those of random filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.base.errors import printable
from vitrail.model import ViT
from vitrail.views import filters
from vitrail.views.canvas import DIVERGING, FAINT, LINES, new_figure, styled
from vitrail.views.sample import sample_model
from vitrail.weights.load import load
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import TOY, Statement, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "filters"
TITLE = "E holds a basis of patches"
NOTE = '002 "What does the E matrix do?"'
CLAIM = (
    "The components resemble plausible basis functions for a low-dimensional representation of the fine "
    "structure within each patch."
)
ACCEPTS = "a trained model, as every command takes it"

_RANDOM = {"full": 200, "small": 20}  # sets of random filters


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    """`data` is a model; by default the package's sample model, which is small and trained on MNIST."""
    model = (sample_model() if data is None else load(data)).model
    name = "the sample model" if data is None else printable(Path(data).name)
    weight = model.get_parameter("tokens.proj.weight")
    trained = filters.compute(model)
    random = [_random_filters(model, seed) for seed in range(_RANDOM[size])]
    numbers: dict[str, Any] = {
        "model": name,
        "filters": len(weight),
        "pixels": weight[0].numel(),
        "smoothness": smoothness(trained),
        "random smoothness": [smoothness(one) for one in random],
        "needed": trained.needed,
        "random needed": [one.needed for one in random],
    }
    return LabResult(
        number=numbers["smoothness"],
        unit=f"correlation of neighboring pixels in the principal components of E "
        f"(random filters {fmean(numbers['random smoothness']):.2f})",
        n=numbers["filters"],
        setting=f"{name}: {len(weight)} filters of {weight[0].numel()} values. This is one model.",
        figure=draw([random[0], trained], numbers),
        numbers=numbers,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """The components must be smooth and few, compared with those of random filters."""
    few = is_outside(numbers["needed"], numbers["random needed"])
    # After centering, there is one component fewer than filters.
    total = min(numbers["pixels"], numbers["filters"] - 1)
    return Verdict(
        [
            _beside_random(
                "the components are smooth: neighboring pixels correlate, weighted by variance",
                is_outside(numbers["smoothness"], numbers["random smoothness"]),
                f"{numbers['smoothness']:.2f}",
                numbers["random smoothness"],
            ),
            _beside_random(
                "few components explain 90 % of the variance",
                None if few is None else not few,
                f"{numbers['needed']} of {total}",
                numbers["random needed"],
            ),
        ]
    )


def _beside_random(text: str, true: bool | None, evidence: str, random: Sequence[float]) -> Statement:
    low, high = np.quantile(random, [0.025, 0.975])
    source = f"central 95 % of {len(random)} sets of random filters"
    return Statement(f"in this model, {text}", TOY, true, evidence, f"{low:.3g} to {high:.3g}", source)


def is_outside(value: float, random: Sequence[float]) -> bool | None:
    """Whether a value is above the central 95 % of random ones; False if below, None if among them."""
    low, high = np.quantile(random, [0.025, 0.975])
    return None if low <= value <= high else bool(value > high)


def smoothness(components: filters.Filters) -> float:
    """The correlation of neighboring pixels in all components, weighted by variance as `vitrail inspect` "
    "does."""
    weights = components.explained_variance
    return float((components.smoothness * weights).sum() / weights.sum())


def _random_filters(model: ViT, seed: int) -> filters.Filters:
    """The components of as many random filters of the same shape."""
    rng = torch.Generator().manual_seed(seed)
    weight = model.get_parameter("tokens.proj.weight")
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=rng))
        return filters.compute(model)
    finally:
        with torch.no_grad():
            weight.copy_(before)


# ---- summary and figure ---------------------------------------------------------------------


@styled
def draw(shown: Sequence[filters.Filters], numbers: Mapping[str, Any]) -> Figure:
    """The first components of random filters and of the model, and how smooth they are."""
    figure = new_figure(8.4, 2.4)
    parts: Any = figure.subfigures(1, 2, width_ratios=[1.7, 1])
    left, right = parts
    axes = left.subplots(2, 8)
    for row, (title, found) in enumerate(zip(("random", "trained"), shown, strict=True)):
        in_color = found.components.shape[1] == 3
        tiles = filters.as_colors(found) if in_color else found.components.mean(axis=1)
        for axis, tile in zip(axes[row], tiles, strict=False):
            limit = float(np.abs(tile).max())
            axis.imshow(tile, cmap=DIVERGING, vmin=-limit, vmax=limit)
        for axis in axes[row]:
            axis.set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(title)
    left.suptitle("first principal components of E", fontsize=9)
    axis = right.subplots()
    axis.hist(numbers["random smoothness"], bins=20, color=FAINT, label="random filters")
    axis.axvline(numbers["smoothness"], color=LINES[0], label="trained")
    axis.set(xlabel="correlation of neighboring pixels", yticks=[])
    axis.legend(fontsize=7.5)
    return figure
