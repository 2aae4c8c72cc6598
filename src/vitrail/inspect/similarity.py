"""How alike the layers' views of the same pictures are: linear CKA (Kornblith et al. 2019).

    CKA(X, Y) = |Y^T X|^2 / (|X^T X| |Y^T Y|)

with Frobenius norms, X and Y (n, D): one row for each token of each picture, each column of mean 0. It is 1
where Y is X turned and scaled as a whole, whatever the channels are called; nothing in it is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from vitrail.errors import InputError, printable, suggest
from vitrail.inspect.canvas import AMOUNT, bar, canvas, in_our_style
from vitrail.inspect.pictures import check_finite, check_pictures
from vitrail.inspect.sample import sample_model, sample_pictures, show
from vitrail.model import ViT, record
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

OVER = ("patches", "pooled")


@dataclass(frozen=True, eq=False)
class Similarity:
    """Every layer against every layer."""

    names: list[str]
    """embed, then the blocks by number from 0, then final: the tokens after the last norm."""
    cka: Floats
    """(layers, layers), from 0 to 1; nan where a layer is the same for all rows."""
    rows: int
    """n, how many vectors each layer was compared by."""
    width: int
    """D, how long each is."""
    over: str


def compute(model: ViT, images: Tensor, over: Literal["patches", "pooled"] = "patches") -> Similarity:
    """Compare layers by their patch tokens, or by the one vector that pooling would make of each.

    `pooled` is after the last norm, as the head would see it; so the last block is `final`.
    """
    check_pictures(model, images)
    if over not in OVER:
        raise InputError("over must say which vectors to compare.", printable(over), suggest(str(over), OVER))
    features = dict(zip(layer_names(model, over), layers_of(model, images, over), strict=True))
    for name, rows in features.items():
        check_finite(f"The vectors of {name}", rows)
    count, width = next(iter(features.values())).shape
    if count < 2:
        got = f"{count} {'picture' if over == 'pooled' else 'patch'}"
        raise InputError("It takes several vectors to compare layers.", got, "Give more pictures.")
    return Similarity(list(features), linear_cka(list(features.values())), count, width, over)


def layer_names(model: ViT, over: str) -> list[str]:
    blocks = [str(index) for index in range(model.config.depth)]
    return ["embed", *blocks, "final"] if over == "patches" else ["embed", *blocks[:-1], "final"]


def layers_of(model: ViT, images: Tensor, over: str) -> list[Floats]:
    """One array (n, D) for each name, its columns centred."""
    with evaluating(model), record(model, "embed", "blocks.*.out") as tape:
        last = model.encode(images.to(model.tokens.proj.weight.device))
        if over == "pooled":
            found = [model.finish(z).pooled for z in list(tape.values())]
        else:
            tokens = [*tape.values(), last.tokens]
            found = [z[:, last.prefix_count :].flatten(0, 1) for z in tokens]
    arrays = [one.double().cpu().numpy() for one in found]
    return [one - one.mean(axis=0) for one in arrays]


def linear_cka(features: list[Floats]) -> Floats:
    """Every array (n, D) against every other."""
    count = len(features)
    products = np.empty((count, count))
    for i, x in enumerate(features):
        for j, y in enumerate(features[: i + 1]):
            products[i, j] = products[j, i] = np.square(y.T @ x).sum()
    own = np.sqrt(np.diagonal(products))
    size = np.array([np.square(x).max() for x in features])
    own = np.where(own > 1e-20 * max(size.max(), 1e-300), own, np.nan)  # the rest of rounding is no layer
    return (products / own[:, None] / own).clip(0, 1)


@in_our_style
def draw(found: Similarity) -> Figure:
    count = len(found.names)
    side = min(7.0, max(3.4, 1.6 + 0.32 * count))
    what = "patch tokens" if found.over == "patches" else "pooled vectors"
    figure = canvas(side + 1.2, side + 0.4, f"Linear CKA between layers, {found.rows} {what}")
    axis = figure.subplots()
    axis.set_facecolor("#bbbbbb")  # where there is no number
    image = axis.imshow(found.cka, cmap=AMOUNT, vmin=0, vmax=1)
    step = -(-count // 20)
    places = [n for n in range(count) if n in (0, count - 1) or ((n - 1) % step == 0 and n < count - step)]
    words = [found.names[n] for n in places]
    axis.set_xticks(places, words, rotation=90 if count > 5 else 0)
    axis.set_yticks(places, words)
    axis.set(xlabel="layer", ylabel="layer")
    axis.spines[:].set_visible(False)
    if count <= 8:
        for (i, j), value in np.ndenumerate(found.cka):
            shade = "black" if value > 0.6 else "white"
            axis.text(j, i, "-" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", color=shade)
    bar(figure, image, axis, "CKA")
    return figure


def caption(found: Similarity) -> str:
    what = "patch tokens" if found.over == "patches" else "pooled vectors"
    words = (
        f"How alike every two layers describe the same pictures, by linear CKA over {found.rows} {what} of "
        f"width {found.width}: 1 is the same up to a turn and one scale; unrelated noise of this size has "
        f"{found.width / (found.width + found.rows):.2f}."
    )
    empty = [name for name, own in zip(found.names, np.diagonal(found.cka), strict=True) if np.isnan(own)]
    if empty:
        words += f" In {', '.join(empty)} all vectors are the same, so there is nothing to compare."
    return f"{words} {numbers(found)}".rstrip()


def numbers(found: Similarity) -> str:
    """What is the same in neighbours, and what changes most."""
    steps = np.diagonal(found.cka, offset=1)
    if np.isnan(steps).all():
        return ""
    names = [f"block {name}" if name.isdigit() else name for name in found.names]
    cut = int(np.nanargmin(steps))
    i, j = np.unravel_index(np.nanargmin(found.cka), found.cka.shape)
    return (
        f"Layers that follow each other have {np.nanmean(steps):.2f} on average; the largest change is from "
        f"{names[cut]} to {names[cut + 1]} ({steps[cut]:.2f}), and least alike are {names[min(i, j)]} and "
        f"{names[max(i, j)]} ({found.cka[i, j]:.2f})."
    )


def table(found: Similarity) -> tuple[list[str], list[list[object]]]:
    rows = zip(found.names, found.cka, strict=True)
    return ["layer", *found.names], [[name, *map(float, values)] for name, values in rows]


if __name__ == "__main__":
    found = compute(sample_model().model, sample_pictures().images)
    show("similarity", lambda: (draw(found), caption(found)))
