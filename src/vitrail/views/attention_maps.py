"""Attention maps of one token over the image, head by head (ViT paper, Fig. 6 and 14)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError, printable, suggest
from vitrail.model import ViT, record
from vitrail.model.config import ViTConfig
from vitrail.model.device import eval_mode
from vitrail.views.canvas import Figure, add_colorbar, new_figure, overlay_map, show_image, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import (
    check_finite,
    check_images,
    check_index,
    check_pixels,
    check_weights_fit,
    device_of,
    tell_apart,
)

_HEADS_PER_ROW = 8  # further heads go to the next row; on a page they would be too small to read
POOL_WEIGHTS = "pool.attention.weights"

Query = str | tuple[int, int]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention weights of one query. Over the patches and the prefix tokens together they sum to 1."""

    maps: NDArray[np.float32]
    """(B, heads, h, w): the weight on each patch."""
    prefix: NDArray[np.float32]
    """(B, heads, n): the weight on each prefix token."""
    names: tuple[str, ...]
    """The names of the n prefix tokens."""
    heads: tuple[int, ...]
    query: str
    """A description of the query, for titles and captions."""
    location: str
    """The layer, or the attention pool."""


def compute(
    model: ViT, images: Tensor, *, layer: int = -1, head: int | None = None, query: Query | None = None
) -> AttentionMaps:
    """Compute the attention weights of one query token on every patch, in one layer.

    Args:
        images: (B, C, H, W), normalized.
        layer: counted from 0; the last by default. Only this layer computes its weights explicitly.
        head: one head, counted from 0; by default all heads, separately.
        query: "class" or the name of another prefix token; a patch as (row, column); "mean" for the mean
            over all patches; "pool" for the learned query of an attention pool, which belongs to no
            layer. By default the class token, else the pool's query, else the mean.
    """
    check_images(model, images)
    config = model.config
    query = _default_query(config) if query is None else query
    layer = check_index("layer", layer, config.depth)
    count = config.heads if query != "pool" else config.pool_heads or config.heads
    heads = range(count) if head is None else [check_index("head", head, count)]
    check_weights_fit(model, len(images))
    row = query_row(config, query).to(device_of(model))
    name = POOL_WEIGHTS if query == "pool" else f"blocks.{layer}.attention.weights"
    with eval_mode(model), record(model, name) as tape:
        model(images.to(row.device))
        weights = tape[name][:, list(heads)].float()  # (B, heads, T, T), or (B, heads, 1, N) in the pool
        if query == "pool":
            averaged = over_all_tokens(weights[:, :, 0], config)
        else:
            averaged = torch.einsum("t,bkts->bks", row, weights)  # (B, heads, T)
    values = averaged.cpu().numpy()
    check_finite("Attention weights", values)
    return AttentionMaps(
        maps=values[..., config.prefix :].reshape(*values.shape[:2], *config.grid),
        prefix=values[..., : config.prefix],
        names=tuple(config.prefix_names),
        heads=tuple(heads),
        query=describe_query(query),
        location="the attention pool" if query == "pool" else f"layer {layer}",
    )


# ---- tokens by name, also used by rollout.py -------------------------------------------------------


def _default_query(config: ViTConfig) -> str:
    return "class" if config.class_token else "pool" if config.pool == "attention" else "mean"


def query_row(config: ViTConfig, query: Query) -> Tensor:
    """The weight of each token in a query: (T,), summing to 1; all zeros for the learned query of a pool."""
    row, names = torch.zeros(config.tokens), config.prefix_names
    if query == "mean":
        row[config.prefix :] = 1 / config.patches
    elif isinstance(query, str) and query in names:
        row[names.index(query)] = 1
    elif isinstance(query, (tuple, list)) and len(query) == 2:
        down, across = map(check_index, ("row", "column"), query, config.grid)
        row[config.prefix + down * config.grid[1] + across] = 1
    elif not (query == "pool" and config.pool == "attention"):
        pool = ["pool"] if config.pool == "attention" else []
        choices = suggest(str(query), [*names, *pool, "mean", "a patch as (row, column)"])
        raise InputError(f"This model has no query {printable(query)!r}. {choices}")
    return row


def over_all_tokens(pool_weights: Tensor, config: ViTConfig) -> Tensor:
    """The weights of an attention pool, (..., N), with zeros for the prefix if it only attends to patches."""
    return torch.nn.functional.pad(pool_weights, (config.tokens - pool_weights.shape[-1], 0))  # (..., T)


def describe_query(query: Query) -> str:
    """A query in words, for titles and captions."""
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


