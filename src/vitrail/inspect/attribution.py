"""Which patches made the answer? Three ways to say, and a random one to compare them with.

| occlusion          | how much log p of the class drops when the patch is painted over              |
| gradient-attention | attention in the last layer times the gradient of log p by it, where positive |
| integrated         | gradients summed along the way from nothing to the picture (Sundararajan 2017) |
| random             | numbers from 0 to 1 that know nothing: the yardstick of scoring.py            |

log p is the logarithm of the class's probability, so occlusion and integrated gradients have one unit
(nats) and a sign: a patch can speak against the class. "Nothing" is a picture of one colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError, printable, suggest
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
from vitrail.inspect.canvas import SIGNED, bar, canvas, in_our_style, lay_over, show_picture
from vitrail.inspect.pictures import check_weights_fit
from vitrail.inspect.sample import sample_model, sample_pictures, show
from vitrail.model import ViT, record
from vitrail.model.modes import evaluating
from vitrail.model.tokens import cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

METHODS = ("occlusion", "gradient-attention", "integrated", "random")
WITH_SIGN = ("occlusion", "integrated")
MOST_ROWS = 8
FAR = 0.1  # a part of the whole that integrated gradients must not miss


@dataclass(frozen=True, eq=False)
class Attribution:
    """Maps of how much each patch speaks for a class."""

    maps: dict[str, NDArray[np.float32]]
    """(B, h, w) by method."""
    target: NDArray[np.int64]
    """The class asked about: (B,)."""
    probability: NDArray[np.float32]
    """Of that class: (B,)."""
    change: NDArray[np.float32] | None
    """log p of the picture less log p of the picture of nothing, (B,): what integrated maps add up to."""
    steps: int

    @property
    def gap(self) -> NDArray[np.float32] | None:
        """What the integrated maps add up to, less `change`: (B,). With endless steps it would be 0."""
        return None if self.change is None else self.maps["integrated"].sum(axis=(1, 2)) - self.change


def compute(
    model: ViT,
    images: Tensor,
    *,
    methods: str | Sequence[str] = METHODS,
    target: int | Sequence[int] | Tensor | None = None,
    baseline: Baseline = 0.0,
    steps: int = 32,
    seed: int = 0,
) -> Attribution:
    """The maps of each method for each picture.

    Args:
        target: the class to ask about, one for all pictures or one each; without it the model's answer.
        baseline: the colour of nothing, in normalised units; 0 is the mean colour of the training data.
        steps: how many points the way of the integrated gradients has.
        seed: of the random maps.
    """
    check_answers(model, images)
    methods = [methods] if isinstance(methods, str) else methods
    _check_methods(methods, steps)
    images = on_device(model, images)
    colour = colour_of(baseline, images)
    ask = _Question(model, images, colour)
    with evaluating(model):
        answers = log_probabilities(model, images)
        ask.target = choose_target(answers, target)
        before = answers.gather(1, ask.target[:, None])[:, 0]
        ways = {
            "occlusion": lambda: _occlusion(ask, before),
            "gradient-attention": lambda: _gradient_attention(ask),
            "integrated": lambda: _integrated(ask, steps),
            "random": lambda: _random(ask, seed),
        }
        maps = {method: ways[method]().cpu().numpy() for method in methods}
        change = before - ask.log_p(ask.nothing, ask.target) if "integrated" in maps else None
    whole = None if change is None else change.cpu().numpy()
    return Attribution(maps, ask.target.cpu().numpy(), before.exp().cpu().numpy(), whole, steps)


class _Question:
    """A model, the pictures, the classes they are asked about, and the pictures of nothing."""

    target: Tensor

    def __init__(self, model: ViT, images: Tensor, colour: Tensor) -> None:
        self.model, self.images, self.colour = model, images, colour
        self.grid, self.patch = model.config.grid, model.config.patch_pixels
        everything = torch.ones(len(images), *self.grid, dtype=torch.bool, device=images.device)
        self.nothing = cover(images, everything, colour, self.patch)

    def log_p(self, images: Tensor, target: Tensor) -> Tensor:
        """log p of each picture's class: (B,)."""
        return log_probabilities(self.model, images).gather(1, target[:, None])[:, 0]


