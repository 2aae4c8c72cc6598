"""Likely slips where parts are put together: attention in heads, the block, the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.exercises import reference, slips
from vitrail.exercises.slips import Slip, Weights
from vitrail.exercises.template import inside

# ---- multi_head_attention -------------------------------------------------------------------


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, k, T, d)


def split_wrongly(x: Tensor, heads: int) -> Tensor:
    B, T, D = x.shape
    return x.reshape(B, heads, T, D // heads)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (B, T, D)


def join_wrongly(x: Tensor) -> Tensor:
    B, heads, T, d = x.shape
    return x.reshape(B, T, heads * d)


def thirds(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    return qkv.chunk(3, dim=-1)


def by_head(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """q, k and v of the first head, then of the second."""
    return tuple(x.flatten(2) for x in qkv.unflatten(-1, (heads, 3, -1)).unbind(-2))


def multi_head_attention(
    z: Tensor,
    weights: Weights,
    heads: int,
    *,
    read: Callable[[Tensor, int], tuple[Tensor, ...]] = thirds,
    order: str = "qkv",
    split: Callable[[Tensor, int], Tensor] = split,
    join: Callable[[Tensor], Tensor] = join,
    attention: Callable[..., Tensor] = reference.attention,
    out: Callable[[Tensor, Weights], Tensor] = lambda x, w: F.linear(x, w["out.weight"], w["out.bias"]),
    biased: bool = True,
) -> Tensor:
    qkv = F.linear(z, weights["qkv.weight"], weights["qkv.bias"] if biased else None)
    named = dict(zip(order, read(qkv, heads), strict=True))
    q, k, v = (split(named[letter], heads) for letter in "qkv")
    return out(join(attention(q, k, v)), weights)


def scaled_by_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return slips.attention(q, k, v, divide=lambda q, k: math.sqrt(q.shape[1] * q.shape[-1]))


MULTI_HEAD_ATTENTION = [
    Slip(
        "The scores are divided by sqrt(D). It is sqrt(d), d = D / k the width of one head.",
        partial(multi_head_attention, attention=scaled_by_width),
    ),
    *(
        Slip(words, partial(multi_head_attention, attention=function))
        for words, function in slips.SCORES  # of one who writes the attention out again
    ),
    Slip(
        "The heads are cut by a reshape to (B, k, T, d), which mixes tokens. Reshape to (B, T, k, d), then "
        "transpose.",
        partial(multi_head_attention, split=split_wrongly),
    ),
    Slip(
        "The heads are joined by a reshape from (B, k, T, d), which mixes tokens. Transpose to (B, T, k, d), "
        "then reshape.",
        partial(multi_head_attention, join=join_wrongly),
    ),
    Slip(
        "The heads are cut by a reshape to (B, k, T, d) and joined by a reshape from it; both mix tokens. "
        "Transpose T and k after the one and before the other.",
        partial(multi_head_attention, split=split_wrongly, join=join_wrongly),
    ),
    Slip(
        "There is one head only. Cut q, k and v into k heads before the attention.",
        lambda z, weights, heads: multi_head_attention(z, weights, 1),
    ),
    *(
        Slip(
            f"q, k and v are mixed up: their rows are taken as {', '.join(order)}. They are q, k, v.",
            partial(multi_head_attention, order=order),
        )
        for order in ("kqv", "vkq", "qvk", "kvq", "vqk")
    ),
    Slip(
        "The rows of qkv are read head by head, as (k, 3, d). They are (3, k, d): q of all heads first.",
        partial(multi_head_attention, read=by_head),
    ),
    Slip("The bias of q, k and v is left out.", partial(multi_head_attention, biased=False)),
    Slip("The last projection is missing.", partial(multi_head_attention, out=lambda x, w: x)),
    Slip(
        "The last projection has no bias.",
        partial(multi_head_attention, out=lambda x, w: x @ w["out.weight"].T),
    ),
    Slip(
        "out.weight is not transposed. It has a row for each output: x @ weight.T.",
        partial(multi_head_attention, out=lambda x, w: x @ w["out.weight"] + w["out.bias"]),
    ),
]


# ---- block ----------------------------------------------------------------------------------

Part = Callable[[Tensor], Tensor]
Wiring = Callable[[Tensor, Part, Part, Part, Part], Tensor]


def wired(wiring: Wiring, second: str = "norm2", eps: float = 1e-6) -> Callable[..., Tensor]:
    """A block whose parts are put together like that: z, norm1, attention, norm2, mlp."""

    def block(z: Tensor, weights: Weights, heads: int) -> Tensor:
        def norm(name: str) -> Part:
            return lambda x: reference.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

        def attend(x: Tensor) -> Tensor:
            return reference.multi_head_attention(x, inside(weights, "attention"), heads)

        return wiring(
            z, norm("norm1"), attend, norm(second), lambda x: reference.mlp(x, inside(weights, "mlp"))
        )

    return block


def residual(z: Tensor, part: Part) -> Tensor:
    return z + part(z)


def residual_of_mlp(z: Tensor, norm: Part, mlp: Part) -> Tensor:
    """Eq. 3."""
    return z + mlp(norm(z))


def pre_norm(z: Tensor, n1: Part, a: Part, n2: Part, m: Part) -> Tensor:
    z = z + a(n1(z))
    return z + m(n2(z))


def post_norm(z: Tensor, n1: Part, a: Part, n2: Part, m: Part) -> Tensor:
    z = n1(z + a(z))
    return n2(z + m(z))


def branches_normed(z: Tensor, n1: Part, a: Part, n2: Part, m: Part) -> Tensor:
    z = z + n1(a(z))
    return z + n2(m(z))


def without_second(z: Tensor, n1: Part, a: Part, n2: Part, m: Part) -> Tensor:
    return m(n2(z + a(n1(z))))


def second_from_normed(z: Tensor, n1: Part, a: Part, n2: Part, m: Part) -> Tensor:
    return residual(n2(z + a(n1(z))), m)


def second_from_input(z: Tensor, n1: Part, a: Part, n2: Part, m: Part) -> Tensor:
    return z + m(n2(z + a(n1(z))))


BLOCK = [
    Slip(
        "The first residual is missing: z' = MSA(LN(z)) + z.",
        wired(lambda z, n1, a, n2, m: residual_of_mlp(a(n1(z)), n2, m)),
    ),
    Slip("The second residual is missing: out = MLP(LN(z')) + z'.", wired(without_second)),
    Slip("Both residuals are missing.", wired(lambda z, n1, a, n2, m: m(n2(a(n1(z)))))),
    Slip(
        "The first residual adds the normalised states, LN(z). It adds z as it was before the norm. (A slip "
        "that can be found in print: article 001 of the notes has it.)",
        wired(lambda z, n1, a, n2, m: residual_of_mlp(residual(n1(z), a), n2, m)),
    ),
    Slip(
        "The second residual adds the normalised states, LN(z'). It adds z' as it was before the norm.",
        wired(second_from_normed),
    ),
    Slip(
        "Both residuals add the normalised states. They add what was there before the norm.",
        wired(lambda z, n1, a, n2, m: residual(n2(residual(n1(z), a)), m)),
    ),
    Slip("The second residual adds z. It adds z', the first sum.", wired(second_from_input)),
    Slip(
        "This is post-norm, LN(MSA(z) + z), as in Vaswani et al. ViT is pre-norm: the norm comes before each "
        "part, inside the residual.",
        wired(post_norm),
    ),
    Slip(
        "The norms come after attention and MLP, before the sum. ViT is pre-norm: the norm comes before each "
        "part.",
        wired(branches_normed),
    ),
    Slip(
        "Attention and MLP both get the block's input. The MLP gets the first sum, z'.",
        wired(lambda z, n1, a, n2, m: z + a(n1(z)) + m(n2(z))),
    ),
    Slip("The first norm is missing.", wired(lambda z, n1, a, n2, m: residual_of_mlp(residual(z, a), n2, m))),
    Slip("The second norm is missing.", wired(lambda z, n1, a, n2, m: residual(z + a(n1(z)), m))),
    Slip("Both norms have the weights of norm1.", wired(pre_norm, second="norm1")),
    Slip("eps of the norms is 1e-5, torch's default. It is 1e-6.", wired(pre_norm, eps=1e-5)),
]


# ---- vit ------------------------------------------------------------------------------------


def first_tokens(embedded: Tensor, w: Weights) -> Tensor:
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
    tokens: Callable[[Tensor, Weights], Tensor] = first_tokens,
    blocks: Callable[[int], range] = range,
    number: Callable[[int], int] = lambda index: index,
    norm: Callable[..., Tensor] = reference.layer_norm,
    pool: Callable[[Tensor], Tensor] = lambda z: z[:, 0],
    biased: bool = True,
) -> Tensor:
    embedded = reference.patches(images, config.patch) @ weights["tokens.proj.weight"].flatten(1).T
    z = tokens(embedded + weights["tokens.proj.bias"] if biased else embedded, weights)
    for index in blocks(config.depth):
        z = reference.block(z, inside(weights, f"blocks.{number(index)}"), config.heads)
    y = pool(norm(z, weights["norm.weight"], weights["norm.bias"]))
    return F.linear(y, weights["head.weight"], weights["head.bias"])


def norm_of_mean(images: Tensor, weights: Weights, config: Any, first: int) -> Tensor:
    def norm(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return reference.layer_norm(z[:, first:].mean(dim=1, keepdim=True), weight, bias)

    return vit(images, weights, config, norm=norm)


ALL = "The head is applied to the mean of all tokens. Eq. 4 takes the class token."
ONLY = "The head is applied to the mean of the patches. Eq. 4 takes the class token."
VIT = [
    Slip(
        "The class token stands at the end, where the head does not look for it. Eq. 1 puts it in front.",
        partial(vit, tokens=class_last),
    ),
    Slip(
        "The class token stands at the end, and is read from there. Eq. 1 puts it in front, with the first "
        "row of E_pos.",
        partial(vit, tokens=class_last, pool=lambda z: z[:, -1]),
    ),
    Slip(
        "The class token has no position. Row 0 of E_pos is added to it.",
        partial(vit, tokens=class_without_position),
    ),
    Slip(
        "Positions are added before the class token is there, so that each patch gets the row of the one "
        "before it. Put the class token in front first.",
        partial(vit, tokens=positions_before_class),
    ),
    Slip("The positions are missing.", partial(vit, tokens=without_positions)),
    Slip("The bias of the patch projection is left out.", partial(vit, biased=False)),
    Slip("The last norm is missing.", partial(vit, norm=lambda z, weight, bias: z)),
    Slip(
        "eps of the last norm is 1e-5, torch's default. It is 1e-6.",
        partial(vit, norm=partial(reference.layer_norm, eps=1e-5)),
    ),
    Slip(ALL, partial(vit, pool=lambda z: z.mean(dim=1))),
    Slip(ALL, partial(norm_of_mean, first=0)),
    Slip(ONLY, partial(vit, pool=lambda z: z[:, 1:].mean(dim=1))),
    Slip(ONLY, partial(norm_of_mean, first=1)),
    Slip(
        "The head looks at the last token. The class token is the first.",
        partial(vit, pool=lambda z: z[:, -1]),
    ),
    Slip("All blocks have the weights of block 0.", partial(vit, number=lambda index: 0)),
    Slip("Only the first block is run.", partial(vit, blocks=lambda depth: range(1))),
    Slip("The last block is not run.", partial(vit, blocks=lambda depth: range(depth - 1))),
    Slip("The blocks run in reverse.", partial(vit, blocks=lambda depth: range(depth - 1, -1, -1))),
]
