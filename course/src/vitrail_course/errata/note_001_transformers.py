"""Errata of note 001 that concern the transformers library, and the order and reasons of its text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.telemetry import disable_telemetry
from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.weights.families.hf import VIT_NAMES
from vitrail_course.errata.erratum import Evidence, erratum, max_difference, normal, outcome, tiny


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
    """Measured with the installed library, on a model of two layers with random weights."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return {"transformers": "not installed, so nothing is measured here"}
    model, images = _tiny_transformers_model(), normal(8, 3, 16, 16)
    old, new = ([name.strip(".") for name in side] for side in (VIT_NAMES.values(), VIT_NAMES))
    layer, z = model.vit.layers[0], model.vit.embeddings(images)
    logits = model(images).logits
    masked = model(images, head_mask=torch.zeros(2, 2)).logits
    for one in model.vit.layers:  # what a mask of zeros should do
        one.attention.o_proj.register_forward_pre_hook(lambda _, inputs: (torch.zeros_like(inputs[0]),))
    return {
        "transformers": version,
        **_compare_names(model, "model", ["vit.encoder.layer"], ["vit.layers"]),
        **_compare_names(layer, "layer", old, new),
        "a layer called as in the article": outcome(lambda: layer(z, None, False)),
        "shape of layer(z)[0] for 8 images of 5 tokens": tuple(layer(z)[0].shape),
        "difference of the logits with head_mask = 0 for all heads": max_difference(masked, logits),
        "with all heads set to 0 by a hook": max_difference(model(images).logits, logits),
    }


def _compare_names(module: nn.Module, what: str, old: list[str], new: list[str]) -> Evidence:
    """Which names of the article a module does not have, and which names of today it has."""
    return {
        f"names that a {what} does not have": ", ".join(name for name in old if not _has(module, name)),
        f"names that a {what} has": ", ".join(name for name in new if _has(module, name)),
    }


def _tiny_transformers_model() -> Any:
    disable_telemetry()
    with _without_broken_torchvision():
        from transformers import ViTConfig as TheirConfig
        from transformers import ViTForImageClassification

    config = TheirConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=8, initializer_range=0.5,
    )  # fmt: skip
    return ViTForImageClassification(config).double().eval().requires_grad_(False)


@contextmanager
def _without_broken_torchvision() -> Iterator[None]:
    """Hide a torchvision that does not fit this torch: transformers would fail to import its ViT."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        yield
    except RuntimeError:  # its compiled operators are missing
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            yield
        finally:
            del sys.modules["torchvision"]
    else:
        yield


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


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
