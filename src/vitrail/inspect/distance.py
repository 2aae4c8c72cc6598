"""How far heads look (paper, Fig. 7 right and Fig. 11): mean attention distance by head and depth.

For every patch the distances to all patches, centre to centre in pixels, weighted by its attention;
then the mean over patches and pictures. Beside it how spread the attention is (entropy), and how
much of it goes to class token and registers. The sums run over any number of pictures, and the
weights of one block are reduced before the next block makes its own: memory does not grow.

Run it: `python -m vitrail.inspect.distance`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.inspect.pictures import check_finite, check_pictures, check_weights_fit, device_of
from vitrail.model import ViT, edit
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

BATCH = 32  # pictures at a time, where they come as one tensor
LOCAL, GLOBAL = 0.5, 0.9  # of the distance of uniform attention: the caption's words for near and far


@dataclass(frozen=True, eq=False)
class Measure:
    """One number of every head: its mean over pictures, and the standard error of that mean."""

    mean: NDArray[np.float64]
    """(L, k)."""
    error: NDArray[np.float64]
    """(L, k); NaN of a single picture."""


@dataclass(frozen=True, eq=False)
class Distances:
    """What the patches look at, in every head of every layer. Class token and registers do not ask here."""

    distance: Measure
    """Pixels, by the weights on patches alone, made to sum to 1. NaN of a head that never looks at one."""
    entropy: Measure
    """Nats, over all tokens."""
    prefix: Measure
    """The share of attention on the tokens before the patches."""
    uniform: float
    """The distance if all patches counted alike, in pixels."""
    largest: float
    """The largest possible entropy, log T."""
    prefix_count: int
    pictures: int


def compute(model: ViT, batches: Tensor | Iterable[Tensor]) -> Distances:
    """The three measures over all pictures of all batches, each (B, C, H, W) and normalised."""
    check_pictures(model)
    config, device = model.config, device_of(model)
    sums = Sums(config, device)
    edits = {f"blocks.{n}.attention.weights": partial(sums.add, n) for n in range(config.depth)}
    for images in batches.split(BATCH) if isinstance(batches, Tensor) and batches.ndim else batches:
        if not isinstance(images, Tensor):
            got = type(images).__name__
            raise InputError("Every batch must be a tensor of pictures.", got, "Pass the pictures alone.")
        check_pictures(model, images)
        check_weights_fit(model, len(images))
        with evaluating(model), edit(model, edits):
            model.encode(images.to(device))
        sums.pictures += len(images)
    if not sums.pictures:
        raise InputError("Statistics need a picture or more.", "no batches", "Pass some pictures.")
    distance, entropy, prefix = sums.measures()
    return Distances(
        distance=distance,
        entropy=entropy,
        prefix=prefix,
        uniform=float(patch_distances(config).mean()),
        largest=float(np.log(config.tokens)),
        prefix_count=config.prefix,
        pictures=sums.pictures,
    )


def patch_distances(config: ViTConfig) -> NDArray[np.float64]:
    """From every patch's centre to every other's, in pixels: (N, N)."""
    rows, columns = np.divmod(np.arange(config.patches), config.grid[1])
    down, across = config.patch_pixels
    return np.hypot(down * (rows[:, None] - rows), across * (columns[:, None] - columns))


class Sums:
    """Sums over pictures, of each measure, its square and how many had one, for every layer and head."""

    def __init__(self, config: ViTConfig, device: torch.device) -> None:
        self.prefix, self.pictures = config.prefix, 0
        self.apart = torch.as_tensor(patch_distances(config), dtype=torch.float32, device=device)
        self.sums = torch.zeros(3, 3, config.depth, config.heads, dtype=torch.float64)

    def add(self, layer: int, weights: Tensor) -> Tensor:
        """Reduce one block's weights (B, k, T, T) as they arise, and hand them on as they are."""
        for sums, values in zip(self.sums, self.reduce(weights), strict=True):
            values = values.double().cpu()  # (B, k)
            there = values != torch.inf  # NaN stays, to be seen at the end
            values = values.where(there, 0)
            sums[:, layer] += torch.stack([values.sum(0), values.square().sum(0), there.double().sum(0)])
        return weights

    def reduce(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distance, entropy and share on the prefix, each (B, k): means over the patches that ask."""
        rows = weights[:, :, self.prefix :].float()  # (B, k, N, T)
        patches = rows[..., self.prefix :]
        total = patches.sum(dim=-1)  # (B, k, N)
        looks = total != 0  # a patch that looks at no patch at all has no distance
        far = (patches * self.apart).sum(dim=-1) / total.where(looks, 1)
        distance = (far * looks).sum(dim=-1) / looks.sum(dim=-1)
        distance = distance.where(looks.any(dim=-1), torch.inf)
        entropy = torch.special.entr(rows).sum(dim=-1).mean(dim=-1)
        return distance, entropy, rows[..., : self.prefix].sum(dim=-1).mean(dim=-1)

    def measures(self) -> list[Measure]:
        sums = self.sums.numpy()
        check_finite("Attention weights", sums)
        total, squares, count = np.moveaxis(sums, 1, 0)  # each (3, L, k)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
            variance = (squares / count - mean**2).clip(0) / (count - 1)  # of the mean
            error = np.sqrt(np.where(count > 1, variance, np.nan))
        return [Measure(*both) for both in zip(mean, error, strict=True)]


# ---- the figure ------------------------------------------------------------------------------------


@in_our_style
def draw(found: Distances) -> Figure:
    """A dot for each head over depth; the line is the mean of the heads."""
    panels: list[tuple[Measure, str, float | None, str]] = [
        (found.distance, "mean attention distance, pixels", found.uniform, "uniform attention"),
        (found.entropy, "entropy of attention, nats", found.largest, "largest possible"),
    ]
    if found.prefix_count:
        panels.append((found.prefix, "share of attention on prefix tokens", None, ""))
    figure = canvas(3.4 * len(panels), 3.3)
    axes = figure.subplots(1, len(panels))
    for axis, (measure, label, limit, word) in zip(axes, panels, strict=True):
        draw_heads(axis, measure)
        if limit is not None:
            axis.axhline(limit, color=FAINT, linestyle="--", linewidth=1, label=word)
        axis.set_ylim(0, 1.18 * axis.get_ylim()[1])  # room above for the legend
        axis.set_xlabel("layer")
        axis.set_ylabel(label)
        axis.legend(loc="upper left", fontsize=7.5, ncols=3, columnspacing=1, handletextpad=0.4)
    return figure


def draw_heads(axis: Axes, measure: Measure) -> None:
    from matplotlib.ticker import MaxNLocator

    layers = np.arange(len(measure.mean))
    for head, (values, errors) in enumerate(zip(measure.mean.T, measure.error.T, strict=True)):
        axis.errorbar(
            *(layers, values, np.nan_to_num(errors)),
            fmt="o",
            markersize=4,
            markeredgewidth=0,
            elinewidth=0.6,
            color=LINES[0],
            alpha=0.6,
            label="" if head else "one head",
        )
    axis.plot(layers, layer_means(measure), color=LINES[1], marker="_", label="mean")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_xlim(-0.5, len(layers) - 0.5)


def layer_means(measure: Measure) -> NDArray[np.float64]:
    """The mean of the heads that have a value, for each layer; NaN where none has."""
    return np.ma.filled(np.ma.masked_invalid(measure.mean).mean(axis=1), np.nan)


def caption(found: Distances) -> str:
    """How to read it; whether distance grows with depth here; and the heads of the first layer."""
    means, relative = layer_means(found.distance), found.distance.mean / found.uniform
    first = relative[0][np.isfinite(relative[0])]
    sentences = [
        f"Each dot is a head, its patches' attention averaged over {found.pictures} "
        f"picture{'s' * (found.pictures > 1)}; distances are between patch centres, with the weights on "
        f"patches made to sum to 1, and uniform attention would give {found.uniform:.1f} pixels.",
        growth(means),
    ]
    if len(first):
        sentences.append(
            f"In layer 0 heads reach from {100 * first.min():.0f}% to {100 * first.max():.0f}% of the "
            f"uniform distance: {(first < LOCAL).sum()} of {len(first)} are local (below {100 * LOCAL:.0f}%) "
            f"and {(first > GLOBAL).sum()} global (above {100 * GLOBAL:.0f}%); {paper(first)}."
        )
    share = f", and prefix tokens take {100 * found.prefix.mean.mean():.1f}%" if found.prefix_count else ""
    sentences.append(
        f"Entropy is {100 * found.entropy.mean.mean() / found.largest:.0f}% of the largest possible{share}, "
        "mean over heads and layers."
    )
    return " ".join(sentences)


def growth(means: NDArray[np.float64]) -> str:
    """Whether mean distance grows with depth, in a sentence."""
    if len(means) == 1:
        return f"The mean of the heads is {means[0]:.1f} pixels in the only layer."
    ends = f"from {means[0]:.1f} pixels in layer 0 to {means[-1]:.1f} in layer {len(means) - 1}"
    known = np.isfinite(means)
    if known.sum() < 3:
        return f"The mean of the heads goes {ends}; over so few layers a correlation says nothing."
    if np.ptp(means[known]) == 0:
        return f"Mean distance is the same in every layer, {means[known][0]:.1f} pixels."
    r = float(np.corrcoef(np.arange(len(means))[known], means[known])[0, 1])
    words = "grows with depth, as in the paper" if r > 0.5 else "does not grow with depth here"
    return f"Mean distance {words}: {ends}, correlation with depth {r:.2f}."


def paper(first: NDArray[np.float64]) -> str:
    """The paper's finding on low layers, held against this model."""
    if (first < LOCAL).any() and (first > GLOBAL).any():
        return "the paper too finds both kinds in its lowest layers"
    return "the paper finds both kinds in its lowest layers, this model does not have both"


def table(found: Distances) -> tuple[list[str], list[list[object]]]:
    """A row for each layer and head."""
    header = ["layer", "head", "distance_pixels", "distance_error", "distance_of_uniform"]
    header += [
        "entropy_nats",
        "entropy_error",
        "entropy_of_largest",
        "prefix_share",
        "prefix_error",
        "pictures",
    ]
    rows: list[list[object]] = []
    for layer, head in np.ndindex(found.distance.mean.shape):
        distance, entropy, prefix = (
            (float(one.mean[layer, head]), float(one.error[layer, head]))
            for one in (found.distance, found.entropy, found.prefix)
        )
        row: list[Any] = [layer, head, *distance, distance[0] / found.uniform]
        rows.append([*row, *entropy, entropy[0] / found.largest, *prefix, found.pictures])
    return header, rows


if __name__ == "__main__":
    from vitrail.inspect.sample import sample_model, sample_pictures, show

    def make() -> tuple[Figure, str]:
        found = compute(sample_model().model, sample_pictures(200).images)
        return draw(found), caption(found)

    show("distance", make)
