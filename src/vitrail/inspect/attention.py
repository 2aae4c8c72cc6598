"""Where one token looks (paper, Fig. 6 and 14): attention weights laid over the picture, head by head.

Run it: `python -m vitrail.inspect.attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import InputError, printable, suggest
from vitrail.inspect.canvas import bar, canvas, in_our_style, lay_over, show_picture
from vitrail.inspect.pictures import (
    check_finite,
    check_number,
    check_pictures,
    check_pixels,
    check_weights_fit,
    device_of,
)
from vitrail.model import ViT, record
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

HEADS_IN_A_ROW = 8  # more than these continue below: on a page they would be too small to read
POOL = "pool.attention.weights"

Query = str | tuple[int, int]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The weights of one query. Over the patches and the prefix together they sum to 1."""

    maps: NDArray[np.float32]
    """(B, heads, h, w): the weight on each patch."""
    prefix: NDArray[np.float32]
    """(B, heads, n): the weight on each token before the patches."""
    names: tuple[str, ...]
    """Of those n tokens."""
    heads: tuple[int, ...]
    query: str
    """Whose weights these are, in words."""
    place: str
    """The layer, or the attention pool."""


def compute(
    model: ViT, images: Tensor, *, layer: int = -1, head: int | None = None, query: Query | None = None
) -> AttentionMaps:
    """Attention weights from one query token to every patch, in one layer.

    Args:
        images: (B, C, H, W), normalised.
        layer: from 0; the last when not given. It alone runs step by step.
        head: one head, from 0; all, apart, when not given.
        query: "class" or another prefix token's name; a patch as (row, column); "mean" for the mean
            over all patches; "pool" for the learned query of an attention pool, which belongs to no
            layer. When not given: the class token, else the pool's query, else the mean.
    """
    check_pictures(model, images)
    config = model.config
    query = default_query(config) if query is None else query
    layer = check_number("layer", layer, config.depth)
    heads = range(config.heads) if head is None else [check_number("head", head, config.heads)]
    check_weights_fit(model, len(images))
    asked = query_row(config, query).to(device_of(model))
    name = POOL if query == "pool" else f"blocks.{layer}.attention.weights"
    with evaluating(model), record(model, name) as tape:
        model(images.to(asked.device))
        weights = tape[name][:, list(heads)].float()  # (B, heads, T, T), or of the pool (B, heads, 1, N)
        if query == "pool":  # it looks at patches only
            seen = torch.nn.functional.pad(weights[:, :, 0], (config.prefix, 0))
        else:
            seen = torch.einsum("t,bkts->bks", asked, weights)  # (B, heads, T)
    found = seen.cpu().numpy()
    check_finite("Attention weights", found)
    return AttentionMaps(
        maps=found[..., config.prefix :].reshape(*found.shape[:2], *config.grid),
        prefix=found[..., : config.prefix],
        names=prefix_names(config),
        heads=tuple(heads),
        query=query_words(query),
        place="the attention pool" if query == "pool" else f"layer {layer}",
    )


# ---- the tokens of a model, by name; rollout.py uses these as well ---------------------------------


def prefix_names(config: ViTConfig) -> tuple[str, ...]:
    """The tokens before the patches, in their order."""
    registers = [f"register {number + 1}" for number in range(config.registers)]
    return (*["class"] * config.class_token, *["distillation"] * config.distillation_token, *registers)


def default_query(config: ViTConfig) -> str:
    return "class" if config.class_token else "pool" if config.pool == "attention" else "mean"


def query_row(config: ViTConfig, query: Query) -> Tensor:
    """How much of each token a query stands for: (T,), summing to 1; for the pool's own query zeros."""
    row, names = torch.zeros(config.tokens), prefix_names(config)
    if query == "mean":
        row[config.prefix :] = 1 / config.patches
    elif isinstance(query, str) and query in names:
        row[names.index(query)] = 1
    elif isinstance(query, (tuple, list)) and len(query) == 2:
        down, across = map(check_number, ("row", "column"), query, config.grid)
        row[config.prefix + down * config.grid[1] + across] = 1
    elif not (query == "pool" and config.pool == "attention"):
        pool = ["pool"] if config.pool == "attention" else []
        there = suggest(str(query), [*names, *pool, "mean", "a patch as (row, column)"])
        raise InputError("The query must be a token that the model has.", repr(printable(query)), there)
    return row


def query_words(query: Query) -> str:
    match query:
        case "mean":
            return "the mean of all patches"
        case "pool":
            return "the learned query"
        case str():
            return f"the {query} token" if " " not in query else query
        case down, across:
            return f"patch ({down}, {across})"


