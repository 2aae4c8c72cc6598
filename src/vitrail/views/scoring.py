"""Deletion and insertion scores of attribution maps (Petsiuk et al. 2018).

Deletion covers patches in the order of the map, the most important first: for a good map the probability of
the class drops early and the area under the curve is small. Insertion starts from an image of one color and
restores patches in the same order: the probability rises early and the area is large. Random maps serve as
the control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.views import attribution
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.sample import sample_images, sample_model, show_sample
from vitrail.views.targets import (
    BATCH,
    Baseline,
    baseline_color,
    check_classifier,
    choose_target,
    cover,
    log_probabilities,
    on_device,
)
from vitrail.weights.bundle.scores import Activation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MAX_POINTS = 28
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

    def areas(self, curves: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
        """The area under the curve of each image, (B,) by method: a mean probability."""
        return {
            name: np.asarray(np.trapezoid(curve, self.fraction, axis=1)) for name, curve in curves.items()
        }


def compute(
    model: ViT,
    images: Tensor,
    maps: Mapping[str, NDArray[np.floating]],
    *,
    target: int | Sequence[int] | Tensor | None = None,
    baseline: Baseline = 0.0,
    points: int | None = None,
    activation: Activation = "softmax",
) -> Scoring:
    """Compute both curves for every method.

    Args:
        maps: (B, h, w) by method, as returned by `attribution.compute`.
        target: the class whose probability is measured; by default the predicted class.
        baseline: the color of covered patches, in normalized units.
        points: number of steps until all patches are covered; at most N, by default at most 28.
        activation: how logits become probabilities (`bundle.scores.activation`).
    """
    check_classifier(model, images)
    N = model.config.patches
    points = min(N, _MAX_POINTS) if points is None else points
    _check_maps(model, images, maps)
    if not isinstance(points, int) or not 1 <= points <= N:
        raise InputError(
            f"points must be an integer from 1 to {N}, the number of patches, not {printable(points)}."
        )
    counts = np.round(np.linspace(0, N, points + 1)).astype(int)  # number of patches at each point
    images = on_device(model, images)
    color = baseline_color(baseline, images)
    deletion, insertion = {}, {}
    with eval_mode(model):
        classes = choose_target(log_probabilities(model, images, activation), target)
        for name, values in maps.items():
            rank = torch.from_numpy(_ranks(np.asarray(values))).to(images.device)
            selected = rank[:, None] < torch.from_numpy(counts).to(images.device)[None, :, None, None]
            deletion[name] = _probabilities(model, images, selected, color, classes, activation)
            insertion[name] = _probabilities(model, images, ~selected, color, classes, activation)
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
    model: ViT, images: Tensor, hidden: Tensor, color: Tensor, target: Tensor, activation: Activation
) -> NDArray[np.float32]:
    """Probability of the class with the `hidden` patches (B, points + 1, h, w) covered: (B, points + 1)."""
    B, count = hidden.shape[:2]
    parts = []
    for pairs in torch.arange(B * count, device=images.device).split(BATCH):
        image, point = pairs // count, pairs % count
        covered = cover(images[image], hidden[image, point], color, model.config.patch_pixels)
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
    """Two panels with one line per method: the mean over images, with its standard error as a band."""
    B = len(next(iter(scores.deletion.values())))
    title = f"Covering and restoring patches in the order of each map ({B} image{'s' * (B > 1)})"
    figure = new_figure(9.0, 4.2, title)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_panel(left, scores, scores.deletion, "Deletion: lower is better", "fraction of patches covered")
    _draw_panel(
        right, scores, scores.insertion, "Insertion: higher is better", "fraction of patches restored"
    )
    left.set_ylabel("probability of the class")
    left.set_ylim(-0.02, 1.02)
    return figure


def _draw_panel(
    axis: Axes, scores: Scoring, curves: Mapping[str, NDArray[np.float32]], title: str, label: str
) -> None:
    named = [name for name in curves if name != "random"]
    for name, area in scores.areas(curves).items():
        index = named.index(name) if name in named else -1
        color = LINES[index % len(LINES)] if name in named else FAINT
        dash = _DASHES[index // len(LINES) % len(_DASHES)] if name in named else "--"
        mean, error = curves[name].mean(axis=0), _standard_error(curves[name])
        axis.plot(
            scores.fraction,
            mean,
            color=color,
            linestyle=dash,
            label=f"{printable(name, 30)}: {_with_error(area)}",
        )
        if len(area) > 1:
            axis.fill_between(
                scores.fraction, mean - error, mean + error, color=color, alpha=0.15, linewidth=0
            )
    axis.set(title=title, xlabel=label, xlim=(0, 1))
    axis.legend(
        title="area under the curve",
        fontsize=8,
        title_fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
    )


def _standard_error(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """The standard error of the mean over images (axis 0); of one image nobody knows it."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1) / np.sqrt(len(values)))


