"""Errata of note 000, slides with the four equations. Each function computes the evidence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from vitrail.model import record
from vitrail.model.presets import preset
from vitrail_course.errata.erratum import Evidence, count_parameters, erratum, max_difference, normal, tiny


@erratum(
    "000",
    'the table of sizes on the first slide (002 has it too, under "Evaluation")',
    "wrong",
    claim="Base, Large and Huge have 86, 307 and 632 million parameters. Patch size and head are not given.",
    correction="L/16 has 304 million parameters with its head and 303 without; 307 is L/32 with 1,000 "
    "classes. With patches of 32, Base has 88, so no single patch size gives both 86 and 307.",
)
def large_has_304_million() -> Evidence:
    names = ("B/16", "B/32", "L/16", "L/32")
    with_head = {f"{name}, millions": count_parameters(name) / 1e6 for name in names}
    return {**with_head, "L/16 without head, millions": count_parameters("L/16", classes=0) / 1e6}


@erratum(
    "000",
    "the first slide on patches (and 002, the first slide on 16x16 words)",
    "imprecise",
    claim="N = HW/P^2 patches (004: d^2/p^2).",
    correction="Only if P divides both sides. Otherwise the formula is not an integer, and a convolution "
    "with stride P silently drops the rest of the image.",
)
def patches_must_divide() -> Evidence:
    H = W = 24
    rows, columns = nn.Conv2d(3, 8, 16, stride=16)(torch.zeros(1, 3, H, W)).shape[2:]
    return {
        "HW/P^2 for 24 x 24, P = 16": H * W / 16**2,
        "patches of the convolution": rows * columns,
        "fraction of pixels dropped": 1 - rows * columns * 16**2 / (H * W),
    }


@erratum(
    "000",
    "the first slide on patches (and 002, where a row of 768 values is multiplied by E)",
    "imprecise",
    claim="768 is the hidden size D here, and the length P^2 C of a patch in 002.",
    correction="That both are 768 is a coincidence: of the models in these notes, it holds for B/16 alone, "
    "with three channels.",
)
def two_meanings_of_768() -> Evidence:
    configs = {name: preset(name) for name in ("B/16", "B/32", "L/16", "H/14")}
    return {
        f"{name}: (P^2 C, D)": ((config.pixels[0] // config.grid[0]) ** 2 * 3, config.width)
        for name, config in configs.items()
    }


@erratum(
    "000",
    "the slide on multi-head attention, the factor beside the formula",
    "wrong",
    claim="Scores are scaled by 1/sqrt(d_model); the formula itself has no scale.",
    correction="By 1/sqrt(d), where d = D/k is the width of a head, as in 001 and 003. With one head both "
    "are the same; with twelve the scores are 3.5 times too small, and the attention of published models "
    "becomes too uniform.",
)
def scale_is_the_width_of_a_head() -> Evidence:
    D, k, T = 768, 12, 197
    scores = normal(T, D // k) @ normal(T, D // k).T

    def largest(divisor: float) -> float:
        return (scores / divisor).softmax(dim=-1).amax(dim=-1).mean().item()

    return {
        "sqrt(D)": math.sqrt(D),
        "sqrt(d)": math.sqrt(D // k),
        "largest weight of a query with sqrt(D)": largest(math.sqrt(D)),
        "with sqrt(d)": largest(math.sqrt(D // k)),
        "uniform weight 1/197": 1 / T,
    }


@erratum(
    "000",
    "the slide on multi-head attention, on Q, K and V",
    "imprecise",
    claim="Q, K and V are the learned weights.",
    correction="The learned weights are W_q, W_k and W_v, the same for all images. Q, K and V are their "
    "products with the tokens and differ from image to image.",
)
def queries_are_not_weights() -> Evidence:
    model = tiny()
    images = normal(2, 2, 8, 8)
    before = model.blocks[0].attention.qkv.weight.clone()
    with record(model, "blocks.0.attention.q") as tape:
        model(images)
    q = tape["blocks.0.attention.q"]
    return {
        "Q (B, k, T, d)": tuple(q.shape),
        "Q, difference of two images": max_difference(q[0], q[1]),
        "W": tuple(before.shape),
        "W, difference before and after": max_difference(before, model.blocks[0].attention.qkv.weight),
    }


@erratum(
    "000",
    "the slide on multi-head attention, the size of the result (and 002, the recap)",
    "imprecise",
    claim="Attention results in a (T, T) matrix (002: it computes a matrix of similarities).",
    correction="There is one such matrix for each head, and it is not the output of attention, which is (T, "
    "D): the values weighted by it.",
)
def one_matrix_for_each_head() -> Evidence:
    model = tiny()
    with record(model, "blocks.0.attention.weights", "blocks.0.attention.out") as tape:
        model(normal(1, 2, 8, 8))
    return {
        "T": model.config.tokens,
        "weights (k, T, T)": tuple(tape["blocks.0.attention.weights"].shape[1:]),
        "result (T, D)": tuple(tape["blocks.0.attention.out"].shape[1:]),
    }


@erratum(
    "000",
    "the last slide; 001 Classifier; 002 Full architecture; 004 the list of parts",
    "imprecise",
    claim="The head is a linear layer here and in 001, an MLP in 002, and a linear layer or MLP on all "
    "flattened tokens in 004.",
    correction="The paper uses an MLP with one hidden layer in pre-training and a linear layer in "
    "fine-tuning, on one token. For B/16 and 1,000 classes the three have very different sizes.",
)
def three_heads() -> Evidence:
    def head(**fields: Any) -> int:
        return count_parameters("B/16", **fields) - count_parameters(
            "B/16", **{**fields, "classes": 0, "head": "linear"}
        )

    return {
        "linear, parameters": head(),
        "one hidden layer": head(head="tanh"),
        "all tokens flattened": count_parameters("B/16", class_token=False, pool="flatten")
        - count_parameters("B/16", class_token=False, pool="mean", classes=0),
    }
