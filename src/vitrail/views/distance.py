"""Mean attention distance by head and depth (ViT paper, Fig. 7 right and Fig. 11).

The attention distance of a patch is the mean distance to all patches, center to center in pixels, weighted by
its attention; a head's distance is the mean over patches and images. The entropy of the attention and the
attention to prefix tokens are computed as well. Sums run over any number of images, and the weights of one
block are reduced before the next block computes its own, so memory does not grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model import ViT, edit
from vitrail.model.config import ViTConfig
from vitrail.model.device import eval_mode
from vitrail.views.canvas import FAINT, LINES, Axes, Figure, new_figure, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import check_finite, check_images, check_weights_fit, device_of

_BATCH = 32  # images per forward pass if they are passed as one tensor
_LEAST_GROWTH = 0.1  # of the uniform distance; less is what random heads differ by
LOCAL, GLOBAL = 0.5, 0.9  # below, or above, this fraction of the uniform distance a head is local, or global


@dataclass(frozen=True, eq=False)
class Measure:
    """One quantity per head: its mean over images and the standard error of that mean."""

    mean: NDArray[np.float64]
    """(L, k)."""
    error: NDArray[np.float64]
    """(L, k); NaN for a single image."""


@dataclass(frozen=True, eq=False)
class Distances:
    """Attention statistics per head and layer, with patch tokens as queries."""

    distance: Measure
    """In pixels, from the weights on patches renormalized to sum to 1. NaN if a head attends to no patch."""
    entropy: Measure
    """In nats, over all tokens."""
    prefix: Measure
    """Total attention weight on the prefix tokens."""
    uniform: float
    """The distance of uniform attention, in pixels."""
    max_entropy: float
    """The largest possible entropy, log T."""
    prefix_count: int
    images: int


def compute(model: ViT, batches: Tensor | Iterable[Tensor]) -> Distances:
    """Compute the statistics over all images of all batches, each (B, C, H, W) and normalized."""
    check_images(model)
    config, device = model.config, device_of(model)
    sums = _Sums(config, device)
    edits = {f"blocks.{n}.attention.weights": partial(sums.add, n) for n in range(config.depth)}
    for images in batches.split(_BATCH) if isinstance(batches, Tensor) and batches.ndim else batches:
        if not isinstance(images, Tensor):
            raise InputError(
                f"Every batch must be a tensor of images, not a {type(images).__name__}; pass only images."
            )
        check_images(model, images)
        check_weights_fit(model, len(images))
        with eval_mode(model), edit(model, edits):
            model.encode(images.to(device))
        sums.images += len(images)
    if not sums.images:
        raise InputError("Attention distances need at least one image, but there are no batches; pass some.")
    distance, entropy, prefix = sums.measures()
    return Distances(
        distance=distance,
        entropy=entropy,
        prefix=prefix,
        uniform=float(_patch_distances(config).mean()),
        max_entropy=float(np.log(config.tokens)),
        prefix_count=config.prefix,
        images=sums.images,
    )


def _patch_distances(config: ViTConfig) -> NDArray[np.float64]:
    """Distances between the centers of all pairs of patches, in pixels: (N, N)."""
    rows, columns = np.divmod(np.arange(config.patches), config.grid[1])
    down, across = config.patch_pixels
    return np.hypot(down * (rows[:, None] - rows), across * (columns[:, None] - columns))


class _Sums:
    """Running sums per layer and head: of each measure, of its square, and the number of values."""

    def __init__(self, config: ViTConfig, device: torch.device) -> None:
        self.prefix, self.images = config.prefix, 0
        self.distances = torch.as_tensor(_patch_distances(config), dtype=torch.float32, device=device)
        self.sums = torch.zeros(3, 3, config.depth, config.heads, dtype=torch.float64)

    def add(self, layer: int, weights: Tensor) -> Tensor:
        """Reduce the weights (B, k, T, T) of one block as they are computed, and return them unchanged."""
        for sums, values in zip(self.sums, self.reduce(weights), strict=True):
            values = values.double().cpu()  # (B, k)
            valid = values != torch.inf  # NaN stays, and is reported at the end
            values = values.where(valid, 0)
            sums[:, layer] += torch.stack([values.sum(0), values.square().sum(0), valid.double().sum(0)])
        return weights

    def reduce(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distance, entropy and weight on the prefix, each (B, k): means over the query patches."""
        rows = weights[:, :, self.prefix :].float()  # (B, k, N, T)
        patches = rows[..., self.prefix :]
        total = patches.sum(dim=-1)  # (B, k, N)
        valid = total != 0  # a query that attends to no patch has no distance
        per_query = (patches * self.distances).sum(dim=-1) / total.where(valid, 1)
        distance = (per_query * valid).sum(dim=-1) / valid.sum(dim=-1)
        distance = distance.where(valid.any(dim=-1), torch.inf)
        entropy = torch.special.entr(rows).sum(dim=-1).mean(dim=-1)
        return distance, entropy, rows[..., : self.prefix].sum(dim=-1).mean(dim=-1)

    def measures(self) -> list[Measure]:
        """Mean and standard error of distance, entropy and prefix weight."""
        sums = self.sums.numpy()
        check_finite("Attention weights", sums)
        total, squares, count = np.moveaxis(sums, 1, 0)  # each (3, L, k)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
            variance = (squares / count - mean**2).clip(0) / (count - 1)  # of the mean
            error = np.sqrt(np.where(count > 1, variance, np.nan))
        return [Measure(*both) for both in zip(mean, error, strict=True)]


