"""Errata of note 001 that concern the transformers library, and the order and reasons of its text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.course.errata.erratum import Evidence, erratum, max_difference, normal, outcome, tiny
from vitrail.model.attention import Attention
from vitrail.weights.families.hf import VIT_NAMES

# Measured with transformers 5, which Vitrail does not need; a test measures it with the installed version.
HEAD_MASK_DIFFERENCE = 0.0


@erratum(
    "001",
    "all code from Self-Attention on, with transformers 5",
    "wrong",
    claim="The parts are model.vit.encoder.layer[0] with attention.attention.query, "
    "attention.output.dense, intermediate.dense and output.dense; a layer is called with a head mask "
    "and returns a tuple.",
    correction="transformers 5 renamed them: model.vit.layers[0] with attention.q_proj, "
    "attention.o_proj, mlp.fc1 and mlp.fc2. A layer takes the hidden states and an attention mask and "
    "returns the tensor itself, so [0] would take the first image; head_mask is accepted by the model "
    "and ignored. Files on the hub keep the old names.",
)
def renamed_in_transformers_5() -> Evidence:
    renamed = {old.strip("."): new.strip(".") for new, old in VIT_NAMES.items()}
    layer_output = normal(8, 5, 12)  # what a layer returns now, for 8 images
    return {
        **renamed,
        "output[0] of 8 images": tuple(layer_output[0].shape),
        "difference of the logits with all heads masked": HEAD_MASK_DIFFERENCE,
    }


@erratum(
    "001",
    "Patch Embedding, the check of the first two patches",
    "wrong",
    claim="w[0] and b[0] reproduce the first value of two patches.",
    correction="w and b are set only further down, in the loop from scratch. Run in the order of the "
    "article, this cell stops.",
)
def used_before_they_are_set() -> Evidence:
    names: dict[str, object] = {"torch": torch, "image": normal(1, 3, 32, 32)}
    line = "torch.sum(image[0, :, 0:16, 0:16] * w[0]) + b[0]"
    before = outcome(lambda: eval(line, dict(names)))
    return {
        "before": before,
        "after": outcome(lambda: eval(line, {**names, "w": normal(2, 3, 16, 16), "b": [0, 0]})),
    }


@erratum(
    "001",
    "Self-Attention, on its name",
    "wrong",
    claim="The attention matrix is square because all patches attend to each other, hence self-attention.",
    correction="It is called self-attention because queries, keys and values come from the same sequence. "
    "Attention to another sequence of the same length has a square matrix, too, and is cross-attention.",
)
def why_self_attention() -> Evidence:
    attention = Attention(ViTConfig(width=12, depth=1, heads=3, patch=4, size=8)).double().eval()
    one, other = normal(1, 5, 12), normal(1, 5, 12)

    def weights_shape(context: Tensor | None) -> tuple[int, ...]:
        q, k, _ = attention.project(one, context)
        return tuple((q @ k.transpose(-2, -1)).shape[-2:])

    with torch.no_grad():
        difference = max_difference(attention(one), attention(one, other))
    return {
        "scores of self-attention": weights_shape(None),
        "of cross-attention": weights_shape(other),
        "difference of their outputs": difference,
    }


@erratum(
    "001",
    "Intermediate, why GELU",
    "wrong",
    claim="GELU is non-monotonic and non-convex, and thus approximates complicated functions more easily.",
    correction="Neither property is the reason. x^3 - x is non-monotonic and non-convex, and a layer "
    "of it only gives polynomials of degree 3; ReLU is monotonic and convex, and fits any continuous "
    "function. What GELU adds is smoothness.",
)
def shape_is_not_power() -> Evidence:
    x = torch.linspace(-1, 1, 400, dtype=torch.float64)[:, None]
    target = torch.sin(8 * x)
    slope, shift = 4 * normal(1, 200), 3 * normal(200)

    def error(activation: object) -> float:
        hidden = activation(x @ slope + shift)  # type: ignore[operator]
        features = torch.cat([hidden / hidden.std(), torch.ones_like(x)], dim=1)
        best = features @ torch.linalg.lstsq(features, target, driver="gelsd").solution
        return (best - target).pow(2).mean().sqrt().item()

    named = {"ReLU": F.relu, "GELU": F.gelu, "x^3 - x": lambda t: t**3 - t}
    return {f"error of 200 units for sin(8x), {name}": error(f) for name, f in named.items()}


@erratum(
    "001",
    "Pooler",
    "imprecise",
    claim="The pooler takes the class token.",
    correction="transformers' ViTPooler also applies a dense layer and tanh to it, 590,592 "
    "parameters in Base. The classifier of the article has no pooler: it takes the class token "
    "itself, as its code does.",
)
def pooler_is_dense_and_tanh() -> Evidence:
    width = 768
    pooler = nn.Linear(width, width)
    token, dense = tiny().norm(normal(1, 12)), nn.Linear(12, 12).double()
    with torch.no_grad():
        pooled = dense(token).tanh()
    return {
        "parameters of a pooler": sum(p.numel() for p in pooler.parameters()),
        "largest entry of the class token": token.abs().max().item(),
        "after dense and tanh": pooled.abs().max().item(),
    }
