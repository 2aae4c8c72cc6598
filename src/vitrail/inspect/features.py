"""What the patch tokens hold: principal components as colours, foreground, norms, and likeness to one patch.

The components are those of all patches of all pictures together, so one colour means one thing throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.errors import InputError, printable
from vitrail.inspect.canvas import LINES, SIGNED, canvas, in_our_style, show_map, show_picture
from vitrail.inspect.components import principal
from vitrail.inspect.pictures import Pictures, check_finite, check_number, check_pictures
from vitrail.inspect.sample import sample_model, sample_pictures, show
from vitrail.model import ViT, record
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Mask = NDArray[np.bool_]

MOST = 8  # pictures in a figure
ROBUST = 1.4826  # median absolute deviation to standard deviation, for a bell curve
FAR = 5  # deviations above the median: an artefact (as in Darcet et al. 2023, who give them registers)


@dataclass(frozen=True, eq=False)
class Features:
    """The patch tokens of B pictures on their grid, in numbers that can be drawn."""

    layer: int | None
    """The block whose tokens they are, from 0; none for the encoder's last."""
    colours: NDArray[np.float32]
    """(B, h, w, 3) from 0 to 1: the first three components, each from its 1 % to its 99 % quantile."""
    share: Floats
    """(up to 3,): how much of the variance each colour stands for."""
    foreground: Mask
    """(B, h, w): the side of the first component that lies less on the border."""
    border: float
    """Which share of the foreground lies on the border all the same."""
    border_rest: float
    """Which share of the rest does."""
    between: float
    """Which share of the first component's variance is between pictures, not within them."""
    patch: tuple[int, int]
    cosine: Floats
    """(B, h, w): of each patch with the chosen patch of the same picture."""
    norms: Floats
    """(L, B, h, w): the length of each token as its block leaves it, before the last norm."""
    limits: Floats
    """(L,): above this a norm is an artefact: the median and five robust deviations."""
    block: int
    """The block whose norms are drawn."""

    @property
    def artefacts(self) -> Mask:
        """(L, B, h, w): tokens far longer than others."""
        return self.norms > self.limits[:, None, None, None]


def compute(
    model: ViT, images: Tensor, layer: int | None = None, patch: tuple[int, int] | None = None
) -> Features:
    """Look at the tokens that `model.encode` returns, or would return if block `layer` were its last.

    Args:
        patch: row and column of the patch that others are compared with; the middle when not given.
    """
    check_pictures(model, images)
    config = model.config
    block = config.depth - 1 if layer is None else check_number("layer", layer, config.depth)
    row, column = check_patch(patch, config.grid)
    with evaluating(model), record(model, "blocks.*.out") as tape:
        last = model.encode(images.to(model.tokens.proj.weight.device), layers=[block])
        lengths = [z[:, config.prefix :].double().norm(dim=2).cpu().numpy() for z in tape.values()]
        tokens = last.layers[block].patches.double().cpu().numpy()  # (B, h, w, D)
    check_finite("The tokens", tokens)
    norms = np.stack(lengths).reshape(config.depth, *tokens.shape[:3])
    components, share = principal(tokens.reshape(-1, tokens.shape[3]))
    values = (tokens - tokens.mean(axis=(0, 1, 2))) @ components[:3].T  # (B, h, w, up to 3)
    first = values[..., 0] if len(share) else np.zeros(tokens.shape[:3])
    foreground, border, border_rest = split(first)
    return Features(
        layer=None if layer is None else block,
        colours=as_colours(values),
        share=share[:3],
        foreground=foreground,
        border=border,
        border_rest=border_rest,
        between=float(first.mean(axis=(1, 2)).var() / first.var()) if len(share) else 0.0,
        patch=(row, column),
        cosine=cosines(tokens, row, column),
        norms=norms,
        limits=np.array([limit(one) for one in norms]),
        block=block,
    )


