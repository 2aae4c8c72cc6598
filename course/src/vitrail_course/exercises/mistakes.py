"""Common mistakes in the parts: each is the exercise with one thing done wrong, and an explanation.

The functions take the choices that a student makes as keywords; their defaults are correct.
mistakes_model.py has those of multi-head attention, the block and the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


Wrong = Callable[..., Tensor]  # an exercise with a mistake
Mistakes = dict[str, Wrong | tuple[Wrong, ...]]  # by what is wrong, and what would be correct


# ---- patches --------------------------------------------------------------------------------


def patches(
    images: Tensor,
    P: int,
    *,
    by_columns: bool = False,
    transposed: bool = False,
    channels: Literal["first", "last", "in front"] = "first",
    values_first: bool = False,
) -> Tensor:
    """`channels`: their place in a flat patch, or in front of the grid."""
    B, C, H, W = images.shape
    grid = [4, 2] if by_columns else [2, 4]  # the dimensions of the rows and the columns of the grid
    pixels = [5, 3] if transposed else [3, 5]  # and of a patch; 1 is that of the channels
    order = {"first": [*grid, 1, *pixels], "last": [*grid, *pixels, 1], "in front": [1, *grid, *pixels]}
    split = images.reshape(B, C, H // P, P, W // P, P).permute(0, *order[channels])
    flat = split.reshape(B, -1, C * P * P)
    return flat.transpose(1, 2) if values_first else flat


def reshape_only(images: Tensor, P: int) -> Tensor:
    return images.reshape(len(images), -1, images.shape[1] * P * P)


PATCHES: Mistakes = {
    "The grid is read column by column. Patch 1 lies to the right of patch 0, not below it.": partial(
        patches, by_columns=True
    ),
    "The channels come last in a flat patch. All of the first channel comes first, then the second.": partial(
        patches, channels="last"
    ),
    "The channels stay in front of the grid, so a flat patch has values of other patches. Move them "
    "behind it: (B, h, w, C, P, P).": partial(patches, channels="in front"),
    "Each patch is transposed: its pixels are read column by column. Read them row by row.": partial(
        patches, transposed=True
    ),
    "A single reshape takes pixels in memory order, not patch by patch. Split H and W, permute, then "
    "reshape.": reshape_only,
    "The last two dimensions are swapped. Patches come first, then their values.": partial(
        patches, values_first=True
    ),
}


# ---- positions ------------------------------------------------------------------------------


def positions(
    count: int, width: int, *, first: int = 0, step: int = 2, halves: bool = False, cosine_first: bool = False
) -> Tensor:
    frequencies = 10_000 ** (-step * torch.arange(width // 2) / width)
    angles = torch.arange(first, first + count)[:, None] * frequencies
    pair = [angles.cos(), angles.sin()] if cosine_first else [angles.sin(), angles.cos()]
    return torch.cat(pair, dim=1) if halves else torch.stack(pair, dim=-1).flatten(1)


def doubled_column_frequencies(count: int, width: int) -> Tensor:
    columns = torch.arange(width)
    angles = torch.arange(count)[:, None] * 10_000 ** (-2 * columns / width)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def column_frequencies(count: int, width: int) -> Tensor:
    columns = torch.arange(width)
    angles = torch.arange(count)[:, None] * 10_000 ** (-columns / width)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


POSITIONS: Mistakes = {
    "All sines come first, then all cosines. That works as well, but this exercise follows the paper: "
    "sine and cosine alternate.": partial(positions, halves=True),
    "Sine and cosine are swapped. Even columns are sines, odd ones cosines.": partial(
        positions, cosine_first=True
    ),
    "The first position is 1. Positions count from 0.": partial(positions, first=1),
    "The exponent is i / width, where i is the index of the pair. It must be 2i / width.": partial(
        positions, step=1
    ),
    "The exponent has the wrong sign: positions are multiplied by 10000^(2i / width). Divide by it.": partial(
        positions, step=-2
    ),
    "The exponent is 2j / width, where j is the index of the column. It must be 2i / width, where i is "
    "the index of the pair: a sine and its cosine have the same frequency.": doubled_column_frequencies,
    "The exponent is j / width, where j is the index of the column, so a cosine has another frequency "
    "than its sine. Both must have the frequency of the sine.": column_frequencies,
}


# ---- layer_norm -----------------------------------------------------------------------------


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    *,
    dims: tuple[int, ...] = (-1,),
    correction: int = 0,
    eps_outside: bool = False,
    center: bool = True,
    root: bool = True,
    scale: bool = True,
    shift: bool = True,
    shift_first: bool = False,
) -> Tensor:
    centered = x - x.mean(dim=dims, keepdim=True) if center else x
    variance = centered.square().mean(dims, keepdim=True) if correction == 0 else x.var(dims, keepdim=True)
    divisor = (variance.sqrt() + eps) if eps_outside else (variance + eps).sqrt() if root else variance + eps
    normed = centered / divisor
    if shift_first:
        return (normed + bias) * weight
    normed = normed * weight if scale else normed
    return normed + bias if shift else normed


LAYER_NORM: Mistakes = {
    "Mean and variance are computed over the tokens (dimension 1). Normalize each token separately, over "
    "its D values (the last dimension).": partial(layer_norm, dims=(1,)),
    "Mean and variance are computed over the whole batch, as one number. Each token has its own.": partial(
        layer_norm, dims=(0, 1, 2)
    ),
    "Mean and variance are computed over batch and tokens, as in batch norm. Each token has "
    "its own.": partial(layer_norm, dims=(0, 1)),
    "Mean and variance are computed over all tokens of an image. Each token has its own.": partial(
        layer_norm, dims=(1, 2)
    ),
    "The variance is the unbiased one, divided by D - 1 (torch's default). Divide by D: var(..., "
    "correction=0).": partial(layer_norm, correction=1),
    "eps is added outside the square root. It belongs inside: sqrt(variance + eps).": partial(
        layer_norm, eps_outside=True
    ),
    "eps is missing.": lambda x, weight, bias, eps: layer_norm(x, weight, bias, 0.0),
    "eps is always 1e-6. Use the argument eps.": lambda x, weight, bias, eps: layer_norm(
        x, weight, bias, 1e-6
    ),
    "eps is always 1e-5. Use the argument eps.": lambda x, w, b, eps: layer_norm(x, w, b, 1e-5),
    "The mean is not subtracted.": partial(layer_norm, center=False),
    "The result is divided by the variance. Divide by its square root.": partial(layer_norm, root=False),
    "The bias is added before the multiplication by weight. First scale, then shift.": partial(
        layer_norm, shift_first=True
    ),
    "Weight and bias are swapped. Multiply by weight, add bias.": lambda x, weight, bias, eps: layer_norm(
        x, bias, weight, eps
    ),
    "The weight is missing.": partial(layer_norm, scale=False),
    "The bias is missing.": partial(layer_norm, shift=False),
}


# ---- attention ------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    divisor: Callable[[Tensor, Tensor], float] = lambda q, k: math.sqrt(q.shape[-1]),
    dim: int = -1,
    masked_score: float = -math.inf,
) -> Tensor:
    scores = q @ k.transpose(-2, -1) / divisor(q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, masked_score)
    return scores.softmax(dim=dim) @ v


def mask_after_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
    return (weights if mask is None else weights * mask) @ v


def add_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores + mask).softmax(dim=-1) @ v


def scale_after_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attention(q, k, v, mask, divisor=lambda q, k: 1.0) / math.sqrt(q.shape[-1])


def without_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores * mask) @ v


SCORES: dict[str, Wrong] = {
    "The scale is missing. Divide the scores by sqrt(d).": partial(attention, divisor=lambda q, k: 1.0),
    "The scores are divided by d. Divide by sqrt(d).": partial(
        attention, divisor=lambda q, k: float(q.shape[-1])
    ),
    "The scores are divided by the square root of the number of tokens. Divide by sqrt(d), where d is "
    "the last dimension.": partial(attention, divisor=lambda q, k: math.sqrt(k.shape[-2])),
    "The scores are multiplied by sqrt(d). Divide by it.": partial(
        attention, divisor=lambda q, k: 1 / math.sqrt(q.shape[-1])
    ),
    "The weights are divided by sqrt(d) after the softmax, so they no longer sum to 1. Divide the scores "
    "before it.": scale_after_softmax,
    "The softmax is over the queries. It must be over the keys, the last dimension: the weights of each "
    "query sum to 1.": partial(attention, dim=-2),
    "The softmax is over dimension 1, which is not the keys if there are heads. Use dim=-1.": partial(
        attention, dim=1
    ),
    "The softmax is over dimension 0, the images of the batch. It must be over the keys: dim=-1.": partial(
        attention, dim=0
    ),
    "The softmax is missing.": without_softmax,
}
ATTENTION: Mistakes = {
    **SCORES,
    "The mask is not used.": lambda q, k, v, mask: attention(q, k, v),
    "The mask is inverted. True marks the keys that a query may attend to.": lambda q, k, v, mask: attention(
        q, k, v, mask if mask is None else ~mask
    ),
    "The mask is applied after the softmax, so the weights no longer sum to 1. Set the masked scores to "
    "-inf before the softmax.": mask_after_softmax,
    "Masked scores are set to 0, and exp(0) is 1, so masked keys still have weight. Set them "
    "to -inf.": partial(attention, masked_score=0.0),
    "The mask is added to the scores as zeros and ones. Set the scores to -inf where it is False.": add_mask,
    "k and v are swapped.": lambda q, k, v, mask: attention(q, v, k, mask),
}


# ---- mlp ------------------------------------------------------------------------------------


def mlp(
    z: Tensor,
    weights: Weights,
    *,
    activation: Callable[[Tensor], Tensor] = F.gelu,
    output_activation: Callable[[Tensor], Tensor] = lambda x: x,
    first_bias: bool = True,
    second_bias: bool = True,
) -> Tensor:
    hidden = F.linear(z, weights["fc1.weight"], weights["fc1.bias"] if first_bias else None)
    bias = weights["fc2.bias"] if second_bias else None
    return output_activation(F.linear(activation(hidden), weights["fc2.weight"], bias))


MLP: Mistakes = {
    "The GELU is its tanh approximation. Use the exact one, x Phi(x), with erf.": partial(
        mlp, activation=partial(F.gelu, approximate="tanh")
    ),
    "The GELU is the approximation x sigmoid(1.702 x). Use the exact one, x Phi(x), with erf.": partial(
        mlp, activation=lambda x: x * torch.sigmoid(1.702 * x)
    ),
    "erf gets x instead of x / sqrt(2). GELU(x) is x (1 + erf(x / sqrt(2))) / 2.": partial(
        mlp, activation=lambda x: x * (1 + torch.erf(x)) / 2
    ),
    "The activation is a ReLU. ViT uses GELU.": partial(mlp, activation=F.relu),
    "The activation is Phi(x), the normal distribution function. GELU(x) is x Phi(x).": partial(
        mlp, activation=torch.special.ndtr
    ),
    "There is no activation between the two layers.": partial(mlp, activation=lambda x: x),
    "There is a second GELU after the last layer.": partial(mlp, output_activation=F.gelu),
    "The first bias is missing.": partial(mlp, first_bias=False),
    "The second bias is missing.": partial(mlp, second_bias=False),
}
