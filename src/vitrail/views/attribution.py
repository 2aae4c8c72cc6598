"""Attribution maps: how much each patch contributes to the probability p of a class, by several methods.

| occlusion          | drop in log p when the patch is painted over with the baseline color            |
| gradient-attention | attention x gradient of the class, through all layers: gradient rollout          |
| integrated         | integrated gradients from the baseline to the image (Sundararajan et al. 2017)  |
| random             | random numbers from 0 to 1, as the control for scoring.py                       |

Occlusion and integrated gradients are in nats and have a sign: a patch can be evidence against the class. The
baseline is an image of one color. Gradient-attention (rollout.py) takes the positive part for every head and
query. If it averaged over them first, many maps of a model with mean pooling would be zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError, printable, suggest
from vitrail.model import ViT
from vitrail.model.device import eval_mode
from vitrail.model.tokens import patchify
from vitrail.views import rollout
from vitrail.views.canvas import DIVERGING, add_colorbar, new_figure, overlay_map, show_image, styled
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.figure_images import tell_apart
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

METHODS = ("occlusion", "gradient-attention", "integrated", "random")
_SIGNED = ("occlusion", "integrated")
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
    """log p of the image minus log p of the baseline, (B,): what integrated gradients should sum to."""
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
    target: int | Sequence[int] | Tensor | None = None,
    baseline: Baseline = 0.0,
    steps: int = 32,
    seed: int = 0,
    activation: Activation = "softmax",
) -> Attribution:
    """Compute the maps of each method for each image.

    Args:
        target: the class to explain, one for all images or one each; by default the predicted class.
        baseline: the baseline color, in normalized units; 0 is the mean color of the training data.
        steps: number of points on the path of integrated gradients.
        seed: seed of the random maps.
        activation: how logits become probabilities (`bundle.scores.activation`).
    """
    check_classifier(model, images)
    methods = [methods] if isinstance(methods, str) else methods
    _check_methods(methods, steps)
    images = on_device(model, images)
    color = baseline_color(baseline, images)
    inputs = _Explained(model, images, color, activation)
    with eval_mode(model):
        outputs = log_probabilities(model, images, activation)
        inputs.target = choose_target(outputs, target)
        log_p = outputs.gather(1, inputs.target[:, None])[:, 0]
        functions = {
            "occlusion": lambda: _occlusion(inputs, log_p),
            "gradient-attention": lambda: _gradient_attention(inputs),
            "integrated": lambda: _integrated(inputs, steps),
            "random": lambda: _random(inputs, seed),
        }
        maps = {method: functions[method]().cpu().numpy() for method in methods}
        change = log_p - inputs.log_p(inputs.baseline, inputs.target) if "integrated" in maps else None
    return Attribution(
        maps,
        inputs.target.cpu().numpy(),
        log_p.exp().cpu().numpy(),
        None if change is None else change.cpu().numpy(),
        steps,
    )


class _Explained:
    """A model, the images, the classes to explain, and the baseline images."""

    target: Tensor

    def __init__(self, model: ViT, images: Tensor, color: Tensor, activation: Activation) -> None:
        self.model, self.images, self.color, self.activation = model, images, color, activation
        self.grid, self.patch = model.config.grid, model.config.patch_pixels
        all_patches = torch.ones(len(images), *self.grid, dtype=torch.bool, device=images.device)
        self.baseline = cover(images, all_patches, color, self.patch)

    def log_p(self, images: Tensor, target: Tensor) -> Tensor:
        """log p of the class of each image: (B,)."""
        return log_probabilities(self.model, images, self.activation).gather(1, target[:, None])[:, 0]


def _occlusion(inputs: _Explained, log_p: Tensor) -> Tensor:
    """N copies of each image with one patch covered in each; batches run across images and patches."""
    B, N = len(inputs.images), inputs.model.config.patches
    occluded = []
    for pairs in torch.arange(B * N, device=inputs.images.device).split(BATCH):
        image, patch = pairs // N, pairs % N
        hidden = torch.nn.functional.one_hot(patch, N).bool().unflatten(1, inputs.grid)
        covered = cover(inputs.images[image], hidden, inputs.color, inputs.patch)
        occluded.append(inputs.log_p(covered, inputs.target[image]))
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
    """(x - baseline) times the mean gradient on the straight path, at `steps` points that crowd at its start.

    The points are at alpha = t^4 for the midpoints t of equal segments, with the weights d alpha / dt. To
    LayerNorm an image of one color is a special point: most of the change can lie in the first thousandth
    of the path, where equally spaced points miss it.
    """
    maps = []
    size = max(1, BATCH // steps)  # images per chunk; each is evaluated at all points of its path
    chunks = zip(
        inputs.images.split(size), inputs.baseline.split(size), inputs.target.split(size), strict=True
    )
    t = (torch.arange(steps, device=inputs.images.device, dtype=inputs.images.dtype) + 0.5) / steps
    alphas, weights = t**4, 4 * t**3 / steps
    for images, baseline, target in chunks:
        difference = images - baseline
        total = torch.zeros_like(images)
        for part, weight in zip(alphas.split(BATCH), weights.split(BATCH), strict=True):
            points = baseline + part.view(-1, 1, 1, 1, 1) * difference  # (steps, B, C, H, W)
            with torch.enable_grad():
                flat = points.flatten(0, 1).requires_grad_()
                log_p = inputs.log_p(flat, target.repeat(len(part)))
                (gradient,) = torch.autograd.grad(log_p.sum(), flat)
            total += (weight.view(-1, 1, 1, 1, 1) * gradient.view_as(points)).sum(dim=0)
        maps.append(patchify(difference * total, inputs.patch).float().sum(dim=2))  # (B, N)
    return torch.cat(maps).unflatten(1, inputs.grid)


def _random(inputs: _Explained, seed: int) -> Tensor:
    return torch.rand(len(inputs.images), *inputs.grid, generator=torch.Generator().manual_seed(seed))


def _check_methods(methods: Sequence[str], steps: int) -> None:
    for method in methods:
        if method not in METHODS:
            raise InputError(f"unknown method {printable(repr(method))}. {suggest(str(method), METHODS)}")
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps must be a positive integer, not {printable(steps)}; the default is 32.")


# ---- the figure -----------------------------------------------------------------------------


@styled
def draw(
    attribution: Attribution,
    pixels: NDArray[np.uint8],
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Each image and its maps. Every map is scaled by its own largest value, which is printed below it.

    Args:
        pixels: the images to draw, (B, H, W, C).
        classes: class names.
        names: image names.
    """
    B, rows = len(attribution.target), min(len(attribution.target), _MAX_ROWS)
    if pixels.ndim != 4 or len(pixels) != B:
        raise InputError(
            f"pixels must hold the {B} explained images as (B, H, W, C), but their shape is {pixels.shape}; "
            "pass all of them."
        )
    tall = min(2.0, max(0.5, pixels.shape[1] / pixels.shape[2]))
    wide = 1 + len(attribution.maps)
    title = "Contribution of each patch to the class" + (f" (the first {rows} of {B})" if rows < B else "")
    figure = new_figure(1.5 * wide + 1.8, max(2.6, (1.45 * tall + 0.35) * rows + 0.55), title)
    axes = figure.subplots(rows, wide, squeeze=False)
    images: dict[bool, Any] = {}  # one signed and one unsigned map, for the color bars
    titles = tell_apart((names or [f"image {row}" for row in range(B)])[:rows])
    for row, line in enumerate(axes):
        name = (
            printable(classes[int(attribution.target[row])], 14) if classes else str(attribution.target[row])
        )
        show_image(line[0], pixels[row])
        line[0].set_title(titles[row], fontsize=8, parse_math=False)
        _write_below(line[0], f"{name}: p = {attribution.probability[row]:.2f}")
        for axis, (method, maps) in zip(line[1:], attribution.maps.items(), strict=True):
            signed, largest = method in _SIGNED, float(np.abs(maps[row]).max())
            scaled = maps[row] / (largest or 1.0)
            images[signed] = (_overlay_signed if signed else _overlay_unsigned)(axis, pixels[row], scaled)
            axis.set_title(method if row == 0 else "")
            _write_below(axis, f"±{largest:.2g} nats" if signed else f"0 to {largest:.2g}")
    for signed in sorted(images, reverse=True):
        methods = ", ".join(method for method in attribution.maps if (method in _SIGNED) == signed)
        meaning = "blue: against, red: for" if signed else "brighter: more important"
        label = f"{methods}\n{meaning}\n1 = maximum of the map"
        add_colorbar(figure, images[signed], axes[:, -1], label)
    return figure


