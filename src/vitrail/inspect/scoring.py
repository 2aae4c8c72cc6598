"""Which map of the patches is to be believed? Take patches away, and put them back, in its order.

Deletion paints patches over, those that the map says count most first: if the map is right, the
probability of the class falls at once, and the area under the curve is small. Insertion starts from a
picture of one colour and brings the same patches back: the probability rises at once, and the area is
large (Petsiuk et al. 2018). A map that knows nothing (`random`) is the yardstick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError, printable
from vitrail.inspect import attribution
from vitrail.inspect.answers import (
    BATCH,
    Baseline,
    check_answers,
    choose_target,
    colour_of,
    cover,
    log_probabilities,
    on_device,
)
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.inspect.sample import sample_model, sample_pictures, show
from vitrail.model import ViT
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

POINTS = 28
DASHES = ("-", "--", ":")


@dataclass(frozen=True, eq=False)
class Scoring:
    """Curves of each method's maps, and the areas under them."""

    share: NDArray[np.float64]
    """Of the patches that are gone, or back: (points + 1,), from 0 to 1."""
    deletion: dict[str, NDArray[np.float32]]
    """The class's probability as patches go: (B, points + 1) by method."""
    insertion: dict[str, NDArray[np.float32]]
    """The same as they come back."""

    def areas(self, curves: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
        """The area under each picture's curve, (B,) by method: a mean probability."""
        return {name: np.asarray(np.trapezoid(curve, self.share, axis=1)) for name, curve in curves.items()}


def compute(
    model: ViT,
    images: Tensor,
    maps: Mapping[str, NDArray[np.floating]],
    *,
    target: int | Sequence[int] | Tensor | None = None,
    baseline: Baseline = 0.0,
    points: int | None = None,
) -> Scoring:
    """Both curves of every method.

    Args:
        maps: (B, h, w) by method, as `attribution.compute` makes them.
        target: the class whose probability is followed; without it the model's answer.
        baseline: the colour that patches are painted with, in normalised units.
        points: how many steps it takes until all patches are gone; at most N, by default at most 28.
    """
    check_answers(model, images)
    N = model.config.patches
    points = min(N, POINTS) if points is None else points
    _check_maps(model, images, maps)
    if not isinstance(points, int) or not 1 <= points <= N:
        raise InputError(
            f"points must be a number from 1 to {N}, the patches.", printable(points), "Use fewer."
        )
    counts = np.round(np.linspace(0, N, points + 1)).astype(int)  # how many patches at each point
    images = on_device(model, images)
    colour = colour_of(baseline, images)
    deletion, insertion = {}, {}
    with evaluating(model):
        chosen = choose_target(log_probabilities(model, images), target)
        for name, given in maps.items():
            rank = torch.from_numpy(_ranks(np.asarray(given))).to(images.device)
            gone = rank[:, None] < torch.from_numpy(counts).to(images.device)[None, :, None, None]
            deletion[name] = _follow(model, images, gone, colour, chosen)
            insertion[name] = _follow(model, images, ~gone, colour, chosen)
    return Scoring(counts / N, deletion, insertion)


def _ranks(maps: NDArray[np.floating]) -> NDArray[np.int64]:
    """The place of each patch in its map's order, 0 for the largest: (B, h, w).

    Equal patches come in a random order: by rows, a map full of zeros would favour the upper edge.
    """
    flat = maps.reshape(len(maps), -1)
    chance = np.random.default_rng(0).random(flat.shape)
    order = np.lexsort((chance, -flat), axis=1)
    return np.argsort(order, axis=1).reshape(maps.shape)


def _follow(
    model: ViT, images: Tensor, hidden: Tensor, colour: Tensor, target: Tensor
) -> NDArray[np.float32]:
    """The class's probability with these patches hidden, (B, points + 1, h, w): (B, points + 1)."""
    B, count = hidden.shape[:2]
    found = []
    for pairs in torch.arange(B * count, device=images.device).split(BATCH):
        picture, point = pairs // count, pairs % count
        covered = cover(images[picture], hidden[picture, point], colour, model.config.patch_pixels)
        answers = log_probabilities(model, covered)
        found.append(answers.gather(1, target[picture][:, None])[:, 0].exp())
    return torch.cat(found).view(B, count).cpu().numpy()


def _check_maps(model: ViT, images: Tensor, maps: Mapping[str, NDArray[np.floating]]) -> None:
    wanted = (len(images), *model.config.grid)
    if not maps:
        raise InputError("There must be maps to score.", "none", "Make some with attribution.compute.")
    for name, given in maps.items():
        if np.shape(given) != wanted or not np.isfinite(given).all():
            shape = f"shape {np.shape(given)}" + (
                "" if np.shape(given) != wanted else " with NaN or infinity"
            )
            raise InputError(
                f"A map must hold a finite number for each picture and patch, {wanted}.",
                f"{printable(name)} of {shape}",
                "Make it with attribution.compute on the same pictures.",
            )


# ---- the figure -----------------------------------------------------------------------------


@in_our_style
def draw(found: Scoring) -> Figure:
    """Two panels, a line for each method: the mean over pictures, with its standard error as a band."""
    B = len(next(iter(found.deletion.values())))
    figure = canvas(9.0, 4.2, f"Taking patches away in the order of each map ({B} picture{'s' * (B > 1)})")
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, found, found.deletion, "Deletion: lower is better", "share of patches painted over")
    _panel(right, found, found.insertion, "Insertion: higher is better", "share of patches put back")
    left.set_ylabel("probability of the class")
    left.set_ylim(-0.02, 1.02)
    return figure


