"""Likely slips in the parts: each is the exercise with one thing done otherwise, and what to say of it.

A function here takes the choices that a student makes as keywords; left alone they are the right ones.
`slips_model.py` has those of attention in heads, the block and the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


class Slip(NamedTuple):
    """A wrong way to do an exercise."""

    words: str  # what is wrong and what is right, in whole sentences
    function: Callable[..., Tensor]  # the exercise, done like that


# ---- patches --------------------------------------------------------------------------------


def patches(images: Tensor, P: int, order: tuple[int, ...] = (2, 4, 1, 3, 5)) -> Tensor:
    """`order`: of the grid's rows 2 and columns 4, channels 1, and rows 3 and columns 5 of a patch."""
    B, C, H, W = images.shape
    return images.reshape(B, C, H // P, P, W // P, P).permute(0, *order).reshape(B, -1, C * P * P)


def reshaped(images: Tensor, P: int) -> Tensor:
    return images.reshape(len(images), -1, images.shape[1] * P * P)


def patches_last(images: Tensor, P: int) -> Tensor:
    return patches(images, P).transpose(1, 2)


PATCHES = [
    Slip(
        "The grid is read column by column. Patch 1 lies to the right of patch 0, not below it.",
        partial(patches, order=(4, 2, 1, 3, 5)),
    ),
    Slip(
        "The channels come last in a flat patch. All of the first channel comes first, then the second.",
        partial(patches, order=(2, 4, 3, 5, 1)),
    ),
    Slip(
        "Each patch is transposed: its pixels are read column by column, not row by row.",
        partial(patches, order=(2, 4, 1, 5, 3)),
    ),
    Slip(
        "Rows and columns are exchanged, in the grid and in each patch. H comes before W.",
        partial(patches, order=(4, 2, 1, 5, 3)),
    ),
    Slip(
        "A reshape alone takes pixels as they lie in memory, not by patches. Split H and W, permute, then "
        "reshape.",
        reshaped,
    ),
    Slip("The last two dimensions are exchanged. Patches come first, then their values.", patches_last),
]


# ---- positions ------------------------------------------------------------------------------


def positions(
    count: int, width: int, *, first: int = 0, step: int = 2, halves: bool = False, cosine_first: bool = False
) -> Tensor:
    rates = 10_000 ** (-step * torch.arange(width // 2) / width)
    angles = torch.arange(first, first + count)[:, None] * rates
    pair = [angles.cos(), angles.sin()] if cosine_first else [angles.sin(), angles.cos()]
    return torch.cat(pair, dim=1) if halves else torch.stack(pair, dim=-1).flatten(1)


def own_rates(count: int, width: int) -> Tensor:
    """A rate for each column, where two share one."""
    columns = torch.arange(width)
    angles = torch.arange(count)[:, None] * 10_000 ** (-2 * columns / width)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def column_rates(count: int, width: int) -> Tensor:
    columns = torch.arange(width)
    angles = torch.arange(count)[:, None] * 10_000 ** (-columns / width)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


POSITIONS = [
    Slip(
        "All sines come first, then all cosines. Others do that too, and it works as well, but asked for is "
        "the order of the paper: sine and cosine by turns.",
        partial(positions, halves=True),
    ),
    Slip(
        "Sine and cosine are exchanged. Even columns are sines, odd ones cosines.",
        partial(positions, cosine_first=True),
    ),
    Slip("The first place is 1. Places count from 0.", partial(positions, first=1)),
    Slip(
        "The exponent is i / width, with i the number of the pair. It is 2i / width.",
        partial(positions, step=1),
    ),
    Slip(
        "The exponent is 2j / width with j the number of the column. It is 2i / width with i that of the "
        "pair: a sine and its cosine share one rate.",
        own_rates,
    ),
    Slip(
        "The exponent is j / width with j the number of the column, so that a cosine has another rate than "
        "its sine. A pair shares the rate of its sine.",
        column_rates,
    ),
]


# ---- layer_norm -----------------------------------------------------------------------------


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    *,
    over: tuple[int, ...] = (-1,),
    correction: int = 0,
    outside: bool = False,
    centre: bool = True,
    root: bool = True,
    scale: bool = True,
    shift: bool = True,
) -> Tensor:
    centred = x - x.mean(dim=over, keepdim=True) if centre else x
    variance = centred.square().mean(over, keepdim=True) if correction == 0 else x.var(over, keepdim=True)
    below = (variance.sqrt() + eps) if outside else (variance + eps).sqrt() if root else variance + eps
    normed = centred / below
    normed = normed * weight if scale else normed
    return normed + bias if shift else normed


LAYER_NORM = [
    Slip(
        "Mean and variance are taken over the tokens (dimension 1). Each token is normalised by itself, over "
        "its D values (the last dimension).",
        partial(layer_norm, over=(1,)),
    ),
    Slip(
        "Mean and variance are taken over the whole batch, as one number. Each token has its own.",
        partial(layer_norm, over=(0, 1, 2)),
    ),
    Slip(
        "Mean and variance are taken over batch and tokens, as a batch norm does. Each token has its own.",
        partial(layer_norm, over=(0, 1)),
    ),
    Slip(
        "Mean and variance are taken over all tokens of a picture. Each token has its own.",
        partial(layer_norm, over=(1, 2)),
    ),
    Slip(
        "The variance is the unbiased one, with D - 1 below the line (torch's default). Divide by D: "
        "var(..., correction=0).",
        partial(layer_norm, correction=1),
    ),
    Slip(
        "eps is added outside the square root. It belongs inside: sqrt(variance + eps).",
        partial(layer_norm, outside=True),
    ),
    Slip(
        "The variance is the unbiased one (D - 1), and eps is added outside the square root: "
        "sqrt(variance + eps), with D below the line.",
        partial(layer_norm, correction=1, outside=True),
    ),
    Slip("eps is left out.", lambda x, weight, bias, eps: layer_norm(x, weight, bias, 0.0)),
    Slip(
        "eps is always 1e-6. Use the one that is given.",
        lambda x, weight, bias, eps: layer_norm(x, weight, bias, 1e-6),
    ),
    Slip("eps is always 1e-5. Use the one that is given.", lambda x, w, b, eps: layer_norm(x, w, b, 1e-5)),
    Slip("The mean is not subtracted.", partial(layer_norm, centre=False)),
    Slip("It is divided by the variance, not by its square root.", partial(layer_norm, root=False)),
    Slip("The weight is left out.", partial(layer_norm, scale=False)),
    Slip("The bias is left out.", partial(layer_norm, shift=False)),
    Slip("Weight and bias are left out.", partial(layer_norm, scale=False, shift=False)),
]


# ---- attention ------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    divide: Callable[[Tensor, Tensor], float] = lambda q, k: math.sqrt(q.shape[-1]),
    over: int = -1,
    forbidden: float = -math.inf,
) -> Tensor:
    scores = q @ k.transpose(-2, -1) / divide(q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, forbidden)
    return scores.softmax(dim=over) @ v


def masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
    return (weights if mask is None else weights * mask) @ v


def mask_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores + mask).softmax(dim=-1) @ v