def _occlusion(ask: _Question, before: Tensor) -> Tensor:
    """Each picture N times, each time without another patch; pictures and patches share the batches."""
    B, N = len(ask.images), ask.model.config.patches
    after = []
    for pairs in torch.arange(B * N, device=ask.images.device).split(BATCH):
        picture, patch = pairs // N, pairs % N
        hidden = torch.nn.functional.one_hot(patch, N).bool().unflatten(1, ask.grid)
        covered = cover(ask.images[picture], hidden, ask.colour, ask.patch)
        after.append(ask.log_p(covered, ask.target[picture]))
    return before[:, None, None] - torch.cat(after).view(B, *ask.grid)


def _gradient_attention(ask: _Question) -> Tensor:
    """relu(mean over heads of A dlog p/dA), A being the last attention before the answer.

    The sum over queries picks those that the pool uses: others have no gradient. For a mean pool the
    gradient holds the 1/N that makes this sum a mean.
    """
    config = ask.model.config
    pooled = config.pool == "attention"
    check_weights_fit(ask.model, min(BATCH, len(ask.images)))
    name = "pool.attention.weights" if pooled else f"blocks.{config.depth - 1}.attention.weights"
    maps = []
    for images, target in zip(ask.images.split(BATCH), ask.target.split(BATCH), strict=True):
        with torch.enable_grad(), record(ask.model, name) as tape:
            log_p = ask.log_p(images.clone().requires_grad_(), target)  # a frozen model has a graph as well
            weights = tape[name]  # (B, k, T, T); of the attention pool (B, k, 1, N)
            (gradient,) = torch.autograd.grad(log_p.sum(), weights)
        spoken = (weights.detach() * gradient).float().mean(dim=1).sum(dim=1)  # (B, T)
        maps.append(spoken[:, 0 if pooled else config.prefix :].relu())
    return torch.cat(maps).unflatten(1, config.grid)


