"""Deletion and insertion scores of attribution maps (Petsiuk et al. 2018).

Deletion covers patches in the order of the map, the most important first: for a good map the probability of
the class drops early and the area under the curve is small. Insertion starts from an image of one color and
restores patches in the same order: the probability rises early and the area is large. Random maps serve as
the control.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.views import attribution
from vitrail.views.canvas import FAINT, LINES, Axes, Figure, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import (
    BATCH,
    Target,
    check_classifier,
    choose_target,
    cover,
    device_of,
    log_probabilities,
)
from vitrail.weights.bundle.scores import Activation

Areas = dict[str, NDArray[np.float64]]

_MAX_POINTS = 28  # steps until all patches are covered
_DASHES = ("-", "--", ":")


@dataclass(frozen=True, eq=False)
class Scoring:
    """Deletion and insertion curves by method, and the areas under them."""

    fraction: NDArray[np.float64]
    """Fraction of the patches covered, or restored: (points + 1,), from 0 to 1."""
    deletion: dict[str, NDArray[np.float32]]
    """Probability of the class as patches are covered: (B, points + 1) by method."""
    insertion: dict[str, NDArray[np.float32]]
    """Probability of the class as patches are restored: (B, points + 1) by method."""

    @property
    def images(self) -> int:
        return len(next(iter(self.deletion.values())))

    def areas(self, curves: Mapping[str, NDArray[np.float32]]) -> Areas:
        """The area under the curve of each image, (B,) by method: a mean probability."""
        return {
            name: np.asarray(np.trapezoid(curve, self.fraction, axis=1)) for name, curve in curves.items()
        }


def compute(
    model: ViT,
    images: Tensor,
    maps: Mapping[str, NDArray[np.floating]],
    *,
    target: Target = None,
    activation: Activation = "softmax",
) -> Scoring:
    """Compute both curves for every method.

    Args:
        maps: (B, h, w) by method, as returned by `attribution.compute`.
        target: the class whose probability is measured.
        activation: how logits become probabilities (`bundle.scores.activation`).
    """
    check_classifier(model, images)
    N = model.config.patches
    _check_maps(model, images, maps)
    counts = np.round(np.linspace(0, N, min(N, _MAX_POINTS) + 1)).astype(int)  # of patches at each point
    images = images.detach().to(device_of(model))
    deletion, insertion = {}, {}
    with eval_mode(model):
        classes = choose_target(log_probabilities(model, images, activation), target)
        for name, values in maps.items():
            rank = torch.from_numpy(_ranks(np.asarray(values))).to(images.device)
            selected = rank[:, None] < torch.from_numpy(counts).to(images.device)[None, :, None, None]
            deletion[name] = _probabilities(model, images, selected, classes, activation)
            insertion[name] = _probabilities(model, images, ~selected, classes, activation)
    return Scoring(counts / N, deletion, insertion)


def _ranks(maps: NDArray[np.floating]) -> NDArray[np.int64]:
    """The rank of each patch in its map, 0 for the largest value: (B, h, w).

    Ties are broken at random; in row order, a map of zeros would favor the top of the image.
    """
    flat = maps.reshape(len(maps), -1)
    tie_breaks = np.random.default_rng(0).random(flat.shape)
    order = np.lexsort((tie_breaks, -flat), axis=1)
    return np.argsort(order, axis=1).reshape(maps.shape)


def _probabilities(
    model: ViT, images: Tensor, hidden: Tensor, target: Tensor, activation: Activation
) -> NDArray[np.float32]:
    """Probability of the class with the `hidden` patches (B, points + 1, h, w) covered: (B, points + 1)."""
    B, count = hidden.shape[:2]
    parts = []
    for pairs in torch.arange(B * count, device=images.device).split(BATCH):
        image, point = pairs // count, pairs % count
        covered = cover(images[image], hidden[image, point], model.config.patch_pixels)
        outputs = log_probabilities(model, covered, activation)
        parts.append(outputs.gather(1, target[image][:, None])[:, 0].exp())
    return torch.cat(parts).view(B, count).cpu().numpy()


def _check_maps(model: ViT, images: Tensor, maps: Mapping[str, NDArray[np.floating]]) -> None:
    expected = (len(images), *model.config.grid)
    if not maps:
        raise InputError("There are no maps to score; compute some with attribution.compute.")
    for name, values in maps.items():
        problem = f"it has shape {np.shape(values)}"
        if np.shape(values) == expected:
            problem = "" if np.isfinite(values).all() else "it contains NaN or infinity"
        if problem:
            raise InputError(
                f"The map {printable(name)!r} must hold one finite number per image and patch, {expected}, "
                f"but {problem}; compute it with attribution.compute on the same images."
            )


# ---- the figure -----------------------------------------------------------------------------


@styled
def draw(scores: Scoring) -> Figure:
    """Draw two panels with one line per method: the mean over images, with its standard error as a band."""
    images = f"{scores.images} image{'s' * (scores.images > 1)}"
    figure = new_figure(9.0, 4.2, f"Covering and restoring patches in the order of each map ({images})")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_panel(left, scores, scores.deletion, "Deletion: lower is better", "covered")
    _draw_panel(right, scores, scores.insertion, "Insertion: higher is better", "restored")
    left.set(ylabel="probability of the class", ylim=(-0.02, 1.02))
    return figure


def _draw_panel(
    axis: Axes, scores: Scoring, curves: Mapping[str, NDArray[np.float32]], title: str, done: str
) -> None:
    named = [name for name in curves if name != "random"]
    for name, area in scores.areas(curves).items():
        color, dash = FAINT, "--"
        if name in named:
            again, index = divmod(named.index(name), len(LINES))
            color, dash = LINES[index], _DASHES[again % len(_DASHES)]
        x, mean, error = scores.fraction, curves[name].mean(axis=0), _standard_error(curves[name])
        label = f"{printable(name, 30)}: {_with_error(area)}"
        axis.plot(x, mean, color=color, linestyle=dash, label=label)
        if len(area) > 1:
            axis.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
    axis.set(title=title, xlabel=f"fraction of patches {done}", xlim=(0, 1))
    legend = axis.legend(title="area under the curve", fontsize=8, title_fontsize=8, loc="upper center")
    legend.set_bbox_to_anchor((0.5, -0.16))


def _standard_error(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """The standard error of the mean over images (axis 0). Undefined for one image: NaN."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1) / np.sqrt(len(values)))


