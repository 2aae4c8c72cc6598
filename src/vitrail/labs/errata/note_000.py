"""Slides with the four equations. Each function is the evidence for what stands above it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from vitrail.labs.errata.erratum import Evidence, apart, count, erratum, normal, tiny
from vitrail.model import record
from vitrail.presets import preset


@erratum(
    "000",
    'the table of sizes on the first slide (002 has it too, under "Evaluation")',
    "wrong",
    says="Base, Large and Huge have 86, 307 and 632 million parameters. Neither patch nor head is named.",
    holds="L/16 has 304 million with its head and 303 without; 307 is what L/32 has with 1,000 classes. "
    "With patches of 32 Base has 88, so no one patch gives both 86 and 307.",
)
def large_has_304_million() -> Evidence:
    names = ("B/16", "B/32", "L/16", "L/32")
    whole = {f"{name}, millions": count(name) / 1e6 for name in names}
    return {**whole, "L/16 without head, millions": count("L/16", classes=0) / 1e6}


@erratum(
    "000",
    "the first slide on patches (and 002, the first slide on 16x16 words)",
    "left open",
    says="N = HW/P^2 patches (004: d^2/p^2).",
    holds="Only where P divides both sides. Otherwise the formula is no whole number, and a convolution "
    "with stride P drops the rest of the picture without a word.",
)
def patches_must_divide() -> Evidence:
    H = W = 24
    rows, columns = nn.Conv2d(3, 8, 16, stride=16)(torch.zeros(1, 3, H, W)).shape[2:]
    return {
        "HW/P^2 for 24 x 24, P = 16": H * W / 16**2,
        "patches of the convolution": rows * columns,
        "pixels dropped, share": 1 - rows * columns * 16**2 / (H * W),
    }


@erratum(
    "000",
    "the first slide on patches (and 002, where a row of 768 values meets E)",
    "left open",
    says="768 is the hidden size D here, and the length P^2 C of a patch in 002.",
    holds="That both are 768 is chance: of the models in these notes it is so for B/16 alone, with three "
    "colours.",
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
    says="Scores are scaled by 1/sqrt(d_model); the formula itself has no scale.",
    holds="By 1/sqrt(d), d = D/k the width of a head, as 001 and 003 have it. With one head both are the "
    "same; with twelve the scores come out 3.5 times too small, and published weights attend too "
    "evenly.",
)
def scale_by_the_width_of_a_head() -> Evidence:
    D, k, T = 768, 12, 197
    scores = normal(T, D // k) @ normal(T, D // k).T

    def largest(divisor: float) -> float:
        return (scores / divisor).softmax(dim=-1).amax(dim=-1).mean().item()

    return {
        "sqrt(D)": math.sqrt(D),
        "sqrt(d)": math.sqrt(D // k),
        "largest weight of a query with sqrt(D)": largest(math.sqrt(D)),
        "with sqrt(d)": largest(math.sqrt(D // k)),
        "of 197 equal weights": 1 / T,
    }


@erratum(
    "000",
    "the slide on multi-head attention, on Q, K and V",
    "left open",
    says="Q, K and V are the weights that learn.",
    holds="The learned weights are W_q, W_k and W_v, which stay; Q, K and V are their products with the "
    "tokens and change with every picture.",
)
def queries_are_no_weights() -> Evidence:
    model = tiny()
    images = normal(2, 2, 8, 8)
    before = model.blocks[0].attention.qkv.weight.clone()
    with record(model, "blocks.0.attention.q") as tape:
        model(images)
    q = tape["blocks.0.attention.q"]
    return {
        "Q (B, k, T, d)": tuple(q.shape),
        "Q, first picture from second": apart(q[0], q[1]),
        "W": tuple(before.shape),
        "W, before from after": apart(before, model.blocks[0].attention.qkv.weight),
    }


@erratum(
    "000",
    "the slide on multi-head attention, the size of the result (and 002, the recap)",
    "left open",
    says="Attention results in a (T, T) matrix (002: it computes a matrix of similarities).",
    holds="There is one such matrix for each head, and it is not what attention gives: that is (T, D), "
    "the values mixed by it.",
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
    "left open",
    says="The head is a linear layer here and in 001, an MLP in 002, and in 004 a linear layer or MLP on "
    "all tokens, flattened.",
    holds="The paper has an MLP of one hidden layer in pre-training and a linear layer in fine-tuning, "
    "on one token. For B/16 and 1,000 classes the three differ much.",
)
def three_heads() -> Evidence:
    def head(**fields: Any) -> int:
        return count("B/16", **fields) - count("B/16", **{**fields, "classes": 0, "head": "linear"})

    return {
        "linear, parameters": head(),
        "one hidden layer": head(head="tanh"),
        "all tokens flattened": count("B/16", class_token=False, pool="flatten")
        - count("B/16", class_token=False, pool="mean", classes=0),
    }