def caption(scores: Scoring) -> str:
    """The best method on these images, and the methods that are no better than random."""
    deletion, insertion = scores.areas(scores.deletion), scores.areas(scores.insertion)
    named = {name: printable(name) for name in deletion if name != "random"}
    B = len(next(iter(deletion.values())))
    reading = (
        "Patches are covered (left) or restored (right) in the order of each map; with a good map the left "
        "curve falls early and the right curve rises early."
    )
    if not named:
        return f"{reading} Only random maps were scored (n = {B})."
    lowest = min(named, key=lambda name: float(deletion[name].mean()))
    highest = max(named, key=lambda name: float(insertion[name].mean()))
    areas = f"{deletion[lowest].mean():.3f}", f"{insertion[highest].mean():.3f}"
    if lowest == highest:
        result = (
            f"On these images (n = {B}), {named[lowest]} is best in both: it has the lowest area under the "
            f"deletion curve ({areas[0]}) and the highest under the insertion curve ({areas[1]})."
        )
    else:
        result = (
            f"The two scores disagree on these images (n = {B}): {named[lowest]} is best in deletion "
            f"({areas[0]}), {named[highest]} in insertion ({areas[1]})."
        )
    return f"{reading} {result} {_compare_with_random(deletion, insertion, lowest, highest)}"


_Areas = Mapping[str, "NDArray[np.float64]"]


def _compare_with_random(deletion: _Areas, insertion: _Areas, lowest: str, highest: str) -> str:
    """The margin of the best methods over random maps, image by image, and the methods without one."""
    if "random" not in deletion:
        return "Without random maps there is no control to compare with."
    gains = {("deletion", name): deletion["random"] - area for name, area in deletion.items()}
    gains |= {("insertion", name): area - insertion["random"] for name, area in insertion.items()}
    text = (
        f"Compared with random maps, {printable(lowest)} is better by "
        f"{_with_error(gains['deletion', lowest])} in deletion and {printable(highest)} by "
        f"{_with_error(gains['insertion', highest])} in insertion."
    )
    if len(deletion[lowest]) < 2:
        return f"{text} With a single image there is no standard error, so this may be due to chance."
    weak = [
        f"{printable(name)} in {score}"
        for (score, name), gain in gains.items()
        if name != "random" and gain.mean() <= _standard_error(gain)
    ]
    return text + (
        f" Not better than random by more than one standard error: {', '.join(weak)}." if weak else ""
    )


def _with_error(values: NDArray[np.float64]) -> str:
    """The mean with its standard error."""
    return f"{values.mean():.3f}" + (f" ± {_standard_error(values):.3f}" if len(values) > 1 else "")


def table(scores: Scoring) -> tuple[list[str], list[list[object]]]:
    """One row per method: both areas, each as the mean over images and its standard error."""
    deletion, insertion = scores.areas(scores.deletion), scores.areas(scores.insertion)
    rows: list[list[object]] = []
    for name in deletion:
        numbers = [
            (float(area.mean()), float(_standard_error(area))) for area in (deletion[name], insertion[name])
        ]
        rows.append([name, len(deletion[name]), *numbers[0], *numbers[1]])
    return ["method", "images", "deletion", "deletion error", "insertion", "insertion error"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    images = request.drawn().images
    how: dict[str, Any] = {"target": request.target, "activation": request.bundle.scores.activation}
    maps = request.attributions or attribution.compute(request.model, images, **how).maps
    scores = compute(request.model, images, maps, **how)
    return scores, draw(scores)


FIGURE = FigureSpec("scoring", "Deletion and insertion scores of the attribution maps", _make, caption, table)


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        model, images = sample_model().model, sample_images(40)
        scores = compute(model, images.images, attribution.compute(model, images.images).maps)
        return draw(scores), caption(scores)

    show_sample("scoring", sample)