def _overlay_unsigned(axis: Axes, pixels: NDArray[np.uint8], values: NDArray[np.floating]) -> Any:
    return overlay_map(axis, pixels, values, vmax=1.0)


def _overlay_signed(axis: Axes, pixels: NDArray[np.uint8], values: NDArray[np.floating]) -> Any:
    """`overlay_map` for values around 0; the image is lightened, as white would not show on dark parts."""
    pale = (160 + pixels[..., :3].astype(float) * (95 / 255)).astype(np.uint8)
    image = overlay_map(axis, pale, values)
    image.set(cmap=DIVERGING, clim=(-1, 1))
    return image


def _write_below(axis: Axes, text: str) -> None:
    axis.text(0.5, -0.04, text, transform=axis.transAxes, ha="center", va="top", fontsize=8, parse_math=False)


def caption(attribution: Attribution) -> str:
    """How to read the maps, the error of the integrated gradients, and how well the methods agree."""
    text = [
        "Each map shows how much each patch contributes to the class named below the image.",
        "Occlusion and integrated gradients have a sign: red is evidence for the class, blue against it, in "
        "nats of its log-probability."
        if any(method in _SIGNED for method in attribution.maps)
        else "The maps have no sign: brighter patches are more important.",
    ]
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
        correlations = ", ".join(f"{a} and {b} {_agreement(attribution, a, b):.2f}" for a, b in pairs)
        text.append(f"The methods need not agree; the correlations between their maps are: {correlations}.")
    return " ".join(text)