def caption(scores: Scoring) -> str:
    """Name the best method on these images, and the methods that are no better than random."""
    deletion, insertion = scores.areas(scores.deletion), scores.areas(scores.insertion)
    named = [name for name in deletion if name != "random"]
    reading = (
        "Patches are covered (left) or restored (right) in the order of each map; with a good map the left "
        "curve falls early and the right curve rises early."
    )
    if not named:
        return f"{reading} Only random maps were scored (n = {scores.images})."
    lowest = min(named, key=lambda name: float(deletion[name].mean()))
    highest = max(named, key=lambda name: float(insertion[name].mean()))
    least, most = f"{deletion[lowest].mean():.3f}", f"{insertion[highest].mean():.3f}"
    result = (
        f"The two scores disagree on these images (n = {scores.images}): {printable(lowest)} is best in "
        f"deletion ({least}), {printable(highest)} in insertion ({most})."
    )
    if lowest == highest:
        result = (
            f"On these images (n = {scores.images}), {printable(lowest)} is best in both: it has the lowest "
            f"area under the deletion curve ({least}) and the highest under the insertion curve ({most})."
        )
    if "random" not in deletion:
        return f"{reading} {result} Without random maps there is no control to compare with."
    gains = {(name, "deletion"): deletion["random"] - deletion[name] for name in named}
    gains |= {(name, "insertion"): insertion[name] - insertion["random"] for name in named}
    text = (
        f"{reading} {result} Compared with random maps, {printable(lowest)} is better by "
        f"{_with_error(gains[lowest, 'deletion'])} in deletion and {printable(highest)} by "
        f"{_with_error(gains[highest, 'insertion'])} in insertion."
    )
    if scores.images < 2:
        return f"{text} With a single image there is no standard error, so this may be due to chance."
    weak = [
        f"{printable(name)} in {score}"
        for (name, score), gain in gains.items()
        if gain.mean() <= _standard_error(gain)
    ]
    end = f" Not better than random by more than one standard error: {', '.join(weak)}." if weak else ""
    return text + end


def _with_error(values: NDArray[np.float64]) -> str:
    """The mean with its standard error."""
    return f"{values.mean():.3f}" + (f" ± {_standard_error(values):.3f}" if len(values) > 1 else "")


def table(scores: Scoring) -> Rows:
    """List both areas of each method, each as the mean over images and its standard error."""
    rows: list[list[object]] = []
    for name in scores.deletion:
        areas = [scores.areas(curves)[name] for curves in (scores.deletion, scores.insertion)]
        numbers = [float(value) for area in areas for value in (area.mean(), _standard_error(area))]
        rows.append([name, scores.images, *numbers])
    return ["method", "images", "deletion", "deletion error", "insertion", "insertion error"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    model, images, activation = request.model, request.drawn.images, request.bundle.scores.activation
    maps = request.attributions
    if not maps:
        maps = attribution.compute(model, images, target=request.target, activation=activation).maps
    scores = compute(model, images, maps, target=request.target, activation=activation)
    return scores, draw(scores)


FIGURE = FigureSpec(
    "scoring",
    "Deletion and insertion scores of the attribution maps",
    _make,
    caption,
    table,
    passes=lambda config: 2 * len(attribution.METHODS) * (_MAX_POINTS + 1),
)