def _integrated(ask: _Question, steps: int) -> Tensor:
    """(x - nothing) times the mean gradient at the midpoints of `steps` pieces of the straight way."""
    maps = []
    size = max(1, BATCH // steps)  # pictures at once, each at all its points
    whole = zip(ask.images.split(size), ask.nothing.split(size), ask.target.split(size), strict=True)
    places = (torch.arange(steps, device=ask.images.device, dtype=ask.images.dtype) + 0.5) / steps
    for images, nothing, target in whole:
        way = images - nothing
        total = torch.zeros_like(images)
        for part in places.split(BATCH):
            points = nothing + part.view(-1, 1, 1, 1, 1) * way  # (steps, B, C, H, W)
            with torch.enable_grad():
                flat = points.flatten(0, 1).requires_grad_()
                log_p = ask.log_p(flat, target.repeat(len(part)))
                (gradient,) = torch.autograd.grad(log_p.sum(), flat)
            total += gradient.view_as(points).sum(dim=0)
        maps.append(cut(way * total / steps, ask.patch).float().sum(dim=2))  # (B, N)
    return torch.cat(maps).unflatten(1, ask.grid)


def _random(ask: _Question, seed: int) -> Tensor:
    return torch.rand(len(ask.images), *ask.grid, generator=torch.Generator().manual_seed(seed))


def _check_methods(methods: Sequence[str], steps: int) -> None:
    for method in methods:
        if method not in METHODS:
            raise InputError(
                "A method must be one there is.", printable(repr(method)), suggest(str(method), METHODS)
            )
    if not isinstance(steps, int) or steps < 1:
        raise InputError("steps must be a whole number from 1 up.", printable(steps), "The default is 32.")


# ---- the figure -----------------------------------------------------------------------------


@in_our_style
def draw(found: Attribution, pixels: NDArray[np.uint8], classes: Sequence[str] | None = None) -> Figure:
    """Each picture and its maps, every map in the scale of its own largest value, which is written below.

    Args:
        pixels: the pictures (B, H, W, C) as they are drawn.
        classes: names of the classes.
    """
    B, rows = len(found.target), min(len(found.target), MOST_ROWS)
    if pixels.ndim != 4 or len(pixels) != B:
        got = f"an array of shape {pixels.shape}"
        raise InputError(f"The pixels must be those of the {B} pictures, (B, H, W, C).", got, "Give all.")
    tall = min(2.0, max(0.5, pixels.shape[1] / pixels.shape[2]))
    wide = 1 + len(found.maps)
    title = "Which patches speak for the class" + (f" (the first {rows} of {B})" if rows < B else "")
    figure = canvas(1.5 * wide + 1.8, max(2.6, (1.45 * tall + 0.25) * rows + 0.55), title)
    axes = figure.subplots(rows, wide, squeeze=False)
    images: dict[bool, Any] = {}  # one of each kind, for the bars
    for row, line in enumerate(axes):
        name = printable(classes[int(found.target[row])], 14) if classes else str(found.target[row])
        show_picture(line[0], pixels[row], "picture" if row == 0 else "")
        _write_below(line[0], f"{name}: p = {found.probability[row]:.2f}")
        for axis, (method, maps) in zip(line[1:], found.maps.items(), strict=True):
            signed, largest = method in WITH_SIGN, float(np.abs(maps[row]).max())
            scaled = maps[row] / (largest or 1.0)
            lay = _lay_signed if signed else _lay_amount
            images[signed] = lay(axis, pixels[row], scaled)
            axis.set_title(method if row == 0 else "")
            _write_below(axis, f"±{largest:.2g} nats" if signed else f"0 to {largest:.2g}")
    for signed in sorted(images, reverse=True):
        named = ", ".join(method for method in found.maps if (method in WITH_SIGN) == signed)
        reading = "blue: against, red: for" if signed else "brighter counts more"
        bar(figure, images[signed], axes[:, -1], f"{named}\n{reading}\n1 = the map's largest")
    return figure


def _lay_amount(axis: Axes, pixels: NDArray[np.uint8], values: NDArray[np.floating]) -> Any:
    return lay_over(axis, pixels, values, most=1.0)


def _lay_signed(axis: Axes, pixels: NDArray[np.uint8], values: NDArray[np.floating]) -> Any:
    """lay_over for values around 0; the picture is paled, or its dark parts would hide which is white."""
    pale = (160 + pixels[..., :3].astype(float) * (95 / 255)).astype(np.uint8)
    image = lay_over(axis, pale, values)
    image.set(cmap=SIGNED, clim=(-1, 1))
    return image


def _write_below(axis: Axes, text: str) -> None:
    axis.text(0.5, -0.04, text, transform=axis.transAxes, ha="center", va="top", fontsize=8)


def caption(found: Attribution) -> str:
    """How to read the maps; how far the integrated ones are from adding up; how far methods agree."""
    text = [
        "Each map says how much each patch speaks for the class under the picture.",
        "Occlusion and integrated gradients have a sign: red speaks for the class, blue against it, and the "
        "numbers are nats of its log-probability."
        if any(method in WITH_SIGN for method in found.maps)
        else "The maps have no sign: brighter counts more.",
    ]
    if found.change is not None and found.gap is not None:
        off, whole = float(np.abs(found.gap).mean()), float(np.abs(found.change).mean())
        text.append(
            f"The integrated maps should add up to what the picture changes against a picture of one colour, "
            f"{whole:.3g} nats in the mean; with {found.steps} steps they miss it by {off:.3g}"
            + ("." if off <= FAR * whole else ", too much: they are not to be relied on, or need more steps.")
        )
    told = [method for method in found.maps if method != "random"]
    if len(told) > 1:
        pairs = [(a, b) for n, a in enumerate(told) for b in told[n + 1 :]]
        listed = ", ".join(f"{a} and {b} {_agreement(found, a, b):.2f}" for a, b in pairs)
        text.append(f"The methods need not agree; the correlations of their maps here: {listed}.")
    return " ".join(text)


def _agreement(found: Attribution, a: str, b: str) -> float:
    """The correlation of two methods' maps, the mean over pictures; a flat map correlates with nothing."""
    each = []
    for one, other in zip(found.maps[a], found.maps[b], strict=True):
        x, y = one.ravel() - one.mean(), other.ravel() - other.mean()
        size = float(np.linalg.norm(x) * np.linalg.norm(y))
        each.append(float(x @ y) / size if size else 0.0)
    return float(np.mean(each))


def table(found: Attribution) -> tuple[list[str], list[list[object]]]:
    """A row for each picture, method and patch."""
    rows: list[list[object]] = [
        [picture, int(found.target[picture]), method, *place, float(maps[picture][place])]
        for picture in range(len(found.target))
        for method, maps in found.maps.items()
        for place in np.ndindex(maps.shape[1:])
    ]
    return ["picture", "class", "method", "row", "column", "value"], rows


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        pictures = sample_pictures(5)
        found = compute(sample_model().model, pictures.images)
        return draw(found, pictures.pixels), caption(found)

    show("attribution", sample)
