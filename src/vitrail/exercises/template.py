"""A Vision Transformer in eight functions, for you to write. `vitrail check THIS_FILE` marks them.

Every function takes torch tensors, float64, and returns a new one: it leaves its inputs as they are.
B pictures of C channels, H x W pixels, in patches of P x P: N = (H / P)(W / P) patches; T tokens of
width D; k heads of width d = D / k; L blocks; K classes. The equations are those of "An Image is Worth
16x16 Words" (Dosovitskiy et al., 2021).

A matrix in `weights` is stored as torch stores it, one row for each output: y = x @ weight.T + bias.
Write the functions in any order; the later ones may call the earlier ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def inside(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights of one part, without the part's name (this one is written for you).

    inside(weights, "mlp") of {"mlp.fc1.bias": b, "norm1.bias": c} is {"fc1.bias": b}.
    """
    start = f"{name}."
    return {key[len(start) :]: tensor for key, tensor in weights.items() if key.startswith(start)}


def patches(images: Tensor, P: int) -> Tensor:
    """x_p of Eq. 1: pictures (B, C, H, W) cut into flat patches (B, N, C * P * P).

    Patches row by row, as one reads. In a flat patch all of the first channel comes first, row by row,
    then all of the second: the value of channel c, row i, column j is number (c * P + i) * P + j.
    """
    raise NotImplementedError


def positions(count: int, width: int) -> Tensor:
    """Sines and cosines for `count` places (count, width), as in "Attention Is All You Need", 3.5.

    PE[p, 2i] = sin(p / 10000^(2i / width)) and PE[p, 2i + 1] = cos(p / 10000^(2i / width)), where p and
    i count from 0. `width` is even.
    """
    raise NotImplementedError


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """LN: each token (B, T, D) brought to mean 0 and variance 1, then scaled and shifted: (B, T, D).

    (x - mean) / sqrt(variance + eps) * weight + bias; mean and variance over the D values of a token,
    the variance with D below the line, not D - 1.
    """
    raise NotImplementedError


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v: a weighted mean of the values for each query (appendix A, Eq. 6, 7).

    q is (..., T, d), k and v are (..., S, d), with any dimensions in front; the result is (..., T, d).
    `mask` is boolean, (T, S): True where a query may look. What it may not look at has the weight 0,
    and the other weights of the query sum to 1.
    """
    raise NotImplementedError


def multi_head_attention(z: Tensor, weights: dict[str, Tensor], heads: int) -> Tensor:
    """MSA: (B, T, D) -> (B, T, D), attention in k heads side by side (appendix A, Eq. 8).

    qkv.weight (3D, D) and qkv.bias (3D,): the rows of q first, then those of k, then those of v; in
    each of the three the first d rows are the first head's.
    out.weight (D, D) and out.bias (D,): for the heads' results, first head first.
    """
    raise NotImplementedError


def mlp(z: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """MLP: (B, T, D) -> (B, T, D), two layers with a GELU between them.

    GELU(x) = x Phi(x), Phi the distribution function of the normal distribution; not an approximation.
    fc1.weight (M, D), fc1.bias (M,), fc2.weight (D, M), fc2.bias (D,).
    """
    raise NotImplementedError


def block(z: Tensor, weights: dict[str, Tensor], heads: int) -> Tensor:
    """One block of the encoder, (B, T, D) -> (B, T, D).

    z' = MSA(LN(z)) + z       (Eq. 2)
    out = MLP(LN(z')) + z'    (Eq. 3)
    norm1.weight, norm1.bias, attention.*, norm2.weight, norm2.bias, mlp.*; eps is 1e-6.
    """
    raise NotImplementedError


def vit(images: Tensor, weights: dict[str, Tensor], config: Any) -> Tensor:
    """The whole model: pictures (B, C, H, W) -> logits (B, K).

    z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos    (Eq. 1)
    z_l = block(z_(l-1)) for l = 1 ... L              (Eq. 2, 3)
    y = LN(z_L^0), the class token                    (Eq. 4)
    logits = y head.weight^T + head.bias

    tokens.proj.weight (D, C, P, P), which flattened is E^T, and tokens.proj.bias (D,), added to every
    patch; prefix (1, D), the class token; position.table (N + 1, D); blocks.0.* and so on;
    norm.weight, norm.bias; head.weight (K, D), head.bias (K,). eps is 1e-6.
    config.patch is P, config.depth is L, config.heads is k. These are the names of `vitrail` models:
    vit(images, model.state_dict(), config) is the same as model(images).
    """
    raise NotImplementedError
