"""Errata of note 004, a lecture on attention. Each function computes the evidence."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.presets import preset
from vitrail_course.errata.erratum import (
    Evidence,
    count_parameters,
    erratum,
    max_difference,
    normal,
    outcome,
    tiny,
)


@erratum(
    "004",
    "the basic structure (the list of parts differs)",
    "imprecise",
    claim="An MLP is applied to each flattened patch, in the step that repeats; later the embedding is one "
    "linear layer.",
    correction="In the paper the embedding is linear and applied once. The step that repeats has another "
    "width: D, not P^2 C.",
)
def linear_or_mlp_on_patches() -> Evidence:
    linear, mlp = tiny(), tiny(embedding="mlp")
    return {
        "(P^2 C, D)": tuple(linear.tokens.proj.weight.flatten(1).T.shape),
        "parameters, linear": sum(p.numel() for p in linear.tokens.parameters()),
        "MLP": sum(p.numel() for p in mlp.tokens.parameters()),
    }


@erratum(
    "004",
    "from the basic structure to the attention layer, on letters",
    "imprecise",
    claim="d is the side of the image, then the width of a token (D just before).",
    correction="These are two different numbers. Read as one, d = 1024 of Large would give 4,096 patches.",
)
def two_meanings_of_d() -> Evidence:
    return {"(d/p)^2 with d = 256, the side": (256 // 16) ** 2, "with d = 1024, the width": (1024 // 16) ** 2}


@erratum(
    "004",
    "Self Attention Layer, the scores",
    "imprecise",
    claim="The scores are not scaled (in 000 and 003 they are).",
    correction="A learned Q can include the scale, so the same functions can be represented. But with "
    "entries of variance 1 and d = 64, softmax puts most of the weight on one token from the start.",
)
def without_a_scale() -> Evidence:
    d, T = 64, 197
    q, k = normal(T, d), normal(T, d)
    plain, scaled = (q @ k.T).softmax(dim=-1), (q @ k.T / math.sqrt(d)).softmax(dim=-1)
    return {
        "difference of Q / sqrt(d) without scale and Q with it": max_difference(
            (q / math.sqrt(d) @ k.T).softmax(dim=-1), scaled
        ),
        "largest weight without scale": plain.amax(dim=-1).mean().item(),
        "with": scaled.amax(dim=-1).mean().item(),
    }


@erratum(
    "004",
    "Self Attention Layer, the sizes",
    "wrong",
    claim="V is d x m and v' = V^T (...); the slides before say that v' has the width of v.",
    correction="v' has width m, the width of a head. It can be added to v only if m = d, or after the matrix "
    "C of the multi-head layer.",
)
def width_after_one_head() -> Evidence:
    d, m = 12, 4
    v, V = normal(d), normal(d, m)
    return {"width of v": d, "of V^T v": (V.T @ v).shape[0], "v + V^T v": outcome(lambda: v + V.T @ v)}


@erratum(
    "004",
    "Multi-Head Attention Layer, V_r",
    "wrong",
    claim="Each head is V_r times the weighted tokens, without the transpose of the slide on one head.",
    correction="With V_r of size d x m it must be V_r^T.",
)
def missing_transpose() -> Evidence:
    d, m = 12, 4
    v, V = normal(d), normal(d, m)
    return {"V_r v": outcome(lambda: V @ v), "V_r^T v": outcome(lambda: V.T @ v)}


@erratum(
    "004",
    "both attention layers, on biases",
    "imprecise",
    claim="Queries, keys and values have no bias; only the sum of the heads has one, b.",
    correction="Published models have these biases (001 prints bias=True). That of the keys has no effect: "
    "it adds the same number to all scores of a query.",
)
def biases_of_q_k_v() -> Evidence:
    model, z = tiny(), normal(1, 5, 12)
    attention = model.blocks[0].attention
    output, D = attention(z), 12

    def without(part: int) -> float:
        bias = attention.qkv.bias.clone()
        attention.qkv.bias[part * D : (part + 1) * D] = 0
        change = max_difference(attention(z), output)
        attention.qkv.bias.copy_(bias)
        return change

    return {
        "parameters, B/16": count_parameters("B/16") - count_parameters("B/16", qkv_bias="none"),
        "change of the output without the query's": without(0),
        "the key's": without(1),
        "the value's": without(2),
    }


@erratum(
    "004",
    "Self Attention Layer, p_ij",
    "imprecise",
    claim="p_ij is a trainable bias for each pair, that is, a relative position encoding.",
    correction="A free bias for each pair is more general: a relative encoding has one value for each "
    "offset. The original ViT has neither, but a table that is added once at the start.",
)
def pairwise_is_more_than_relative() -> Evidence:
    side = 14
    offsets = {
        (a - c, b - d) for a in range(side) for c in range(side) for b in range(side) for d in range(side)
    }
    return {"pairs of 14 x 14 patches": side**4, "offsets": len(offsets)}


@erratum(
    "004",
    "Self Attention versus Convolution",
    "wrong",
    claim="A convolution is V^T times a sum with weights that depend on i and j.",
    correction="Its weights depend only on i - j, and each offset has its own matrix. One V for all is the "
    "special case of rank one; a full 3 x 3 convolution needs nine heads.",
)
def one_matrix_for_each_offset() -> Evidence:
    D, offsets = 8, 9
    convolution = normal(offsets, D, D)
    of_the_note = torch.einsum("p,ab->pab", normal(offsets), normal(D, D))
    return {
        "parameters of 3 x 3, D = 8": convolution.numel(),
        "with nine weights and one V": offsets + D * D,
        "rank over offsets, convolution": int(torch.linalg.matrix_rank(convolution.flatten(1))),
        "with one V": int(torch.linalg.matrix_rank(of_the_note.flatten(1))),
    }


@erratum(
    "004",
    "Self-Attention can learn convolution",
    "imprecise",
    claim="Weights softmax(p_ij), larger for nearer patches, give a convolution.",
    correction="They give only averaging filters. Softmax is never negative, so an edge filter such as (-1, "
    "0, 1) needs two heads with opposite V.",
)
def softmax_only_averages() -> Evidence:
    edge = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    # The best multiple of non-negative weights matches the entries of one sign and leaves the others 0.
    one_head = edge.clamp(min=0)
    two_heads = one_head - (-edge).clamp(min=0)
    return {
        "smallest softmax(p)": normal(9).softmax(dim=0).min().item(),
        "error of the best single head": ((edge - one_head).norm() / edge.norm()).item(),
        "of two heads": ((edge - two_heads).norm() / edge.norm()).item(),
    }


def partners(orthogonal: bool, n: int = 8, d: int = 16, draws: int = 200) -> tuple[Tensor, Tensor]:
    """Patches of norm 1, the last of which is U v_1, and U."""
    U = normal(draws, d, d)
    if orthogonal:
        U = torch.linalg.qr(U)[0]
    v = F.normalize(normal(draws, n, d), dim=-1)
    partner = (U @ v[:, 0, :, None])[..., 0]
    U = U / partner.norm(dim=-1)[:, None, None]
    v[:, -1] = F.normalize(partner, dim=-1)
    return v, U


def weights_of_first(v: Tensor, middle: Tensor, alpha: float = 100.0) -> Tensor:
    """softmax_j(alpha v_1^T M v_j): (draws, n)."""
    return (alpha * torch.einsum("xa,xab,xnb->xn", v[:, 0], middle, v)).softmax(dim=-1)


@erratum(
    "004",
    "the association function, which Q K^T to take",
    "imprecise",
    claim="QK^T = alpha U^-1 finds the patch that equals U v_1.",
    correction="Only if U is orthogonal. Otherwise another patch can score higher. U^T in place of U^-1 "
    "always finds it, since (U v_1)^T v_j is largest for v_j = U v_1.",
)
def association_needs_an_orthogonal_u() -> Evidence:
    def accuracy(v: Tensor, middle: Tensor) -> float:
        return (weights_of_first(v, middle).argmax(dim=-1) == v.shape[1] - 1).double().mean().item()

    orthogonal, general = partners(True), partners(False)
    return {
        "fraction found, U orthogonal": accuracy(orthogonal[0], orthogonal[1].inverse()),
        "any U": accuracy(general[0], general[1].inverse()),
        "any U, with U^T": accuracy(general[0], general[1].mT),
    }


@erratum(
    "004",
    "the association function, the sum in it",
    "imprecise",
    claim="Attention gives the sum of all patches that equal U v_1, which a convolution cannot.",
    correction="Softmax gives their mean, and also a result if there is none. And if there is always exactly "
    "one, f is U v_1, which is linear: a 1 x 1 convolution computes it.",
)
def association_gives_the_mean() -> Evidence:
    v, U = partners(True)
    partner = v[:, -1].clone()

    def norm(v: Tensor) -> float:
        return torch.einsum("xn,xnd->xd", weights_of_first(v, U.mT), v).norm(dim=-1).mean().item()

    three = v.clone()
    three[:, -3:] = partner[:, None]
    none = v[:, :-1]
    return {
        "norm of f and of attention, three matches": (3.0, norm(three)),
        "no match": (0.0, norm(none)),
        "one match, difference of U v_1 and f": max_difference((U @ v[:, 0, :, None])[..., 0], partner),
    }


@erratum(
    "004",
    "the double-if function, its formula",
    "wrong",
    claim="The sum is over i, but its term has j.",
    correction="The sum is over j: the number of v_j equal to b, if v_1 is a. Over i the same term would be "
    "counted n times.",
)
def sum_over_the_wrong_index() -> Evidence:
    words = "abcbdbee"
    n = len(words)
    over_j = sum(words[0] == "a" and words[j] == "b" for j in range(n))
    over_i = sum(words[0] == "a" and words[1] == "b" for _ in range(n))  # j = 1, which is b
    return {"over j": over_j, "over i, j fixed": over_i}


@erratum(
    "004",
    "the double-if function, what attention makes of it",
    "imprecise",
    claim="QK^T = alpha a b^T represents it.",
    correction="The component along b says whether b occurs, not how often. If v_1 is not a, all scores are "
    "0, all patches have equal weight and b leaks through: a threshold is needed. a and b must be "
    "orthogonal to the rest.",
)
def double_if_does_not_count() -> Evidence:
    letters = torch.eye(16, dtype=torch.float64)
    a, b = letters[0], letters[1]

    def component(words: list[int]) -> float:
        v = letters[words]
        weights = (100 * (v[0] @ a) * (v @ b)).softmax(dim=0)
        return (weights @ v @ b).item()

    return {
        "count and attention, v_1 = a, b three times": (3, component([0, 1, 1, 1, 4, 5, 6, 7])),
        "v_1 not a": (0, component([2, 1, 1, 1, 4, 5, 6, 7])),
    }


@erratum(
    "004",
    "the post-layernorm block",
    "wrong",
    claim="The norm after attention, followed by the residual sum, is called post-layernorm.",
    correction="In Vaswani et al. the norm comes after the sum, so that the output of each block has "
    "standard deviation 1, up to the learned scale. The order on the slide is known as res-post-norm "
    '(here `block="res-post-norm"`).',
)
def not_the_post_norm_of_vaswani() -> Evidence:
    z = normal(1, 5, 12)
    base = {"width": 12, "depth": 1, "heads": 3, "patch": 4, "size": 8}

    def deviation(block: str) -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            out = ViT(ViTConfig(**base, block=block)).double().blocks[0](z)  # type: ignore[arg-type]
        return out.std(dim=-1, unbiased=False).mean().item()

    return {
        "standard deviation after Vaswani's block": deviation("post-norm"),
        "after the note's": deviation("res-post-norm"),
    }


@erratum(
    "004",
    "the list of parts of a Vision Transformer",
    "imprecise",
    claim="An embedding with a norm, blocks of either kind, flatten and a linear layer.",
    correction="The original has no norm after the embedding, but it has a class token, positions, pre-norm "
    "blocks and a final norm (000, Eq. 1 to 4); none of these four is in the list.",
)
def parts_not_listed() -> Evidence:
    fields = {"class_token": False, "pool": "flatten", "pool_norm": "none", "position": "none"}
    listed = {name for name, _ in tiny(**fields, embedding_norm="after").named_parameters()}
    original = {name for name, _ in tiny().named_parameters()}

    def parts(names: set[str]) -> str:
        return ", ".join(sorted(names))

    return {"only in the original": parts(original - listed), "only in the note": parts(listed - original)}


@erratum(
    "004",
    "the slide on ViT-Large",
    "wrong",
    claim="The image is split into 16 x 16 patches, 256 vectors; 307 million parameters.",
    correction="In the name, 16 is the side of a patch in pixels: an image of 224 pixels has 196 patches. An "
    "image of 256 pixels has 256, and the model then has 304 million parameters.",
)
def large_with_256_patches() -> Evidence:
    patches = {f"patches of {name}": preset(name).patches for name in ("L/16", "L/16@256")}
    return {**patches, "parameters of L/16@256": count_parameters("L/16@256")}


@erratum(
    "004",
    "Self-Attention can learn convolution, its reference",
    "wrong",
    claim="[Samy Jelassi and Yuanzhi Li, 2022]: How vision transformer learns the patch associations.",
    correction="Samy Jelassi, Michael E. Sander and Yuanzhi Li: Vision Transformers provably learn spatial "
    "structure, NeurIPS 2022 (arXiv 2210.09221).",
)
def another_title() -> Evidence:
    cited = {"how", "vision", "transformer", "learns", "the", "patch", "associations"}
    published = {"vision", "transformers", "provably", "learn", "spatial", "structure"}
    return {"words of the title that are the same": len(cited & published), "of": len(published)}
