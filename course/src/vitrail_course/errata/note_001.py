"""Errata of note 001, an article on the code of ViT. Each function computes the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.create import create
from vitrail.model.presets import preset
from vitrail_course.errata.erratum import Evidence, embedded, erratum, max_difference, normal, outcome, tiny


@erratum(
    "001",
    "Patch Embedding, on stride",
    "wrong",
    claim="With stride 16 an image of 224 x 224 is cut into 14 patches.",
    correction="14 along each side, 196 in total, as the article says further down.",
)
def fourteen_along_each_side() -> Evidence:
    config = preset("B/16")
    return {"along a side": config.grid[0], "in total": config.patches}


@erratum(
    "001",
    "Patch Embedding, the first two patches",
    "wrong",
    claim="The second patch has rows 16 to 32 and columns 0 to 16, position [1, 0] of the convolution's "
    "output.",
    correction="That is the patch below the first. Flattened row by row it has index 14; the second patch of "
    "the sequence is [0, 1], to the right.",
)
def the_second_patch_is_to_the_right() -> Evidence:
    grid = torch.arange(14 * 14).reshape(1, 1, 14, 14)
    sequence = grid.flatten(2)[0, 0].tolist()
    return {
        "index of [1, 0]": sequence.index(grid[0, 0, 1, 0].item()),
        "index of [0, 1]": sequence.index(grid[0, 0, 0, 1].item()),
    }


@erratum(
    "001",
    "Patch Embedding, the loop from scratch and its check",
    "wrong",
    claim="out[0] of the loop is close to embeddings[0].",
    correction="The first is (768, 14, 14), the second was flattened and transposed to (196, 768). They can "
    "be compared only after the same is done to the first.",
)
def compared_in_two_shapes() -> Evidence:
    D, side = 768, 14
    out = np.zeros((D, side, side))
    embeddings = out.reshape(D, -1).T
    return {
        "out[0]": tuple(out.shape),
        "embeddings[0]": tuple(embeddings.shape),
        "compared": outcome(lambda: np.allclose(out, embeddings)),
        "flattened and transposed first": outcome(lambda: np.allclose(out.reshape(D, -1).T, embeddings)),
    }


@erratum(
    "001",
    "Patch Embedding, the end of Embeddings, the loop over all layers",
    "wrong",
    claim="The code runs as printed.",
    correction="Some lines use undefined names: N should be batch_size, self.position_embeddings should be "
    "that of model.vit.embeddings, sequence_output should be hidden_states, and image is never loaded.",
)
def undefined_names() -> Evidence:
    defined = {"batch_size": 1, "F": 768, "norm": abs, "hidden_states": 0, "embeddings": 0}
    written = ("(N, F)", "embeddings + self.position_embeddings", "norm(sequence_output)", "image[0]")
    corrected = ("(batch_size, F)", "norm(hidden_states)")
    return {f"`{line}`": outcome(partial(eval, line, dict(defined))) for line in (*written, *corrected)}


@erratum(
    "001",
    "the end of Embeddings, where all of it is put together",
    "wrong",
    claim="cls_token is taken from the model, then cls_tokens is prepended to the patches.",
    correction="cls_tokens (with an s) is still the random one from above. The model's own must be expanded.",
)
def a_random_class_token() -> Evidence:
    cls_tokens = normal(1, 1, 12)  # random, from further up
    cls_token = tiny().prefix[None]  # the model's
    patches = normal(1, 4, 12)
    as_written, correct = (torch.cat((first, patches), dim=1) for first in (cls_tokens, cls_token))
    return {"class token, difference from the model's": max_difference(as_written, correct)}


@erratum(
    "001",
    "Patch Embedding, the class token",
    "wrong",
    claim="The class token is appended.",
    correction="It is prepended, as in the article's own torch.cat (and in 000): index 0 is the class token, "
    "index 1 the first patch.",
)
def prepended_not_appended() -> Evidence:
    token, patches = torch.ones(1, 1, 4), torch.zeros(1, 196, 4)
    written = torch.cat((token, patches), dim=1)
    appended = torch.cat((patches, token), dim=1)
    return {
        "its index in the code": int(written[0, :, 0].argmax()),
        "its index if appended": int(appended[0, :, 0].argmax()),
    }


@erratum(
    "001",
    "Positional Embedding, its shape",
    "wrong",
    claim="The position tensor is [batch_size, 197, 768], the shape of the embeddings.",
    correction="It has no batch dimension: one table (197, 768) is added to every image.",
)
def positions_have_no_batch() -> Evidence:
    with torch.device("meta"):
        model: Any = create("B/16", depth=1)
        embedded = torch.zeros(8, 197, 768) + model.position.table
    return {"table": tuple(model.position.table.shape), "embeddings of 8": tuple(embedded.shape)}


@erratum(
    "001",
    "Dropout, after the embeddings and after attention",
    "imprecise",
    claim="Dropout sets some values to zero to reduce overfitting; in attention it drops whole tokens.",
    correction="The printed model has p = 0.0, which does nothing. And dropout of attention weights drops "
    "pairs: a token that is dropped for one query is still there for the next.",
)
def dropout_of_pairs() -> Evidence:
    weights = torch.full((1, 12, 64, 64), 1 / 64)
    dropped = F.dropout(weights, 0.5, training=True) == 0
    return {
        "zeros with p = 0.0": int((F.dropout(weights, 0.0, training=True) == 0).sum()),
        "fraction dropped with p = 0.5": round(dropped.double().mean().item(), 1),
        "tokens dropped for every query of a head": int(dropped.all(dim=-2).sum()),
    }


@erratum(
    "001",
    "Self-Attention, the row of the third head",
    "imprecise",
    claim="The first patch attends most to the second, with 0.26.",
    correction="The number is truncated, not rounded: the second patch has 0.27 in the printed row. 0.26 is "
    "the weight of the class token, hardly less.",
)
def whose_weight_is_026() -> Evidence:
    row = {"class": 2.6356e-01, "first patch": 1.2783e-03, "second patch": 2.6888e-01}
    return {f"{token}, rounded": round(weight, 2) for token, weight in row.items()}


@erratum(
    "001",
    "Self-Attention, where LayerNorm is shown by hand",
    "wrong",
    claim="embeddings[0][0] is the first patch, and first_patch_std is its standard deviation.",
    correction="The class token is at index 0 by then, and the first patch at index 1. The variable named "
    "std is the variance; its root is taken in the next line.",
)
def layer_norm_of_the_class_token() -> Evidence:
    model = tiny()
    image = normal(1, 2, 8, 8)
    embeddings = embedded(model, image)
    first_patch = model.tokens(image)[0][0] + model.position.table[1]
    centered = first_patch - first_patch.mean()
    return {
        "embeddings[0][0], difference from the first patch": max_difference(embeddings[0][0], first_patch),
        "embeddings[0][1], difference": max_difference(embeddings[0][1], first_patch),
        "first_patch_std": centered.pow(2).mean().item(),
        "standard deviation": centered.pow(2).mean().sqrt().item(),
    }


@erratum(
    "001",
    "Intermediate, the first residual connection",
    "wrong",
    claim="attention_output is added to hidden_states, which a comment calls the embeddings.",
    correction="hidden_states was overwritten by LayerNorm. z' = MSA(LN(z)) + z adds z from before the norm.",
)
def residual_on_normed_states() -> Evidence:
    model = tiny()
    block = model.blocks[0]
    z = embedded(model, normal(1, 2, 8, 8))
    hidden_states = block.norm1(z)
    attention_output = block.attention(hidden_states)

    def rest(hidden_states: Tensor) -> Tensor:
        return block.mlp(block.norm2(hidden_states)) + hidden_states

    return {
        "difference from the block, as written": max_difference(
            rest(attention_output + hidden_states), block(z)
        ),
        "with the embeddings": max_difference(rest(attention_output + z), block(z)),
    }


@erratum(
    "001",
    "Intermediate, on the order",
    "imprecise",
    claim="A norm and a residual connection come before the MLP; the norm is applied to the attention "
    "output.",
    correction="First the sum, then the norm of the sum, as in the article's code. The other order is "
    "another model, similar to the one that 004 calls post-layernorm.",
)
def sum_first_then_norm() -> Evidence:
    model = tiny()
    block, z = model.blocks[0], normal(1, 5, 12)
    attended = block.attention(block.norm1(z))
    return {
        "difference of LN(attended + z) and LN(attended) + z": max_difference(
            block.norm2(attended + z), block.norm2(attended) + z
        )
    }


@erratum(
    "001",
    "Intermediate, how a residual connection is written",
    "imprecise",
    claim="nn.Sequential gets a list, and nn.Linear no arguments.",
    correction="This sketch does not run: Sequential takes the layers themselves, and Linear takes two "
    "widths.",
)
def sequential_of_a_list() -> Evidence:
    make: Any = nn.Sequential
    linear: Any = nn.Linear
    return {
        "Sequential([...])": outcome(lambda: make([nn.ReLU()])),
        "Linear()": outcome(lambda: linear()),
        "Sequential(Linear(4, 4), ...)": outcome(lambda: make(nn.Linear(4, 4), nn.ReLU())),
    }


@erratum(
    "001",
    "Intermediate, the insight on residual connections",
    "wrong",
    claim="If the transformations approach the identity, adding them changes nothing.",
    correction="They would have to approach zero. Adding the identity doubles the input.",
)
def identity_doubles() -> Evidence:
    x = normal(12)

    def gain(transform: Callable[[Tensor], Tensor]) -> float:
        return ((x + transform(x)).norm() / x.norm()).item()

    return {
        "output / input, identity": gain(lambda x: x),
        "output / input, zero": gain(torch.zeros_like),
    }


@erratum(
    "001",
    "Intermediate, on GELU",
    "wrong",
    claim="GELU is Phi, the normal distribution function.",
    correction="It is x Phi(x).",
)
def gelu_is_x_times_phi() -> Evidence:
    x = torch.tensor([-3.0, 3.0], dtype=torch.float64)
    phi = torch.distributions.Normal(0, 1).cdf(x)
    named = {"GELU": F.gelu(x), "Phi(x)": phi, "x Phi(x)": x * phi}
    return {f"{name} at -3 and 3": tuple(value.tolist()) for name, value in named.items()}


@erratum(
    "001",
    "Intermediate, the formula with tanh",
    "imprecise",
    claim="GELU is usually computed by an approximation.",
    correction="In PyTorch `gelu` is the exact form with erf. The two differ, so a model should run with the "
    "one it was trained with.",
)
def two_gelus() -> Evidence:
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    exact = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return {
        "PyTorch, difference from exact": max_difference(F.gelu(x), exact),
        "tanh, difference from exact": max_difference(F.gelu(x, approximate="tanh"), exact),
    }