# ---- the figure ------------------------------------------------------------------------------------


@in_our_style
def draw(found: AttentionMaps, pixels: NDArray[np.uint8]) -> Figure:
    """A row for each picture: the picture, then one map for each head, all in the same colours."""
    check_pixels(pixels, len(found.maps))
    across = min(len(found.heads), HEADS_IN_A_ROW)
    rows = math.ceil(len(found.heads) / across)
    tall = 1.2 * pixels.shape[1] / pixels.shape[2] + (0.42 if found.prefix.any() else 0.27)
    title = f"Attention of {found.query} in {found.place}"
    figure = canvas(
        max(1.25 * (across + 1) + 1, 0.08 * len(title) + 1), tall * rows * len(pixels) + 0.5, title
    )
    axes = figure.subplots(rows * len(pixels), across + 1, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    limit, label = colour_limit(found.maps, "attention weight")
    for picture, shown in enumerate(pixels):
        show_picture(axes[picture * rows, 0], shown)
        for place, head in enumerate(found.heads):
            axis = axes[picture * rows + place // across, 1 + place % across]
            image = lay_over(axis, shown, found.maps[picture, place], most=limit)
            share = 100 * found.maps[picture, place].sum()
            note = f"\n{share:.0f}% on patches" if found.prefix.any() else ""
            axis.set_title(f"head {head}{note}", fontsize=7.5)
    bar(figure, image, axes, label)
    return figure


def colour_limit(maps: NDArray[np.float32], label: str) -> tuple[float, str]:
    """Where the colours end, and the colour bar's label.

    One patch that takes half of all attention would leave the other maps dark. The colours end where
    one patch in a hundred is above them, and the label says how far those go.
    """
    limit, most = float(np.quantile(maps, 0.99)), float(maps.max())
    if most < 1.2 * limit or limit == 0:
        return most, label
    return limit, f"{label}\n(top colour:\n{limit:.2g} to {most:.2g})"


def caption(found: AttentionMaps) -> str:
    """How to read the maps, and how narrow they are."""
    pictures, heads, h, w = found.maps.shape
    wide = breadth(found.maps).mean(axis=0)  # of each head
    low, high = int(wide.argmin()), int(wide.argmax())
    spread = f"{wide[low]:.1f} of {h * w} patches in its narrowest head ({found.heads[low]})"
    spread += f" and {wide[high]:.1f} in its widest ({found.heads[high]})"
    one = f"{wide[0]:.1f} of {h * w} patches in head {found.heads[0]}"
    sentences = [
        f"Each map shows how much of its attention {found.query} in {found.place} pays to each patch, in one "
        "head; brighter is more, and all maps share one scale.",
        f"It is as narrow as if spread evenly over {spread if heads > 1 else one}, mean of {pictures} "
        f"picture{'s' * (pictures > 1)}.",
    ]
    if found.prefix.any():  # an attention pool looks at patches only
        shares = ", ".join(
            f"{name} {100 * share:.1f}%"
            for name, share in zip(found.names, found.prefix.mean(axis=(0, 1)), strict=True)
        )
        sentences.append(f"Not in the maps is what goes to the tokens before the patches: {shares}.")
    return " ".join(sentences)


def breadth(maps: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over how many patches a map (..., h, w) is spread: exp of its entropy, 1 to N; 0 if it is empty."""
    flat = maps.reshape(*maps.shape[:-2], -1).astype(np.float64)
    total = flat.sum(axis=-1, keepdims=True)
    share = np.divide(flat, total, out=np.zeros_like(flat), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.where(total[..., 0] > 0, np.exp(-(share * logs).sum(axis=-1)), 0.0)


def table(found: AttentionMaps) -> tuple[list[str], list[list[object]]]:
    """A row for each picture, head and token looked at."""
    w = found.maps.shape[-1]
    tokens = [*found.names, *(f"patch {n // w},{n % w}" for n in range(found.maps[0, 0].size))]
    flat = np.concatenate([found.prefix, found.maps.reshape(*found.maps.shape[:2], -1)], axis=-1)
    rows: list[list[object]] = [
        [picture, head, token, float(flat[picture, place, n])]
        for picture in range(len(flat))
        for place, head in enumerate(found.heads)
        for n, token in enumerate(tokens)
    ]
    return ["picture", "head", "token", "weight"], rows


if __name__ == "__main__":
    from vitrail.inspect.sample import sample_model, sample_pictures, show

    def make() -> tuple[Figure, str]:
        pictures = sample_pictures(5)
        found = compute(sample_model().model, pictures.images)
        return draw(found, pictures.pixels), caption(found)

    show("attention", make)