def check_patch(patch: tuple[int, int] | None, grid: tuple[int, ...]) -> tuple[int, int]:
    h, w = grid
    if patch is None:
        return h // 2, w // 2
    if not isinstance(patch, tuple | list) or len(patch) != 2:
        raise InputError("A patch is its row and its column.", printable(patch), f"The grid is {h} x {w}.")
    return check_number("The patch's row", patch[0], h), check_number("The patch's column", patch[1], w)


def as_colours(values: Floats) -> NDArray[np.float32]:
    """Red, green and blue; a component that is not there is half of its colour everywhere."""
    colours = np.full((*values.shape[:3], 3), 0.5, dtype=np.float32)
    for n in range(values.shape[3]):
        low, high = np.quantile(values[..., n], [0.01, 0.99])
        if high > low:
            colours[..., n] = ((values[..., n] - low) / (high - low)).clip(0, 1)
    return colours


def split(first: Floats) -> tuple[Mask, float, float]:
    """Foreground and its share of border patches, and the rest's.

    The first component is cut in two where the halves differ most (Otsu). Things seldom lie along
    the border: the half with the smaller share of border patches is the foreground; if both have
    the same, the smaller half.
    """
    side = first > otsu(first.ravel())
    edge = np.ones(first.shape[1:], dtype=bool)
    edge[1:-1, 1:-1] = False
    shares = [float(edge[np.nonzero(half)[1:]].mean()) if half.any() else 1.0 for half in (side, ~side)]
    sizes = [int(side.sum()), int((~side).sum())]
    if not all(sizes):  # nothing to tell apart
        return np.zeros_like(side), float("nan"), shares[sizes.index(max(sizes))]
    if (shares[0], sizes[0]) <= (shares[1], sizes[1]):
        return side, shares[0], shares[1]
    return ~side, shares[1], shares[0]


def otsu(values: Floats) -> float:
    """The cut that leaves the most variance between the two halves: what is above it is one of them."""
    ordered = np.sort(values)
    if len(ordered) == 1:
        return float(ordered[0])
    count = np.arange(1, len(ordered))
    below = ordered.cumsum()[:-1]
    above = ordered.sum() - below
    between = count * count[::-1] * (above / count[::-1] - below / count) ** 2
    place = int(between.argmax())
    return float(ordered[place] + ordered[place + 1]) / 2


def cosines(tokens: Floats, row: int, column: int) -> Floats:
    """Each patch of a picture with one of them: (B, h, w)."""
    unit = tokens / np.linalg.norm(tokens, axis=3, keepdims=True).clip(min=1e-300)
    return np.einsum("bhwd,bd->bhw", unit, unit[:, row, column])


def limit(norms: Floats) -> float:
    """The norm above which a token is an artefact.

    A deviation is taken as at least a hundredth of the median: where a norm makes all tokens as good
    as equally long, rounding would look far off.
    """
    median = float(np.median(norms))
    deviation = ROBUST * float(np.median(np.abs(norms - median)))
    return median + FAR * max(deviation, 0.01 * median)


@in_our_style
def draw(found: Features, pictures: Pictures) -> Figure:
    """The first eight pictures, one column each, and the norms of all blocks below."""
    count = min(len(pictures), MOST)
    height = found.foreground.shape[1] / found.foreground.shape[2]
    tall = min(max(height, 0.5), 2.0)
    part = f", the first {count} of {len(pictures)} pictures" if count < len(pictures) else ""
    where = "the last layer" if found.layer is None else f"block {found.layer}"
    figure = canvas(max(4.8, 2.6 + 0.95 * count), 2.6 + 4.9 * tall, f"Patch tokens of {where}{part}")
    parts: Any = figure.subfigures(2, 1, height_ratios=[4.9 * tall, 2.0])
    upper, lower = parts
    axes = upper.subplots(5, count + 1, squeeze=False, width_ratios=[1] * count + [0.09])  # bars at the right
    for axis in axes[:3, -1]:
        axis.axis("off")
    for n in range(count):
        draw_column(axes[:, n], found, pictures, n)
    rows = [
        "picture",
        "components\n1, 2, 3 as\nred, green, blue",
        "foreground",
        "norm",
        "cosine with\nthe marked",
    ]
    for axis, words in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(words, rotation=0, ha="right", va="center", fontsize=8)
    for row, words in ((3, f"norm,\nblock {found.block}"), (4, "cosine")):
        made = upper.colorbar(axes[row, 0].images[0], cax=axes[row, -1], label=words)
        made.outline.set_visible(False)
    draw_norms(lower.subplots(), found)
    return figure


