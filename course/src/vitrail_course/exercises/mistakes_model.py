"""Common mistakes in multi-head attention, the block and the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail_course.exercises import mistakes, reference
from vitrail_course.exercises.mistakes import SCORES, Mistakes, Weights
from vitrail_course.exercises.template import inside

# ---- multi_head_attention -------------------------------------------------------------------


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, k, T, d)


def split_by_reshape(x: Tensor, heads: int) -> Tensor:
    B, T, D = x.shape
    return x.reshape(B, heads, T, D // heads)


def split_interleaved(x: Tensor, heads: int) -> Tensor:
    """Head i gets the channels i, i + k, i + 2k, ..."""
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


def join_interleaved(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (B, T, D)


def join_by_reshape(x: Tensor) -> Tensor:
    B, heads, T, d = x.shape
    return x.reshape(B, T, heads * d)


def read_thirds(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    return qkv.chunk(3, dim=-1)


def read_by_head(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """q, k and v of the first head, then of the second."""
    return tuple(x.flatten(2) for x in qkv.unflatten(-1, (heads, 3, -1)).unbind(-2))


def multi_head_attention(
    z: Tensor,
    weights: Weights,
    heads: int,
    *,
    read: Callable[[Tensor, int], tuple[Tensor, ...]] = read_thirds,
    order: str = "qkv",
    split: Callable[[Tensor, int], Tensor] = split_heads,
    join: Callable[[Tensor], Tensor] = join_heads,
    attention: Callable[..., Tensor] = reference.attention,
    out: Callable[[Tensor, Weights], Tensor] = lambda x, w: F.linear(x, w["out.weight"], w["out.bias"]),
    biased: bool = True,
) -> Tensor:
    qkv = F.linear(z, weights["qkv.weight"], weights["qkv.bias"] if biased else None)
    named = dict(zip(order, read(qkv, heads), strict=True))
    q, k, v = (split(named[letter], heads) for letter in "qkv")
    return out(join(attention(q, k, v)), weights)


def scaled_by_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mistakes.attention(q, k, v, divisor=lambda q, k: math.sqrt(q.shape[1] * q.shape[-1]))


INTERLEAVED = (
    "The heads are interleaved: channels are split as (d, k). Split them as (k, d), so that the first d "
    "belong to the first head."
)
MULTI_HEAD_ATTENTION: Mistakes = {
    "The scores are divided by sqrt(D). Divide by sqrt(d), where d = D / k is the width of one "
    "head.": partial(multi_head_attention, attention=scaled_by_width),
    **{
        explanation: partial(multi_head_attention, attention=function)
        for explanation, function in SCORES.items()
    },
    "The heads are split by a reshape to (B, k, T, d), which mixes tokens. Reshape to (B, T, k, d), then "
    "transpose.": partial(multi_head_attention, split=split_by_reshape),
    "The heads are joined by a reshape from (B, k, T, d), which mixes tokens. Transpose to (B, T, k, d), "
    "then reshape.": partial(multi_head_attention, join=join_by_reshape),
    "The heads are split by a reshape to (B, k, T, d) and joined by a reshape from it; both mix tokens. "
    "Transpose T and k after splitting and before joining.": partial(
        multi_head_attention, split=split_by_reshape, join=join_by_reshape
    ),
    INTERLEAVED: (
        partial(multi_head_attention, split=split_interleaved),
        partial(multi_head_attention, split=split_interleaved, join=join_interleaved),
    ),
    "There is only one head. Split q, k and v into k heads before the attention.": lambda z, weights, heads: (
        multi_head_attention(z, weights, 1)
    ),
    **{
        f"q, k and v are mixed up: the rows are read as {', '.join(order)}. Their order is q, k, v.": partial(
            multi_head_attention, order=order
        )
        for order in ("kqv", "vkq", "qvk", "kvq", "vqk")
    },
    "The rows of qkv are read head by head, as (k, 3, d). Read them as (3, k, d): q of all heads "
    "first.": partial(multi_head_attention, read=read_by_head),
    "The bias of q, k and v is missing.": partial(multi_head_attention, biased=False),
    "The output projection is missing.": partial(multi_head_attention, out=lambda x, w: x),
    "The output projection has no bias.": partial(
        multi_head_attention, out=lambda x, w: x @ w["out.weight"].T
    ),
    "out.weight is not transposed. It has a row for each output: x @ weight.T.": partial(
        multi_head_attention, out=lambda x, w: x @ w["out.weight"] + w["out.bias"]
    ),
}


# ---- block ----------------------------------------------------------------------------------


def block(
    z: Tensor,
    weights: Weights,
    heads: int,
    *,
    norms: Literal["before", "after", "on branches"] = "before",
    norm1: Literal["norm1", "none"] = "norm1",
    norm2: Literal["norm2", "norm1", "none"] = "norm2",
    residual1: Literal["z", "normed", "none"] = "z",
    residual2: Literal["sum", "normed", "z", "none"] = "sum",
    mlp_input: Literal["sum", "z"] = "sum",
    eps: float = 1e-6,
) -> Tensor:
    """`norms`: before attention and MLP, after the sum, or after attention and MLP, before the sum."""

    def norm(where: str, name: str, x: Tensor) -> Tensor:
        """The norm of that name, if it belongs here."""
        if norms != where or name == "none":
            return x
        return reference.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    nothing = torch.zeros_like(z)
    normed = norm("before", norm1, z)
    attended = reference.multi_head_attention(normed, inside(weights, "attention"), heads)
    added = {"z": z, "normed": normed, "none": nothing}[residual1]
    middle = norm("after", norm1, norm("on branches", norm1, attended) + added)
    normed = norm("before", norm2, middle if mlp_input == "sum" else z)
    changed = reference.mlp(normed, inside(weights, "mlp"))
    added = {"sum": middle, "normed": normed, "z": z, "none": nothing}[residual2]
    return norm("after", norm2, norm("on branches", norm2, changed) + added)


BLOCK: Mistakes = {
    "The first residual is missing: z' = MSA(LN(z)) + z.": partial(block, residual1="none"),
    "The second residual is missing: out = MLP(LN(z')) + z'.": partial(block, residual2="none"),
    "The first residual adds the normalized tokens, LN(z). Add z from before the norm. (Article 001 of "
    "the lecture notes has this mistake.)": partial(block, residual1="normed"),
    "The second residual adds the normalized tokens, LN(z'). Add z' from before the norm.": partial(
        block, residual2="normed"
    ),
    "The second residual adds z. Add z', the first sum.": partial(block, residual2="z"),
    "This is post-norm, LN(MSA(z) + z), as in Vaswani et al. ViT is pre-norm: the norm comes before "
    "attention and before the MLP, inside the residual.": partial(block, norms="after"),
    "The norms come after attention and MLP, before the sum. ViT is pre-norm: the norms come before "
    "attention and MLP.": partial(block, norms="on branches"),
    "Attention and MLP both get the input of the block. The MLP must get the first sum, z'.": partial(
        block, mlp_input="z"
    ),
    "The first norm is missing.": partial(block, norm1="none"),
    "The second norm is missing.": partial(block, norm2="none"),
    "Both norms use the weights of norm1. The second has its own, norm2.": partial(block, norm2="norm1"),
    "eps of the norms is 1e-5, torch's default. Use 1e-6.": partial(block, eps=1e-5),
}


# ---- vit ------------------------------------------------------------------------------------


def class_first(embedded: Tensor, w: Weights) -> Tensor:
    """Eq. 1."""
    return torch.cat([w["prefix"].expand(len(embedded), 1, -1), embedded], dim=1) + w["position.table"]


def class_last(embedded: Tensor, w: Weights) -> Tensor:
    return torch.cat([embedded, w["prefix"].expand(len(embedded), 1, -1)], dim=1) + w["position.table"]


def class_without_position(embedded: Tensor, w: Weights) -> Tensor:
    return torch.cat([w["prefix"].expand(len(embedded), 1, -1), embedded + w["position.table"][1:]], dim=1)


def positions_before_class(embedded: Tensor, w: Weights) -> Tensor:
    return torch.cat([w["prefix"].expand(len(embedded), 1, -1), embedded + w["position.table"][:-1]], dim=1)


def without_positions(embedded: Tensor, w: Weights) -> Tensor:
    return torch.cat([w["prefix"].expand(len(embedded), 1, -1), embedded], dim=1)


def vit(
    images: Tensor,
    weights: Weights,
    config: Any,
    *,
    tokens: Callable[[Tensor, Weights], Tensor] = class_first,
    blocks: Callable[[int], range] = range,
    number: Callable[[int], int] = lambda index: index,
    norm: Callable[..., Tensor] = reference.layer_norm,
    norm_in_loop: bool = False,
    eps: float = 1e-6,
    pool: Callable[[Tensor], Tensor] = lambda z: z[:, 0],
    biased: bool = True,
    matrix: Callable[[Tensor], Tensor] = lambda kernel: kernel.flatten(1).T,
    output: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Tensor:
    embedded = reference.patches(images, config.patch) @ matrix(weights["tokens.proj.weight"])
    z = tokens(embedded + weights["tokens.proj.bias"] if biased else embedded, weights)
    for index in blocks(config.depth):
        z = reference.block(z, inside(weights, f"blocks.{number(index)}"), config.heads)
        if norm_in_loop:
            z = reference.layer_norm(z, weights["norm.weight"], weights["norm.bias"], eps)
    y = pool(norm(z, weights["norm.weight"], weights["norm.bias"], eps))
    return output(F.linear(y, weights["head.weight"], weights["head.bias"]))


def no_norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return z


def norm_of_mean(z: Tensor, weight: Tensor, bias: Tensor, eps: float, first: int) -> Tensor:
    return reference.layer_norm(z[:, first:].mean(dim=1, keepdim=True), weight, bias, eps)


NORM_IN_LOOP = "The last norm is applied after every block. It comes once, after the last block."
MEAN_OF_ALL = "The head is applied to the mean of all tokens. Eq. 4 uses the class token."
MEAN_OF_PATCHES = "The head is applied to the mean of the patches. Eq. 4 uses the class token."
VIT: Mistakes = {
    "The class token is at the end, but the head reads the first token. Eq. 1 puts the class token "
    "first.": partial(vit, tokens=class_last),
    "The class token is at the end, and the head reads it there. Eq. 1 puts it first, with the first row "
    "of E_pos.": partial(vit, tokens=class_last, pool=lambda z: z[:, -1]),
    "The class token has no position. Add row 0 of E_pos to it.": partial(vit, tokens=class_without_position),
    "Positions are added before the class token is prepended, so each patch gets the row of the patch "
    "before it. Prepend the class token first.": partial(vit, tokens=positions_before_class),
    "The position embeddings are missing.": partial(vit, tokens=without_positions),
    "E is tokens.proj.weight reshaped to (C P P, D), which mixes its rows. Flatten it to (D, C P P), "
    "then transpose.": partial(vit, matrix=lambda kernel: kernel.reshape(-1, len(kernel))),
    "A softmax, log-softmax or sigmoid is applied to the logits. Return them as they are; the loss "
    "applies it.": (
        partial(vit, output=lambda logits: logits.softmax(dim=-1)),
        partial(vit, output=lambda logits: logits.log_softmax(dim=-1)),
        partial(vit, output=lambda logits: logits.sigmoid()),
        partial(vit, output=lambda logits: logits.softmax(dim=0)),
    ),
    "The bias of the patch projection is missing.": partial(vit, biased=False),
    "The last norm is missing.": partial(vit, norm=no_norm),
    NORM_IN_LOOP: (partial(vit, norm_in_loop=True, norm=no_norm), partial(vit, norm_in_loop=True)),
    "eps of the last norm is 1e-5, torch's default. Use 1e-6.": partial(vit, eps=1e-5),
    MEAN_OF_ALL: (
        partial(vit, pool=lambda z: z.mean(dim=1)),
        partial(vit, norm=partial(norm_of_mean, first=0)),
    ),
    MEAN_OF_PATCHES: (
        partial(vit, pool=lambda z: z[:, 1:].mean(dim=1)),
        partial(vit, norm=partial(norm_of_mean, first=1)),
    ),
    "The head reads the last token. The class token is the first.": partial(vit, pool=lambda z: z[:, -1]),
    "All blocks use the weights of block 0.": partial(vit, number=lambda index: 0),
    "Only the first block is run.": partial(vit, blocks=lambda depth: range(1)),
    "The last block is not run.": partial(vit, blocks=lambda depth: range(depth - 1)),
    "The blocks run in reverse order.": partial(vit, blocks=lambda depth: range(depth - 1, -1, -1)),
}
