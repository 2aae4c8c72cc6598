"""Attribution maps: how much each patch contributes to the probability p of a class, by several methods.

| occlusion          | drop in log p when the patch is painted over in the mean color                  |
| gradient-attention | attention x gradient of the class, through all layers: gradient rollout          |
| integrated         | integrated gradients from an image of that color (Sundararajan et al. 2017)      |
| random             | random numbers from 0 to 1, as the control for scoring.py                       |

Occlusion and integrated gradients are in nats and have a sign: a patch can be evidence against the class.
Gradient-attention (rollout.py) takes the positive part for every head and query. If it averaged over them
first, many maps of a model with mean pooling would be zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError, printable, suggest
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.model.tokens import patchify
from vitrail.views import rollout
from vitrail.views.canvas import (
    DIVERGING,
    Axes,
    Figure,
    add_colorbar,
    new_figure,
    overlay_map,
    show_image,
    styled,
)
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import (
    BATCH,
    Target,
    check_classifier,
    check_pixels,
    choose_target,
    cover,
    device_of,
    log_probabilities,
    tell_apart,
)
from vitrail.weights.bundle.scores import Activation

METHODS = ("occlusion", "gradient-attention", "integrated", "random")
_SIGNED = ("occlusion", "integrated")
_STEPS = 32  # points on the path of integrated gradients
_MAX_ROWS = 8
_RECORDED = 8  # images per backward pass that keeps all attention weights
_MAX_GAP = 0.1  # largest acceptable completeness error of integrated gradients, as a fraction of the change


@dataclass(frozen=True, eq=False)
class Attribution:
    """The contribution of each patch to the probability of a class."""

    maps: dict[str, NDArray[np.float32]]
    """(B, h, w) by method."""
    target: NDArray[np.int64]
    """The explained class: (B,)."""
    probability: NDArray[np.float32]
    """The probability of that class: (B,)."""
    change: NDArray[np.float32] | None
    """log p of the image minus log p of a plain one, (B,): what integrated gradients should sum to."""
    steps: int

    @property
    def gap(self) -> NDArray[np.float32] | None:
        """The sum of the integrated gradients minus `change`: (B,). It tends to 0 as the steps increase."""
        return None if self.change is None else self.maps["integrated"].sum(axis=(1, 2)) - self.change


def compute(
    model: ViT,
    images: Tensor,
    *,
    methods: str | Sequence[str] = METHODS,
    target: Target = None,
    steps: int = _STEPS,
    activation: Activation = "softmax",
) -> Attribution:
    """Compute the maps of each method for each image.

    Args:
        steps: number of points on the path of integrated gradients.
        activation: how logits become probabilities (`bundle.scores.activation`).
    """
    check_classifier(model, images)
    methods = [methods] if isinstance(methods, str) else methods
    for method in methods:
        if method not in METHODS:
            raise InputError(f"unknown method {printable(repr(method))}. {suggest(str(method), METHODS)}")
    if not isinstance(steps, int) or steps < 1:
        raise InputError(
            f"steps must be a positive integer, not {printable(steps)}; the default is {_STEPS}."
        )
    images = images.detach().to(device_of(model))
    with eval_mode(model):
        outputs = log_probabilities(model, images, activation)
        classes = choose_target(outputs, target)
        inputs = _Explained(model, images, classes, activation)
        log_p = outputs.gather(1, classes[:, None])[:, 0]
        functions = {
            "occlusion": lambda: _occlusion(inputs, log_p),
            "gradient-attention": lambda: _gradient_attention(inputs),
            "integrated": lambda: _integrated(inputs, steps),
            "random": lambda: torch.rand(
                len(images), *inputs.grid, generator=torch.Generator().manual_seed(0)
            ),
        }
        maps = {method: functions[method]().cpu().numpy() for method in methods}
        change = log_p - inputs.log_p(inputs.plain, classes) if "integrated" in maps else None
    return Attribution(
        maps,
        classes.cpu().numpy(),
        log_p.exp().cpu().numpy(),
        None if change is None else change.cpu().numpy(),
        steps,
    )


class _Explained:
    """A model, the images, the classes to explain, and the images with all patches covered."""

    def __init__(self, model: ViT, images: Tensor, target: Tensor, activation: Activation) -> None:
        self.model, self.images, self.target, self.activation = model, images, target, activation
        self.grid, self.patch = model.config.grid, model.config.patch_pixels
        everywhere = torch.ones(len(images), *self.grid, dtype=torch.bool, device=images.device)
        self.plain = cover(images, everywhere, self.patch)

    def log_p(self, images: Tensor, target: Tensor) -> Tensor:
        """Log-probability of the class of each image: (B,)."""
        return log_probabilities(self.model, images, self.activation).gather(1, target[:, None])[:, 0]


def _occlusion(inputs: _Explained, log_p: Tensor) -> Tensor:
    """Compare with N copies of each image, one patch covered in each; batches run across both."""
    B, N = len(inputs.images), inputs.model.config.patches
    occluded = []
    for pairs in torch.arange(B * N, device=inputs.images.device).split(BATCH):
        image, patch = pairs // N, pairs % N
        hidden = torch.nn.functional.one_hot(patch, N).bool().unflatten(1, inputs.grid)
        occluded.append(inputs.log_p(cover(inputs.images[image], hidden, inputs.patch), inputs.target[image]))
    return log_p[:, None, None] - torch.cat(occluded).view(B, *inputs.grid)


def _gradient_attention(inputs: _Explained) -> Tensor:
    """Gradient rollout, a few images at a time, as it needs the attention weights of all blocks."""
    parts = zip(inputs.images.split(_RECORDED), inputs.target.split(_RECORDED), strict=True)
    maps = [
        rollout.compute(inputs.model, images, method="gradient", target=target).maps[0]
        for images, target in parts
    ]
    return torch.from_numpy(np.concatenate(maps))


def _integrated(inputs: _Explained, steps: int) -> Tensor:
    """(x - plain) times the mean gradient on the straight path, at `steps` points that crowd at its start.

    The points are at alpha = t^4 for the midpoints t of equal segments, with the weights d alpha / dt. To
    LayerNorm an image of one color is a special point: most of the change can lie in the first thousandth
    of the path, where equally spaced points miss it.
    """
    maps = []
    size = max(1, BATCH // steps)  # images per chunk; each is evaluated at all points of its path
    chunks = zip(*(part.split(size) for part in (inputs.images, inputs.plain, inputs.target)), strict=True)
    t = (torch.arange(steps, device=inputs.images.device, dtype=inputs.images.dtype) + 0.5) / steps
    alphas, weights = t**4, 4 * t**3 / steps
    for images, plain, target in chunks:
        difference = images - plain
        total = torch.zeros_like(images)
        for part, weight in zip(alphas.split(BATCH), weights.split(BATCH), strict=True):
            points = plain + part.view(-1, 1, 1, 1, 1) * difference  # (steps, B, C, H, W)
            with torch.enable_grad():
                flat = points.flatten(0, 1).requires_grad_()
                log_p = inputs.log_p(flat, target.repeat(len(part)))
                (gradient,) = torch.autograd.grad(log_p.sum(), flat)
            total += (weight.view(-1, 1, 1, 1, 1) * gradient.view_as(points)).sum(dim=0)
        maps.append(patchify(difference * total, inputs.patch).float().sum(dim=2))  # (B, N)
    return torch.cat(maps).unflatten(1, inputs.grid)


# ---- the figure -----------------------------------------------------------------------------


@styled
def draw(
    attribution: Attribution,
    pixels: NDArray[np.uint8],
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw each image and its maps, each scaled by its own largest value, which is printed below it."""
    B, rows = len(attribution.target), min(len(attribution.target), _MAX_ROWS)
    check_pixels(pixels, B)
    tall = min(2.0, max(0.5, pixels.shape[1] / pixels.shape[2]))
    wide = 1 + len(attribution.maps)
    title = "Contribution of each patch to the class" + (f" (the first {rows} of {B})" if rows < B else "")
    figure = new_figure(1.5 * wide + 1.8, max(2.6, (1.45 * tall + 0.35) * rows + 0.55), title)
    axes = figure.subplots(rows, wide, squeeze=False)
    images: dict[bool, Any] = {}  # one signed and one unsigned map, for the color bars
    titles = tell_apart((names or [f"image {row}" for row in range(B)])[:rows])
    for row, line in enumerate(axes):
        target = int(attribution.target[row])
        name = printable(classes[target], 14) if classes else str(target)
        show_image(line[0], pixels[row])
        line[0].set_title(titles[row], fontsize=8, parse_math=False)
        _write_below(line[0], f"{name}: p = {attribution.probability[row]:.2f}")
        for axis, (method, maps) in zip(line[1:], attribution.maps.items(), strict=True):
            signed, largest = method in _SIGNED, float(np.abs(maps[row]).max())
            images[signed] = _overlay(axis, pixels[row], maps[row] / (largest or 1.0), signed)
            axis.set_title(method if row == 0 else "")
            _write_below(axis, f"±{largest:.2g} nats" if signed else f"0 to {largest:.2g}")
    for signed in sorted(images, reverse=True):
        methods = ", ".join(method for method in attribution.maps if (method in _SIGNED) == signed)
        meaning = "blue: against, red: for" if signed else "brighter: more important"
        label = f"{methods}\n{meaning}\n1 = maximum of the map"
        add_colorbar(figure, images[signed], axes[:, -1], label)
    return figure