def draw_column(axes: Any, found: Features, pictures: Pictures, n: int) -> None:
    """One picture from top to bottom."""
    most = float(found.norms[found.block].max())
    show_picture(axes[0], pictures.pixels[n], printable(pictures.names[n], 14))
    axes[1].imshow(found.colours[n])
    axes[2].imshow(np.where(found.foreground[n], 0.85, 0.15), cmap="gray", vmin=0, vmax=1)
    show_map(axes[3], found.norms[found.block, n], most=most)
    for row, column in np.argwhere(found.artefacts[found.block, n]):
        axes[3].plot(column, row, marker="x", color=LINES[1], markersize=5)
    axes[4].imshow(found.cosine[n], cmap=SIGNED, vmin=-1, vmax=1)
    axes[4].plot(*found.patch[::-1], marker="o", markersize=5, color="white", fillstyle="none")
    for axis in axes:
        axis.axis("on")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)


def draw_norms(axis: Any, found: Features) -> None:
    flat = found.norms.reshape(len(found.norms), -1)
    blocks = np.arange(len(flat))
    for values, words, colour in (
        (flat.max(axis=1), "longest", LINES[1]),
        (found.limits, "limit for artefacts", LINES[2]),
        (np.median(flat, axis=1), "median", LINES[0]),
    ):
        axis.plot(blocks, values, marker=".", color=colour, label=words)
    axis.set(xlabel="block", ylabel="token norm", ylim=(0, None))
    axis.set_xlim(-0.5, len(flat) - 0.5)
    axis.set_xticks(blocks[:: -(-len(flat) // 16)])
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def caption(found: Features) -> str:
    if not len(found.share):
        return "All patch tokens are the same: there is nothing to tell apart."
    return (
        f"Red, green and blue are the first components of all patch tokens together "
        f"({', '.join(f'{share:.0%}' for share in found.share)} of their variance), so one colour means one "
        f"thing in all pictures; the last row shows how alike each patch is to the one in the ring. "
        f"{words_on_foreground(found)} {words_on_norms(found)}"
    )


def words_on_foreground(found: Features) -> str:
    words = (
        f"The first component, cut in two where its halves differ most, gives a foreground of "
        f"{found.foreground.mean():.0%} of the patches: {found.border:.0%} of it lie on the border, and "
        f"{found.border_rest:.0%} of the rest"
    )
    if len(found.foreground) == 1:
        return f"{words}."
    what = "pictures" if found.between > 0.5 else "patches within a picture"
    return f"{words}; {found.between:.0%} of its variance is between pictures, so it tells {what} apart."


def words_on_norms(found: Features) -> str:
    norms, count = found.norms[found.block], int(found.artefacts[found.block].sum())
    words = f"{count} of {norms.size} tokens are artefacts (crosses)" if count else "no token is an artefact"
    return (
        f"In block {found.block} {words}: the median norm is {np.median(norms):.1f}, five robust deviations "
        f"above it are {found.limits[found.block]:.1f}, and the longest token has {norms.max():.1f}."
    )


def table(found: Features) -> tuple[list[str], list[list[object]]]:
    """The norms, block by block; artefacts are counted over all pictures."""
    flat = found.norms.reshape(len(found.norms), -1)
    counts = found.artefacts.reshape(len(flat), -1).sum(axis=1)
    columns = (np.median(flat, axis=1), flat.max(axis=1), found.limits)
    rows: list[list[object]] = [
        [block, *map(float, values), int(counts[block])]
        for block, values in enumerate(zip(*columns, strict=True))
    ]
    return ["block", "median_norm", "longest", "limit", "artefacts"], rows


if __name__ == "__main__":
    pictures = sample_pictures()
    found = compute(sample_model().model, pictures.images)
    show("features", lambda: (draw(found, pictures), caption(found)))