# ---- the figure ------------------------------------------------------------------------------------


@styled
def draw(distances: Distances) -> Figure:
    """Draw one dot per head by depth; the line is the mean over heads."""
    panels: list[tuple[Measure, str, float | None, str]] = [
        (distances.distance, "mean attention distance, pixels", distances.uniform, "uniform attention"),
        (distances.entropy, "attention entropy, nats", distances.max_entropy, "maximum"),
    ]
    if distances.prefix_count:
        panels.append((distances.prefix, "attention to prefix tokens", None, ""))
    figure = new_figure(3.4 * len(panels), 3.3)
    axes = figure.subplots(1, len(panels))
    for axis, (measure, label, reference, name) in zip(axes, panels, strict=True):
        _draw_heads(axis, measure)
        if reference is not None:
            axis.axhline(reference, color=FAINT, linestyle="--", linewidth=1, label=name)
        axis.set(xlabel="layer", ylabel=label, ylim=(0, 1.18 * axis.get_ylim()[1]))  # room for the legend
        axis.legend(loc="upper left", fontsize=7.5, ncols=3, columnspacing=1, handletextpad=0.4)
    return figure


def _draw_heads(axis: Axes, measure: Measure) -> None:
    from matplotlib.ticker import MaxNLocator

    layers = np.arange(len(measure.mean))
    dots: Any = {"fmt": "o", "markersize": 4, "markeredgewidth": 0, "elinewidth": 0.6, "alpha": 0.6}
    for head, (values, errors) in enumerate(zip(measure.mean.T, measure.error.T, strict=True)):
        label = "" if head else "one head"
        axis.errorbar(layers, values, np.nan_to_num(errors), color=LINES[0], label=label, **dots)
    axis.plot(layers, _layer_means(measure), color=LINES[1], marker="_", label="mean")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_xlim(-0.5, len(layers) - 0.5)


def _layer_means(measure: Measure) -> NDArray[np.float64]:
    """Mean over the heads that have a value, per layer; NaN if none has."""
    return np.ma.filled(np.ma.masked_invalid(measure.mean).mean(axis=1), np.nan)