def _overlay(axis: Axes, pixels: NDArray[np.uint8], values: NDArray[np.floating], signed: bool) -> Any:
    if not signed:
        return overlay_map(axis, pixels, values, vmax=1.0)
    pale = (160 + pixels[..., :3].astype(float) * (95 / 255)).astype(np.uint8)  # white shows on dark parts
    image = overlay_map(axis, pale, values)
    image.set(cmap=DIVERGING, clim=(-1, 1))
    return image


def _write_below(axis: Axes, text: str) -> None:
    axis.text(0.5, -0.04, text, transform=axis.transAxes, ha="center", va="top", fontsize=8, parse_math=False)


def caption(attribution: Attribution) -> str:
    """Explain the maps, the error of the integrated gradients, and how well the methods agree."""
    text = ["Each map shows how much each patch contributes to the class named below the image."]
    if any(method in _SIGNED for method in attribution.maps):
        text.append(
            "Occlusion and integrated gradients have a sign: red is evidence for the class, blue against it, "
            "in nats of its log-probability."
        )
    if attribution.change is not None and attribution.gap is not None:
        error, change = float(np.abs(attribution.gap).mean()), float(np.abs(attribution.change).mean())
        text.append(
            "Integrated gradients should sum to the change in log-probability from a plain image to this "
            f"one, {change:.3g} nats on average; with {attribution.steps} steps they are off by {error:.3g}"
            + ("." if error <= _MAX_GAP * change else ", which makes them unreliable; try more steps.")
        )
    for method, maps in attribution.maps.items():
        if empty := int((maps == 0).all(axis=(1, 2)).sum()):
            text.append(f"The map of {method} is zero everywhere for {empty} of {len(maps)} images.")
    methods = [method for method in attribution.maps if method != "random"]
    if len(methods) > 1:
        pairs = [(a, b) for n, a in enumerate(methods) for b in methods[n + 1 :]]
        correlations = ", ".join(
            f"{a} and {b} {_correlation(attribution.maps[a], attribution.maps[b]):.2f}" for a, b in pairs
        )
        text.append(f"The methods need not agree; the correlations between their maps are: {correlations}.")
    return " ".join(text)


def _correlation(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Correlation of the maps of two methods, mean over images; 0 for a constant map."""
    x, y = (maps.reshape(len(maps), -1) for maps in (first, second))
    x, y = (maps - maps.mean(axis=1, keepdims=True) for maps in (x, y))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(((x * y).sum(axis=1) / np.where(norms > 0, norms, 1)).mean())


def table(attribution: Attribution) -> Rows:
    """List the value of each image, method and patch."""
    rows: list[list[object]] = [
        [image, int(attribution.target[image]), method, *patch, float(maps[image][patch])]
        for image in range(len(attribution.target))
        for method, maps in attribution.maps.items()
        for patch in np.ndindex(maps.shape[1:])
    ]
    return ["image", "class", "method", "row", "column", "value"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    images, scores = request.drawn, request.bundle.scores
    found = compute(request.model, images.images, target=request.target, activation=scores.activation)
    request.attributions = found.maps
    return found, draw(found, images.pixels, request.bundle.labels, images.names)


FIGURE = FigureSpec(
    "attribution", "Attribution maps", _make, caption, table, passes=lambda c: c.patches + 3 * _STEPS
)
