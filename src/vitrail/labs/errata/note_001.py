"""The article that walks through the code. Each function is the evidence for what stands above it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.build import create
from vitrail.labs.errata.erratum import Evidence, apart, embedded, erratum, normal, outcome, tiny
from vitrail.presets import preset


@erratum(
    "001",
    "Patch Embedding, on stride",
    "wrong",
    says="With stride 16 a picture of 224 x 224 is cut into 14 patches.",
    holds="14 along each side, 196 together, as the article says further down.",
)
def fourteen_along_each_side() -> Evidence:
    config = preset("B/16")
    return {"along a side": config.grid[0], "together": config.patches}


@erratum(
    "001",
    "Patch Embedding, the first two patches",
    "wrong",
    says="The second patch has rows 16 to 32 and columns 0 to 16, place [1, 0] of the convolution.",
    holds="That is the patch below the first. Flattened row by row it has index 14; the second of the "
    "sequence stands at [0, 1], to the right.",
)
def the_second_patch_is_to_the_right() -> Evidence:
    places = torch.arange(14 * 14).reshape(1, 1, 14, 14)
    sequence = places.flatten(2)[0, 0].tolist()
    return {
        "index of [1, 0]": sequence.index(places[0, 0, 1, 0].item()),
        "index of [0, 1]": sequence.index(places[0, 0, 0, 1].item()),
    }


@erratum(
    "001",
    "Patch Embedding, the loop from scratch and its check",
    "wrong",
    says="The loop's out[0] is close to embeddings[0].",
    holds="The first is (768, 14, 14), the second was flattened and transposed to (196, 768): they "
    "cannot be compared before the first is, too.",
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
    says="Its lines run one after the other.",
    holds="Some read a name that no line has set: N is batch_size, self.position_embeddings is that of "
    "model.vit.embeddings, sequence_output is hidden_states, and image the reader's own.",
)
def names_never_set() -> Evidence:
    set_before = {"batch_size": 1, "F": 768, "norm": abs, "hidden_states": 0, "embeddings": 0}
    written = ("(N, F)", "embeddings + self.position_embeddings", "norm(sequence_output)", "image[0]")
    right = ("(batch_size, F)", "norm(hidden_states)")
    return {f"`{line}`": outcome(partial(eval, line, dict(set_before))) for line in (*written, *right)}


@erratum(
    "001",
    "the end of Embeddings, where all of it is put together",
    "wrong",
    says="cls_token is taken from the model, then cls_tokens is put before the patches.",
    holds="cls_tokens (with an s) is still the random one from above. The model's must be expanded anew.",
)
def a_random_class_token() -> Evidence:
    cls_tokens = normal(1, 1, 12)  # made by chance further up
    cls_token = tiny().prefix[None]  # the model's
    patches = normal(1, 4, 12)
    as_written, right = (torch.cat((first, patches), dim=1) for first in (cls_tokens, cls_token))
    return {"class token, from the model's": apart(as_written, right)}


@erratum(
    "001",
    "Patch Embedding, the class token",
    "wrong",
    says="The class token is appended.",
    holds="It is prepended, as the article's own cat has it (and 000 says): index 0 is the class, 1 the "
    "first patch.",
)
def prepended_not_appended() -> Evidence:
    token, patches = torch.ones(1, 1, 4), torch.zeros(1, 196, 4)
    written = torch.cat((token, patches), dim=1)
    appended = torch.cat((patches, token), dim=1)
    return {
        "its place by the code": int(written[0, :, 0].argmax()),
        "its place if appended": int(appended[0, :, 0].argmax()),
    }


@erratum(
    "001",
    "Positional Embedding, its shape",
    "wrong",
    says="The position tensor is [batch_size, 197, 768], the shape of the embeddings.",
    holds="It has nothing of the batch: one table (197, 768) is added to every picture.",
)
def positions_have_no_batch() -> Evidence:
    with torch.device("meta"):
        model: Any = create("B/16", depth=1)
        embedded = torch.zeros(8, 197, 768) + model.position.table
    return {"table": tuple(model.position.table.shape), "embeddings of 8": tuple(embedded.shape)}


@erratum(
    "001",
    "Dropout, after the embeddings and after attention",
    "left open",
    says="Dropout sets some values to zero against overfitting; on attention it drops whole tokens.",
    holds="The model it prints has p = 0.0, which does nothing. And dropout on attention weights drops "
    "pairs: a token lost to one query is there for the next.",
)
def dropout_of_pairs() -> Evidence:
    weights = torch.full((1, 12, 64, 64), 1 / 64)
    dropped = F.dropout(weights, 0.5, training=True) == 0
    return {
        "zeros with p = 0.0": int((F.dropout(weights, 0.0, training=True) == 0).sum()),
        "dropped with p = 0.5, share": round(dropped.double().mean().item(), 1),
        "tokens dropped for every query of a head": int(dropped.all(dim=-2).sum()),
    }


@erratum(
    "001",
    "Self-Attention, the row of the third head",
    "left open",
    says="The first patch looks most at the second, with 0.26.",
    holds="The number is cut off, not rounded: the second patch has 0.27 in the printed row. 0.26 is "
    "what the class token has, hardly less.",
)
def whose_weight_is_026() -> Evidence:
    row = {"class": 2.6356e-01, "first patch": 1.2783e-03, "second patch": 2.6888e-01}
    return {f"{token}, rounded": round(weight, 2) for token, weight in row.items()}


@erratum(
    "001",
    "Self-Attention, where LayerNorm is shown by hand",
    "wrong",
    says="embeddings[0][0] is the first patch, and its first_patch_std a standard deviation.",
    holds="The class token is at 0 by then, the first patch at 1. What is called std is the variance; "
    "its root is taken in the next line.",
)
def layer_norm_of_the_class_token() -> Evidence:
    model = tiny()
    image = normal(1, 2, 8, 8)
    embeddings = embedded(model, image)
    first_patch = model.tokens(image)[0][0] + model.position.table[1]
    centred = first_patch - first_patch.mean()
    return {
        "embeddings[0][0] from the first patch": apart(embeddings[0][0], first_patch),
        "embeddings[0][1] from the first patch": apart(embeddings[0][1], first_patch),
        "first_patch_std": centred.pow(2).mean().item(),
        "standard deviation": centred.pow(2).mean().sqrt().item(),
    }


@erratum(
    "001",
    "Intermediate, the first residual connection",
    "wrong",
    says="attention_output is added to hidden_states, which a remark calls the embeddings.",
    holds="hidden_states had been overwritten by LayerNorm. z' = MSA(LN(z)) + z adds the z from before it.",
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
        "as written, from the block": apart(rest(attention_output + hidden_states), block(z)),
        "with the embeddings": apart(rest(attention_output + z), block(z)),
    }


@erratum(
    "001",
    "Intermediate, on the order",
    "left open",
    says="A norm and a residual connection come before the MLP; the norm is for what attention gave.",
    holds="First the sum, then the norm of the sum, as the article's code has it. The other order is "
    "another model, near the one that 004 calls post-layernorm.",
)
def sum_first_then_norm() -> Evidence:
    model = tiny()
    block, z = model.blocks[0], normal(1, 5, 12)
    attended = block.attention(block.norm1(z))
    return {
        "LN(attended + z) from LN(attended) + z": apart(block.norm2(attended + z), block.norm2(attended) + z)
    }


@erratum(
    "001",
    "Intermediate, how a residual connection is written",
    "left open",
    says="nn.Sequential is given a list, and nn.Linear nothing.",
    holds="A sketch, which does not run: Sequential takes the layers themselves, and Linear its two widths.",
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
    says="If the transformations approach the identity, adding them changes nothing.",
    holds="They must approach zero for that. The identity added to the input doubles it.",
)
def identity_doubles() -> Evidence:
    x = normal(12)

    def grown(transform: Callable[[Tensor], Tensor]) -> float:
        return ((x + transform(x)).norm() / x.norm()).item()

    return {
        "output over input, identity": grown(lambda x: x),
        "output over input, zero": grown(torch.zeros_like),
    }


@erratum(
    "001",
    "Intermediate, on GELU",
    "wrong",
    says="GELU is the distribution function Phi of the normal distribution.",
    holds="It is x Phi(x).",
)
def gelu_is_x_times_phi() -> Evidence:
    x = torch.tensor([-3.0, 3.0], dtype=torch.float64)
    phi = torch.distributions.Normal(0, 1).cdf(x)
    named = {"GELU": F.gelu(x), "Phi(x)": phi, "x Phi(x)": x * phi}
    return {f"{name} at -3 and 3": tuple(value.tolist()) for name, value in named.items()}


@erratum(
    "001",
    "Intermediate, the formula with tanh",
    "left open",
    says="GELU is normally computed by an approximation.",
    holds="The exact one, by erf, is what `gelu` means in PyTorch. The two differ, so weights should be "
    "run with the one they were trained with.",
)
def two_gelus() -> Evidence:
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    exact = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return {
        "PyTorch's from exact": apart(F.gelu(x), exact),
        "tanh from exact": apart(F.gelu(x, approximate="tanh"), exact),
    }