@styled
def draw(attention: AttentionMaps, pixels: NDArray[np.uint8], names: Sequence[str] | None = None) -> Figure:
    """Draw a row per image: the image, then one map per head, all on the same color scale."""
    check_pixels(pixels, len(attention.maps))
    across = min(len(attention.heads), _HEADS_PER_ROW)
    rows = math.ceil(len(attention.heads) / across)
    tall = 1.2 * pixels.shape[1] / pixels.shape[2] + (0.42 if attention.prefix.any() else 0.27)
    title = f"Attention weights of {attention.query} in {attention.location}"
    figure = new_figure(
        max(1.25 * (across + 1) + 1, 0.08 * len(title) + 1), tall * rows * len(pixels) + 0.5, title
    )
    axes = figure.subplots(rows * len(pixels), across + 1, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    limit, label = color_limit(attention.maps, "attention weight")
    titles = tell_apart(names or [""] * len(pixels))
    for image, shown in enumerate(pixels):
        show_image(axes[image * rows, 0], shown)
        axes[image * rows, 0].set_title(titles[image], fontsize=7.5, parse_math=False)
        for index, head in enumerate(attention.heads):
            axis = axes[image * rows + index // across, 1 + index % across]
            drawn = overlay_map(axis, shown, attention.maps[image, index], vmax=limit)
            percentage = 100 * attention.maps[image, index].sum()
            note = f"\n{percentage:.0f}% on patches" if attention.prefix.any() else ""
            axis.set_title(f"head {head}{note}", fontsize=7.5)
    add_colorbar(figure, drawn, axes, label)
    return figure


def color_limit(maps: NDArray[np.float32], label: str) -> tuple[float, str]:
    """The upper limit of the color scale, and the label of the color bar.

    A single patch with half of all attention would leave the other maps dark. The scale therefore ends at the
    99th percentile, and the label gives the maximum.
    """
    limit, most = float(np.quantile(maps, 0.99)), float(maps.max())
    if most < 1.2 * limit or limit == 0:
        return most, label
    return limit, f"{label}\n(top color:\n{limit:.2g} to {most:.2g})"


def caption(attention: AttentionMaps) -> str:
    """Explain the maps, and how concentrated they are."""
    images, heads, h, w = attention.maps.shape
    effective = _effective_patches(attention.maps).mean(axis=0)  # per head
    low, high = int(effective.argmin()), int(effective.argmax())
    spread = f"is {effective[0]:.1f} (head {attention.heads[0]})"
    if heads > 1:
        spread = f"ranges from {effective[low]:.1f} (head {attention.heads[low]}, the narrowest) "
        spread += f"to {effective[high]:.1f} (head {attention.heads[high]}, the widest)"
    text = (
        f"Each map shows the attention weights of {attention.query} in {attention.location} on the patches, "
        "for one head; brighter is more, and all maps share one color scale. The effective number of patches "
        f"attended to (exp of the entropy) {spread}, out of {h * w}; mean over {images} "
        f"image{'s' * (images > 1)}."
    )
    if not attention.prefix.any():  # an attention pool attends to patches only
        return text
    fractions = zip(attention.names, attention.prefix.mean(axis=(0, 1)), strict=True)
    weights = ", ".join(f"{name} {100 * weight:.1f}%" for name, weight in fractions)
    return f"{text} Attention to the prefix tokens is not shown in the maps: {weights}."


def _effective_patches(maps: NDArray[np.float32]) -> NDArray[np.float64]:
    """Effective number of patches of a map (..., h, w): exp of its entropy, 1 to N; 0 for a zero map."""
    flat = maps.reshape(*maps.shape[:-2], -1).astype(np.float64)
    total = flat.sum(axis=-1, keepdims=True)
    p = np.divide(flat, total, out=np.zeros_like(flat), where=total > 0)
    log_p = np.log(p, out=np.zeros_like(p), where=p > 0)
    return np.where(total[..., 0] > 0, np.exp(-(p * log_p).sum(axis=-1)), 0.0)


def table(attention: AttentionMaps) -> Rows:
    """List the weight of each image, head and token attended to."""
    rows = list_tokens(
        range(len(attention.maps)), attention.heads, attention.names, attention.prefix, attention.maps
    )
    return ["image", "head", "token", "weight"], rows


def list_tokens(
    outer: Iterable[object],
    inner: Sequence[object],
    names: Sequence[str],
    prefix: NDArray[np.float32],
    maps: NDArray[np.float32],
) -> list[list[object]]:
    """List the values of prefix tokens (outer, inner, n) and patches (outer, inner, h, w), token by token."""
    tokens = [*names, *(f"patch {row},{column}" for row, column in np.ndindex(maps.shape[2:]))]
    flat = np.concatenate([prefix, maps.reshape(*maps.shape[:2], -1)], axis=-1)
    return [
        [one, other, token, float(value)]
        for one, block in zip(outer, flat, strict=True)
        for other, values in zip(inner, block, strict=True)
        for token, value in zip(tokens, values, strict=True)
    ]


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    layer = -1 if request.layer is None else request.layer
    maps = compute(request.model, request.drawn.images, layer=layer, head=request.head)
    return maps, draw(maps, request.drawn.pixels, request.drawn.names)


FIGURE = FigureSpec("attention", "Attention of one block", _make, caption, table)
