"""The lecture that writes attention out. Each function is the evidence for what stands above it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.labs.errata.erratum import Evidence, apart, count, erratum, normal, outcome, tiny
from vitrail.model import ViT
from vitrail.presets import preset


@erratum(
    "004",
    "the basic structure (the list of parts has it otherwise)",
    "left open",
    says="An MLP is applied to each flattened patch, and this is part of the step that repeats; later "
    "the embedding is one linear layer.",
    holds="In the paper it is linear, and once. What repeats has another width: D, not P^2 C.",
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
    "left open",
    says="d is the side of the picture, then the width of a token (D just before).",
    holds="They are two numbers. Read as one, Large's d = 1024 would make 4,096 patches.",
)
def two_meanings_of_d() -> Evidence:
    return {"(d/p)^2, d the side 256": (256 // 16) ** 2, "d the width 1024": (1024 // 16) ** 2}


@erratum(
    "004",
    "Self Attention Layer, the scores",
    "left open",
    says="The scores have no scale (000 and 003 have one).",
    holds="A learned Q can hold it, so the same functions are there. But with entries of variance one, "
    "at d = 64, softmax puts most of the weight on one token from the start.",
)
def without_a_scale() -> Evidence:
    d, T = 64, 197
    q, k = normal(T, d), normal(T, d)
    plain, scaled = (q @ k.T).softmax(dim=-1), (q @ k.T / math.sqrt(d)).softmax(dim=-1)
    return {
        "Q / sqrt(d) without scale, from Q with it": apart((q / math.sqrt(d) @ k.T).softmax(dim=-1), scaled),
        "largest weight without": plain.amax(dim=-1).mean().item(),
        "with": scaled.amax(dim=-1).mean().item(),
    }


@erratum(
    "004",
    "Self Attention Layer, the sizes",
    "wrong",
    says="V is d x m and v' = V^T (...); the slides before say that v' has the width of v.",
    holds="v' has width m, the width of a head. It can be added to v only if m = d, or after C of the "
    "multi-head layer.",
)
def width_after_one_head() -> Evidence:
    d, m = 12, 4
    v, V = normal(d), normal(d, m)
    return {"width of v": d, "of V^T v": (V.T @ v).shape[0], "v + V^T v": outcome(lambda: v + V.T @ v)}


@erratum(
    "004",
    "Multi-Head Attention Layer, V_r",
    "wrong",
    says="Each head is V_r times the mixed tokens, without the transpose of the slide for one head.",
    holds="With V_r of d x m it must be V_r^T.",
)
def transpose_lost() -> Evidence:
    d, m = 12, 4
    v, V = normal(d), normal(d, m)
    return {"V_r v": outcome(lambda: V @ v), "V_r^T v": outcome(lambda: V.T @ v)}


@erratum(
    "004",
    "both attention layers, on biases",
    "left open",
    says="Queries, keys and values have no bias; only the sum of heads has, b.",
    holds="Published models have them (bias=True in what 001 prints). Of the three, the key's has no "
    "effect: it adds the same to all scores of a query.",
)
def biases_of_q_k_v() -> Evidence:
    model, z = tiny(), normal(1, 5, 12)
    attention = model.blocks[0].attention
    whole, D = attention(z), 12

    def without(part: int) -> float:
        kept = attention.qkv.bias.clone()
        attention.qkv.bias[part * D : (part + 1) * D] = 0
        moved = apart(attention(z), whole)
        attention.qkv.bias.copy_(kept)
        return moved

    return {
        "parameters, B/16": count("B/16") - count("B/16", qkv_bias="none"),
        "output moves without the query's": without(0),
        "the key's": without(1),
        "the value's": without(2),
    }


@erratum(
    "004",
    "Self Attention Layer, p_ij",
    "left open",
    says="p_ij is a trainable bias for each pair, that is, a relative encoding.",
    holds="Free for each pair it is more than relative: that would be one value for each distance. The "
    "original ViT has neither, but a table added once at the start.",
)
def pairwise_is_more_than_relative() -> Evidence:
    side = 14
    offsets = {
        (a - c, b - d) for a in range(side) for c in range(side) for b in range(side) for d in range(side)
    }
    return {"pairs of 14 x 14 patches": side**4, "distances": len(offsets)}


@erratum(
    "004",
    "Self Attention versus Convolution",
    "wrong",
    says="A convolution is V^T times a sum with weights that depend on i and j.",
    holds="Its weights depend on i - j alone, and each distance has a matrix of its own. One V for all "
    "is the special case of rank one; a full 3 x 3 convolution takes nine heads.",
)
def one_matrix_for_each_distance() -> Evidence:
    D, places = 8, 9
    convolution = normal(places, D, D)
    of_the_note = torch.einsum("p,ab->pab", normal(places), normal(D, D))
    return {
        "parameters of 3 x 3, D = 8": convolution.numel(),
        "nine weights and one V": places + D * D,
        "rank over distances, convolution": int(torch.linalg.matrix_rank(convolution.flatten(1))),
        "one V": int(torch.linalg.matrix_rank(of_the_note.flatten(1))),
    }


@erratum(
    "004",
    "Self-Attention can learn convolution",
    "left open",
    says="Weights softmax(p_ij), larger for nearer patches, give the convolution.",
    holds="They give one that averages. Softmax is never negative, so an edge filter such as (-1, 0, 1) "
    "takes two heads, with opposite V.",
)
def softmax_only_averages() -> Evidence:
    edge = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    # The best multiple, of either sign, of weights that are not negative keeps the entries of one sign.
    one_head = edge.clamp(min=0)
    two_heads = one_head - (-edge).clamp(min=0)
    return {
        "smallest of softmax(p)": normal(9).softmax(dim=0).min().item(),
        "error of the best single head": ((edge - one_head).norm() / edge.norm()).item(),
        "of two heads": ((edge - two_heads).norm() / edge.norm()).item(),
    }


def partners(orthogonal: bool, n: int = 8, d: int = 16, draws: int = 200) -> tuple[Tensor, Tensor]:
    """Patches of norm one, the last of which is U v_1, and U."""
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
    "left open",
    says="QK^T = alpha U^-1 finds the patch equal to U v_1.",
    holds="If U is orthogonal. Otherwise another patch can score higher; U^T in place of U^-1 finds it "
    "always, since (U v_1)^T v_j is largest where v_j = U v_1.",
)
def association_needs_an_orthogonal_u() -> Evidence:
    def found(v: Tensor, middle: Tensor) -> float:
        return (weights_of_first(v, middle).argmax(dim=-1) == v.shape[1] - 1).double().mean().item()

    turned, bent = partners(True), partners(False)
    return {
        "found, U orthogonal": found(turned[0], turned[1].inverse()),
        "any U": found(bent[0], bent[1].inverse()),
        "any U, with U^T": found(bent[0], bent[1].mT),
    }


@erratum(
    "004",
    "the association function, the sum in it",
    "left open",
    says="Attention gives the sum of all patches that equal U v_1, and a convolution cannot.",
    holds="Softmax gives their mean, and something even where there is none. And if there is always "
    "exactly one, f is U v_1, which is linear: a 1 x 1 convolution gives it.",
)
def association_gives_the_mean() -> Evidence:
    v, U = partners(True)
    partner = v[:, -1].clone()

    def length(v: Tensor) -> float:
        return torch.einsum("xn,xnd->xd", weights_of_first(v, U.mT), v).norm(dim=-1).mean().item()

    thrice = v.clone()
    thrice[:, -3:] = partner[:, None]
    none = v[:, :-1]
    return {
        "length of f and of attention, three matches": (3.0, length(thrice)),
        "no match": (0.0, length(none)),
        "one match, U v_1 from f": apart((U @ v[:, 0, :, None])[..., 0], partner),
    }


@erratum(
    "004",
    "the double-if function, its formula",
    "wrong",
    says="The sum runs over i, and its term has j.",
    holds="It runs over j: how many v_j are b, if v_1 is a. Over i the same term would be counted n times.",
)
def summed_over_the_wrong_letter() -> Evidence:
    words = "abcbdbee"
    n = len(words)
    over_j = sum(words[0] == "a" and words[j] == "b" for j in range(n))
    over_i = sum(words[0] == "a" and words[1] == "b" for _ in range(n))  # j = 1, which is b
    return {"over j": over_j, "over i, j fixed": over_i}


@erratum(
    "004",
    "the double-if function, what attention makes of it",
    "left open",
    says="QK^T = alpha a b^T represents it.",
    holds="Read along b, attention says whether, not how often. Where v_1 is not a, all scores are 0, "
    "all patches count alike and b leaks through: a threshold must follow. a and b must be at "
    "right angles to the rest.",
)
def double_if_says_whether() -> Evidence:
    letters = torch.eye(16, dtype=torch.float64)
    a, b = letters[0], letters[1]

    def answer(words: list[int]) -> float:
        v = letters[words]
        weights = (100 * (v[0] @ a) * (v @ b)).softmax(dim=0)
        return (weights @ v @ b).item()

    return {
        "count and attention, v_1 = a, b three times": (3, answer([0, 1, 1, 1, 4, 5, 6, 7])),
        "v_1 not a": (0, answer([2, 1, 1, 1, 4, 5, 6, 7])),
    }


@erratum(
    "004",
    "the post-layernorm block",
    "wrong",
    says="Norm after attention, then the residual sum, is called post-layernorm.",
    holds="In Vaswani et al. the norm comes after the sum, so that each block gives tokens of standard "
    "deviation one, up to the learned scale. The order of the slide is known as res-post-norm "
    '(here `block="res-post-norm"`).',
)
def not_the_post_norm_of_vaswani() -> Evidence:
    z = normal(1, 5, 12)
    base = {"width": 12, "depth": 1, "heads": 3, "patch": 4, "size": 8}

    def spread(block: str) -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            out = ViT(ViTConfig(**base, block=block)).double().blocks[0](z)  # type: ignore[arg-type]
        return out.std(dim=-1, unbiased=False).mean().item()

    return {
        "deviation after Vaswani's block": spread("post-norm"),
        "after the note's": spread("res-post-norm"),
    }


@erratum(
    "004",
    "the list of parts of a Vision Transformer",
    "left open",
    says="Embedding with a norm, blocks of either kind, flatten and linear.",
    holds="The original has no norm after the embedding, but a class token, positions, pre-norm blocks "
    "and a last norm (000, equations 1 to 4); none of these four is in the list.",
)
def parts_left_out() -> Evidence:
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
    says="The picture is cut into 16 x 16 patches, 256 vectors; 307 million parameters.",
    holds="In the name 16 is the side of a patch in pixels: 196 patches at 224 pixels. There are 256 at "
    "256 pixels, and then 304 million parameters.",
)
def large_in_256_vectors() -> Evidence:
    patches = {f"patches of {name}": preset(name).patches for name in ("L/16", "L/16@256")}
    return {**patches, "parameters of L/16@256": count("L/16@256")}
