"""What the model looks for in a patch: principal components of its embedding filters (paper, Fig. 7 left).

Each of the D numbers of a token is the patch weighed by one filter. The filters' principal components are
the patterns that they are sums of, the most used first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import InputError
from vitrail.inspect.canvas import LINES, SIGNED, bar, canvas, in_our_style
from vitrail.inspect.components import principal
from vitrail.inspect.pictures import check_finite, check_pictures
from vitrail.inspect.sample import sample_model, show
from vitrail.model import ViT
from vitrail.model.modes import evaluating
from vitrail.model.stem import standardise

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch import Tensor

MOST = 28  # as many as the paper shows
MUCH = 0.9  # of the variance
ACROSS = 7  # tiles in a row


@dataclass(frozen=True, eq=False)
class Filters:
    """The patterns that the filters are sums of."""

    components: NDArray[np.float32]
    """(n, C, P, P), each of length 1; its sign is the one that makes its largest weight positive."""
    share: NDArray[np.float64]
    """(n,), how much of the filters' variance lies along each."""
    smoothness: NDArray[np.float64]
    """(n,), how alike pixels side by side are in each: 1 for an even patch, about 0 for noise."""
    count: int
    """D, how many filters there are."""
    needed: int
    """How many components hold 90 % of the variance."""
    needed_by_noise: int
    """The same for as many filters of random numbers."""
    source: str
    """Whose filters they are."""


def compute(model: ViT) -> Filters:
    check_pictures(model)
    with evaluating(model):
        tensor, source = pixel_filters(model)
        weight = tensor.detach().double().cpu().numpy()  # (D, C, P, P)
    check_finite("The filters", weight)
    components, share = principal(weight.reshape(len(weight), -1))
    if not len(share):
        raise InputError("There must be filters that differ.", f"{len(weight)} alike", "Train the model.")
    noise = np.random.default_rng(0).standard_normal((len(weight), weight[0].size))
    tiles = components[:MOST].reshape(-1, *weight.shape[1:])
    return Filters(
        components=tiles.astype(np.float32),
        share=share[:MOST],
        smoothness=np.array([smoothness(tile) for tile in tiles]),
        count=len(weight),
        needed=holding(share),
        needed_by_noise=holding(principal(noise)[1]),
        source=source,
    )


def pixel_filters(model: ViT) -> tuple[Tensor, str]:
    """The weights that meet the pixels, (D, C, P, P), and whose they are.

    After a stem the patch projection weighs features, which are no pattern one could look at; what
    meets the pixels there is the stem's first convolution.
    """
    tokens: Any = model.tokens
    match model.config.embedding:
        case "conv":
            return tokens.stem.conv1.weight, "the stem's first convolution"
        case "resnet":  # its kernels are used standardised
            weight = standardise(tokens.stem.root.conv.weight)
            return weight, "the stem's first convolution (as used, standardised)"
        case "mlp":
            return tokens.proj.weight, "the first layer of the patch embedding"
        case _:
            return tokens.proj.weight, "the patch embedding"


def smoothness(tile: NDArray[np.floating]) -> float:
    """The mean product of pixels side by side, over the mean square of all: (C, P, P) -> a number."""
    pairs = [(tile[:, 1:], tile[:, :-1]), (tile[..., 1:], tile[..., :-1])]
    products = np.concatenate([(one * other).ravel() for one, other in pairs])
    return float(products.mean() / np.square(tile).mean()) if products.size else float("nan")


def holding(share: NDArray[np.float64]) -> int:
    """How many components it takes to hold 90 % of the variance."""
    return int(np.searchsorted(share.cumsum(), MUCH - 1e-9)) + 1 if len(share) else 0


@in_our_style
def draw(found: Filters) -> Figure:
    count, channels = found.components.shape[:2]
    rows = -(-count // ACROSS)
    what = found.source.split(" (")[0]
    title = f"{what[0].upper()}{what[1:]}: principal components of its {found.count} filters"
    if channels == 3:
        title += "\nmid grey is 0; each tile is scaled by its own largest weight"
    figure = canvas(8.6, 0.7 + 0.98 * max(rows, 2), title)
    parts: Any = figure.subfigures(1, 2, width_ratios=[3.4, 1])
    left, right = parts
    axes = left.subplots(rows, ACROSS, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    shown = as_colours(found) if channels == 3 else found.components.mean(axis=1)
    limit = float(np.abs(shown).max())
    for axis, tile, share in zip(axes.flat, shown, found.share, strict=False):
        image = axis.imshow(tile, cmap=SIGNED, vmin=-limit, vmax=limit)
        axis.set_xlabel(percent(share), fontsize=7.5, labelpad=2)
    if channels != 3:
        bar(left, image, axes, "weight" if channels == 1 else f"weight, mean of {channels} channels")
    draw_shares(right, found)
    return figure


def as_colours(found: Filters) -> NDArray[np.float32]:
    """Weights of three channels as colours around mid grey, which is 0: (n, P, P, 3)."""
    most = np.abs(found.components).max(axis=(1, 2, 3), keepdims=True)
    return (0.5 + 0.5 * found.components / most).transpose(0, 2, 3, 1)


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"


def draw_shares(part: Any, found: Filters) -> None:
    """How much of the variance the first 1, 2, 3 ... components hold together."""
    axis = part.subplots()
    places = np.arange(1, len(found.share) + 1)
    axis.plot(places, 100 * found.share.cumsum(), color=LINES[0], marker=".", markersize=4)
    axis.set(xlabel="components", ylabel="% of variance, together", ylim=(0, 103))
    axis.set_xlim(0, max(len(found.share), 2) + 0.7)
    axis.locator_params(axis="x", integer=True, nbins=4)


def caption(found: Filters) -> str:
    count, channels = found.components.shape[:2]
    scale = {
        3: "each tile is scaled by its own largest weight, and mid grey is 0",
        1: "all tiles share the scale of the bar",
    }.get(channels, f"each tile is the mean over {channels} channels, and all share the scale of the bar")
    few = found.needed < 0.8 * found.needed_by_noise
    verdict = (
        "the filters share few patterns, as in the paper"
        if few
        else "unlike in the paper, the filters share no fewer patterns than noise does"
    )
    smooth = float((found.smoothness * found.share).sum() / found.share.sum())
    words = (
        f"The patterns in which the {found.count} filters of {found.source} differ most, {count} of them, "
        f"with the share of the variance under each; {scale}. To hold 90 % of the variance it takes "
        f"{found.needed}, and {found.needed_by_noise} with random filters: {verdict}."
    )
    if np.isnan(smooth):
        return words
    look = "smooth patterns" if smooth > 0.5 else "somewhat smooth" if smooth > 0.2 else "not smooth"
    return (
        f"{words} Pixels side by side agree to {smooth:.2f} (1 is an even patch, noise is near 0), so the "
        f"components are {look}."
    )


def table(found: Filters) -> tuple[list[str], list[list[object]]]:
    header = ["component", "share_of_variance", "cumulative", "smoothness"]
    columns = zip(found.share, found.share.cumsum(), found.smoothness, strict=True)
    return header, [[place, *map(float, row)] for place, row in enumerate(columns, start=1)]


if __name__ == "__main__":
    found = compute(sample_model().model)
    show("filters", lambda: (draw(found), caption(found)))