def _panel(
    axis: Axes, found: Scoring, curves: Mapping[str, NDArray[np.float32]], title: str, label: str
) -> None:
    named = [name for name in curves if name != "random"]
    for name, area in found.areas(curves).items():
        place = named.index(name) if name in named else -1
        colour = LINES[place % len(LINES)] if name in named else FAINT
        dash = DASHES[place // len(LINES) % len(DASHES)] if name in named else "--"
        mean, error = curves[name].mean(axis=0), _error(curves[name])
        words = f"{printable(name, 30)}: {area.mean():.3f}"
        words += f" ± {_error(area):.3f}" if len(area) > 1 else ""
        axis.plot(found.share, mean, color=colour, linestyle=dash, label=words)
        if len(area) > 1:
            axis.fill_between(found.share, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
    axis.set(title=title, xlabel=label, xlim=(0, 1))
    axis.legend(
        title="area under the curve",
        fontsize=8,
        title_fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
    )


def _error(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """The standard error of the mean over pictures (axis 0); of one picture nobody knows it."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1) / np.sqrt(len(values)))


def caption(found: Scoring) -> str:
    """Which method to believe most here, and which are no better than chance."""
    deletion, insertion = found.areas(found.deletion), found.areas(found.insertion)
    named = {name: printable(name) for name in deletion if name != "random"}
    B = len(next(iter(deletion.values())))
    reading = (
        "Patches are painted over in the order of each map, or put back in it; a map that is right makes "
        "the left curve fall and the right one rise early."
    )
    if not named:
        return f"{reading} Only random maps were scored (n = {B})."
    least = min(named, key=lambda name: float(deletion[name].mean()))
    most = max(named, key=lambda name: float(insertion[name].mean()))
    areas = f"deletion {deletion[least].mean():.3f}", f"insertion {insertion[most].mean():.3f}"
    if least == most:
        verdict = (
            f"For these pictures (n = {B}) {named[least]} is to be believed most: it has the lowest area "
            f"under {areas[0]} and the highest under {areas[1]}."
        )
    else:
        verdict = (
            f"The two disagree for these pictures (n = {B}): by {areas[0]} {named[least]} is to be believed "
            f"most, by {areas[1]} {named[most]}."
        )
    return f"{reading} {verdict} {_against_random(deletion, insertion, least, most)}"


Areas = Mapping[str, "NDArray[np.float64]"]


def _against_random(deletion: Areas, insertion: Areas, least: str, most: str) -> str:
    """How much better the best are than random, picture by picture, and who is not."""
    if "random" not in deletion:
        return "Without a random map there is no telling what chance would reach."
    better = {("deletion", name): deletion["random"] - area for name, area in deletion.items()}
    better |= {("insertion", name): area - insertion["random"] for name, area in insertion.items()}
    told = (
        f"Against random, {printable(least)} is better by {_told(better['deletion', least])} in deletion and "
        f"{printable(most)} by {_told(better['insertion', most])} in insertion."
    )
    if len(deletion[least]) < 2:
        return f"{told} One picture has no standard error: this may be chance."
    weak = [
        f"{printable(name)} in {word}"
        for (word, name), gain in better.items()
        if name != "random" and gain.mean() <= _error(gain)
    ]
    return told + (f" Not better by more than the standard error: {', '.join(weak)}." if weak else "")


def _told(values: NDArray[np.float64]) -> str:
    """The mean with its standard error."""
    return f"{values.mean():.3f}" + (f" ± {_error(values):.3f}" if len(values) > 1 else "")


def table(found: Scoring) -> tuple[list[str], list[list[object]]]:
    """A row for each method: both areas, each the mean over pictures with its standard error."""
    deletion, insertion = found.areas(found.deletion), found.areas(found.insertion)
    rows: list[list[object]] = []
    for name in deletion:
        numbers = [(float(area.mean()), float(_error(area))) for area in (deletion[name], insertion[name])]
        rows.append([name, len(deletion[name]), *numbers[0], *numbers[1]])
    return ["method", "pictures", "deletion", "deletion error", "insertion", "insertion error"], rows


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        model, pictures = sample_model().model, sample_pictures(40)
        found = compute(model, pictures.images, attribution.compute(model, pictures.images).maps)
        return draw(found), caption(found)

    show("scoring", sample)