def _agreement(attribution: Attribution, a: str, b: str) -> float:
    """Correlation of the maps of two methods, mean over images; 0 for a constant map."""
    correlations = []
    for one, other in zip(attribution.maps[a], attribution.maps[b], strict=True):
        x, y = one.ravel() - one.mean(), other.ravel() - other.mean()
        norm = float(np.linalg.norm(x) * np.linalg.norm(y))
        correlations.append(float(x @ y) / norm if norm else 0.0)
    return float(np.mean(correlations))


def table(attribution: Attribution) -> tuple[list[str], list[list[object]]]:
    """One row per image, method and patch."""
    rows: list[list[object]] = [
        [image, int(attribution.target[image]), method, *patch, float(maps[image][patch])]
        for image in range(len(attribution.target))
        for method, maps in attribution.maps.items()
        for patch in np.ndindex(maps.shape[1:])
    ]
    return ["image", "class", "method", "row", "column", "value"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    images = request.drawn()
    activation = request.bundle.scores.activation
    attribution = compute(request.model, images.images, target=request.target, activation=activation)
    request.attributions = attribution.maps
    return attribution, draw(attribution, images.pixels, request.bundle.labels, images.names)


FIGURE = FigureSpec("attribution", "Attribution maps", _make, caption, table)


if __name__ == "__main__":

    def sample() -> tuple[Figure, str]:
        images = sample_images(5)
        attribution = compute(sample_model().model, images.images)
        return draw(attribution, images.pixels), caption(attribution)

    show_sample("attribution", sample)
