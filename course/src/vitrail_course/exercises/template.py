"""A Vision Transformer in eight functions, for you to write. `vitrail check THIS_FILE` checks them.

Every function takes torch tensors (float64) and returns a new one; it must not change its inputs.
B images of C channels and H x W pixels, in patches of P x P: N = (H / P)(W / P) patches; T tokens of
width D; k heads of width d = D / k; L blocks; K classes. The equations are those of "An Image is Worth
16x16 Words" (Dosovitskiy et al., 2021).

Matrices in `weights` have one row for each output, as in torch: y = x @ weight.T + bias.
Write the functions in any order; later ones may call earlier ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def inside(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights of one module, without its name (this function is written for you).

    For weights = {"mlp.fc1.bias": b, "norm1.bias": c}, inside(weights, "mlp") is {"fc1.bias": b}.
    """
    start = f"{name}."
    return {key[len(start) :]: tensor for key, tensor in weights.items() if key.startswith(start)}


def patches(images: Tensor, P: int) -> Tensor:
    """x_p of Eq. 1: images (B, C, H, W) to flattened patches (B, N, C * P * P).

    The patches are in reading order, row by row. A flattened patch has the first channel, row by row,
    then the second: the value at channel c, row i, column j has index (c * P + i) * P + j.
    """
    raise NotImplementedError


def positions(count: int, width: int) -> Tensor:
    """Sinusoidal embeddings of `count` positions (count, width), "Attention Is All You Need", 3.5.

    PE[p, 2i] = sin(p / 10000^(2i / width)) and PE[p, 2i + 1] = cos(p / 10000^(2i / width)), where p and
    i start at 0. `width` is even.
    """
    raise NotImplementedError


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """LN: each token of x (B, T, D) normalized to mean 0 and variance 1, then scaled and shifted.

    (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over the D values of a
    token. The variance divides by D, not by D - 1.
    """
    raise NotImplementedError


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v: a weighted mean of the values for each query (appendix A, Eq. 6, 7).

    q is (..., T, d), k and v are (..., S, d), with any leading dimensions; the result is (..., T, d).
    `mask` is boolean, (T, S), True where a query may attend to a key. Masked keys have weight 0, and the
    other weights of each query sum to 1.
    """
    raise NotImplementedError


def multi_head_attention(z: Tensor, weights: dict[str, Tensor], heads: int) -> Tensor:
    """MSA: (B, T, D) -> (B, T, D), attention in k heads (appendix A, Eq. 8).

    qkv.weight (3D, D) and qkv.bias (3D,): the rows of q, then those of k, then those of v. In each of
    the three, the first d rows belong to the first head.
    out.weight (D, D) and out.bias (D,): the projection of the concatenated heads.
    """
    raise NotImplementedError


def mlp(z: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """MLP: (B, T, D) -> (B, T, D), two layers with a GELU between them.

    GELU(x) = x Phi(x), where Phi is the standard normal distribution function. Use the exact form.
    fc1.weight (M, D), fc1.bias (M,), fc2.weight (D, M), fc2.bias (D,).
    """
    raise NotImplementedError


def block(z: Tensor, weights: dict[str, Tensor], heads: int) -> Tensor:
    """One encoder block, (B, T, D) -> (B, T, D).

    z' = MSA(LN(z)) + z       (Eq. 2)
    out = MLP(LN(z')) + z'    (Eq. 3)
    Weights: norm1.weight, norm1.bias, attention.*, norm2.weight, norm2.bias, mlp.*. eps is 1e-6.
    """
    raise NotImplementedError


def vit(images: Tensor, weights: dict[str, Tensor], config: Any) -> Tensor:
    """The whole model: images (B, C, H, W) -> logits (B, K).

    z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos    (Eq. 1)
    z_l = block(z_(l-1)) for l = 1 ... L              (Eq. 2, 3)
    y = LN(z_L^0), the class token                    (Eq. 4)
    logits = y head.weight^T + head.bias

    Weights: tokens.proj.weight (D, C, P, P), which is E^T when flattened, and tokens.proj.bias (D,), added
    to every patch; prefix (1, D), the class token; position.table (N + 1, D); blocks.0.* and so on;
    norm.weight, norm.bias; head.weight (K, D), head.bias (K,). eps is 1e-6.
    config.patch is P, config.depth is L, config.heads is k. `vitrail` models have the same names:
    vit(images, model.state_dict(), config) equals model(images).
    """
    raise NotImplementedError