def without_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores * mask) @ v


SCORES = [
    Slip("The scale is missing. Divide the scores by sqrt(d).", partial(attention, divide=lambda q, k: 1.0)),
    Slip(
        "The scores are divided by d. It is its square root.",
        partial(attention, divide=lambda q, k: float(q.shape[-1])),
    ),
    Slip(
        "The scores are divided by the root of the number of tokens. It is sqrt(d), d the last dimension.",
        partial(attention, divide=lambda q, k: math.sqrt(k.shape[-2])),
    ),
    Slip(
        "The scores are multiplied by sqrt(d). They are divided by it.",
        partial(attention, divide=lambda q, k: 1 / math.sqrt(q.shape[-1])),
    ),
    Slip(
        "The softmax is taken over the queries. It goes over the keys, the last dimension: each query's "
        "weights sum to 1.",
        partial(attention, over=-2),
    ),
    Slip(
        "The softmax is taken over dimension 1, which is something else where there are heads in front. It "
        "goes over the keys: dim=-1.",
        partial(attention, over=1),
    ),
    Slip("There is no softmax.", without_softmax),
]
ATTENTION = [
    *SCORES,
    Slip("The mask is not used.", lambda q, k, v, mask: attention(q, k, v)),
    Slip(
        "The mask is inverted. True means that a query may look.",
        lambda q, k, v, mask: attention(q, k, v, mask if mask is None else ~mask),
    ),
    Slip(
        "The mask is applied after the softmax, so that weights no longer sum to 1. Put -inf into the scores "
        "before it.",
        masked_after,
    ),
    Slip(
        "What is masked has the score 0 in place of -inf, and exp(0) is 1: it is still looked at.",
        partial(attention, forbidden=0.0),
    ),
    Slip(
        "The mask is added to the scores as zeros and ones. Put -inf where it is False.",
        mask_added,
    ),
    Slip("k and v are exchanged.", lambda q, k, v, mask: attention(q, v, k, mask)),
]


# ---- mlp ------------------------------------------------------------------------------------


def mlp(
    z: Tensor,
    weights: Weights,
    *,
    between: Callable[[Tensor], Tensor] = F.gelu,
    after: Callable[[Tensor], Tensor] = lambda x: x,
    first: bool = True,
    second: bool = True,
) -> Tensor:
    hidden = F.linear(z, weights["fc1.weight"], weights["fc1.bias"] if first else None)
    return after(F.linear(between(hidden), weights["fc2.weight"], weights["fc2.bias"] if second else None))


MLP = [
    Slip(
        "The GELU is its tanh approximation. Asked for is the exact one, x Phi(x), with erf.",
        partial(mlp, between=partial(F.gelu, approximate="tanh")),
    ),
    Slip(
        "The GELU is the approximation x sigmoid(1.702 x). Asked for is the exact one, x Phi(x), with erf.",
        partial(mlp, between=lambda x: x * torch.sigmoid(1.702 * x)),
    ),
    Slip("The activation is a ReLU. ViT has a GELU.", partial(mlp, between=F.relu)),
    Slip(
        "The activation is Phi(x), the distribution function alone. GELU(x) is x Phi(x).",
        partial(mlp, between=torch.special.ndtr),
    ),
    Slip("There is no activation between the two layers.", partial(mlp, between=lambda x: x)),
    Slip("There is a second GELU after the last layer.", partial(mlp, after=F.gelu)),
    Slip("The first bias is left out.", partial(mlp, first=False)),
    Slip("The second bias is left out.", partial(mlp, second=False)),
]