def caption(distances: Distances) -> str:
    """Explain the figure, whether distance grows with depth, and the lowest and highest layers."""
    means, relative = _layer_means(distances.distance), distances.distance.mean / distances.uniform
    sentences = [
        f"Each dot is one head, averaged over its patches and {distances.images} "
        f"image{'s' * (distances.images > 1)}. Distances are between patch centers, with the weights on "
        f"patches normalized to sum to 1; uniform attention would give {distances.uniform:.1f} pixels.",
        _describe_depth(means, distances.uniform),
    ]
    few = lowest_layers(len(relative))
    low, high = (part[np.isfinite(part)] for part in (relative[:few], relative[-few:]))
    if len(low):
        sentences.append(
            f"In {_name_layers(0, few)}, {_describe_heads(low)} (local: below {LOCAL:.0%}, global: above "
            f"{GLOBAL:.0%}); {_compare_with_paper(low)}."
        )
    if len(relative) > few and len(high):
        sentences.append(f"In {_name_layers(len(relative) - few, few)}, {_describe_heads(high)}.")
    entropy = distances.entropy.mean.mean() / distances.max_entropy
    prefix = f", and prefix tokens receive {100 * distances.prefix.mean.mean():.1f}% of the attention"
    sentences.append(
        f"On average over heads and layers, attention entropy is {entropy:.0%} of its maximum"
        f"{prefix if distances.prefix_count else ''}."
    )
    return " ".join(sentences)


def _describe_depth(means: NDArray[np.float64], uniform: float) -> str:
    """One sentence on whether the mean distance grows with depth."""
    if len(means) == 1:
        return f"The mean over heads is {means[0]:.1f} pixels in the only layer."
    ends = f"from {means[0]:.1f} pixels in layer 0 to {means[-1]:.1f} in layer {len(means) - 1}"
    valid = np.isfinite(means)
    if valid.sum() < 3:
        return f"The mean over heads goes {ends}, too few layers for a meaningful correlation with depth."
    if np.ptp(means[valid]) == 0:
        return f"The mean distance is the same in every layer, {means[valid][0]:.1f} pixels."
    r = float(np.corrcoef(np.arange(len(means))[valid], means[valid])[0, 1])
    grows = r > 0.5 and np.ptp(means[valid]) > _LEAST_GROWTH * uniform
    trend = "grows with depth, as in the ViT paper" if grows else "does not grow with depth here"
    return f"The mean distance {trend}: {ends}, correlation with depth {r:.2f}."


def lowest_layers(depth: int) -> int:
    """How many layers count as the lowest ones: a third of them."""
    return max(1, depth // 3)


def _name_layers(first: int, count: int) -> str:
    return f"layer {first}" if count == 1 else f"layers {first} to {first + count - 1}"


def _describe_heads(heads: NDArray[np.float64]) -> str:
    """The range of the heads' distances, as fractions of the uniform distance, and their kinds."""
    return (
        f"head distances range from {heads.min():.0%} to {heads.max():.0%} of the uniform distance: "
        f"{(heads < LOCAL).sum()} of {len(heads)} heads are local and {(heads > GLOBAL).sum()} global"
    )


def _compare_with_paper(lowest: NDArray[np.float64]) -> str:
    """One clause that compares the lowest layers with the findings of the ViT paper."""
    here = {
        (False, False): "there is neither",
        (True, False): "some are local and none is global",
        (False, True): "some are global and none is local",
    }
    kinds = bool((lowest < LOCAL).any()), bool((lowest > GLOBAL).any())
    if all(kinds):
        return "the ViT paper also finds both kinds in the lowest layers"
    return f"the ViT paper finds both kinds in the lowest layers, here {here[kinds]}"


def table(distances: Distances) -> Rows:
    """List the statistics of each layer and head."""
    measured, entropy, prefix = distances.distance, distances.entropy, distances.prefix
    columns = {
        "distance_pixels": measured.mean,
        "distance_error": measured.error,
        "distance_of_uniform": measured.mean / distances.uniform,
        "entropy_nats": entropy.mean,
        "entropy_error": entropy.error,
        "entropy_of_maximum": entropy.mean / distances.max_entropy,
        "prefix_fraction": prefix.mean,
        "prefix_error": prefix.error,
    }
    rows: list[list[object]] = [
        [*index, *(float(column[index]) for column in columns.values()), distances.images]
        for index in np.ndindex(measured.mean.shape)
    ]
    return ["layer", "head", *columns, "images"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    distances = compute(request.model, request.batches("distance"))
    return distances, draw(distances)


FIGURE = FigureSpec("distance", "Mean attention distance", _make, caption, table)
