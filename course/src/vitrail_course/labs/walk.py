"""Lab `walk`: the forward pass of note 001, computed step by step and compared with the model's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model import ViT, record
from vitrail.model.presets import create
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize, load_images
from vitrail_course.labs.verdict import Verdict, identity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "walk"
TITLE = "the article's code, checked"
NOTE = '001, from "Patch Embedding" to the classifier'
CLAIM = (
    "If we want to reproduce the layer entirely from scratch, this is the code [and so for every stage "
    "up to the logits]"
)
ACCEPTS = "images"

_TOLERANCE = 1e-9


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    model = _randomized_model("B/16" if size == "full" else "mu/4")
    H, W = model.config.pixels
    image = F.interpolate(load_images(data, 1), (H, W), mode="bilinear").repeat_interleave(3, dim=1)[:, :3]
    layers = [f"blocks.{n}.out" for n in range(model.config.depth)]
    with torch.no_grad(), record(model, "embed", *layers, "logits") as tape:
        model(image)
    model_stages = [tape[name] for name in ("embed", *layers, "logits")]
    with torch.no_grad():
        corrected_stages = _forward_by_hand(model, image, add_normalized=False)
        printed_stages = _forward_by_hand(model, image, add_normalized=True)
    shapes = [tuple(tensor.shape[1:]) for tensor in corrected_stages]
    same_shapes = shapes == [tuple(tensor.shape[1:]) for tensor in model_stages]
    corrected, as_printed = (
        _relative_differences(corrected_stages, model_stages),
        _relative_differences(printed_stages, model_stages),
    )
    numbers = {
        "same shapes": same_shapes,
        "shapes": {"embedding": shapes[0], "layer": shapes[1], "logits": shapes[-1]},
        "corrected": corrected,
        "as printed": as_printed,
    }
    unit = "relative error after the first layer, as printed"
    setting = f"A model of {len(layers)} layers with random weights, in float64, beside the article's steps."
    return LabResult(as_printed[1], unit, 1, setting, draw(corrected, as_printed), numbers=numbers)


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """With the correction every stage must equal the model's; as printed, it may not."""
    corrected, as_printed = max(numbers["corrected"]), numbers["as printed"][1]
    condition, evidence = "", f"relative difference {corrected:.1e}"
    if as_printed > _TOLERANCE:
        condition = "the first residual adds the embeddings, not the normalized ones"
        evidence += f"; as printed, {as_printed:.2f} after the first layer"
    same = numbers["same shapes"] and corrected <= _TOLERANCE
    text = "the article's steps give the model's outputs"
    return Verdict([identity(text, same, evidence, f"{_TOLERANCE:g}", condition=condition)])


def _randomized_model(name: str) -> ViT:
    """A model with noise added to every parameter, because biases and head are initialized to zero."""
    model = create(name, classes=10, eps=1e-12).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return model


def _forward_by_hand(model: ViT, image: Tensor, *, add_normalized: bool) -> list[Tensor]:
    """The embeddings, every layer's output and the logits, computed with plain matrix products.

    Args:
        add_normalized: whether the first residual adds the normalized tokens, as in the article's code, or
            the embeddings, as in its comment.
    """
    w = dict(model.named_parameters())
    c = model.config
    patches = F.conv2d(image, w["tokens.proj.weight"], w["tokens.proj.bias"], stride=c.patch_pixels)
    patches = patches.flatten(2).transpose(1, 2)  # (1, N, D)
    z = torch.cat([w["prefix"][None], patches], dim=1) + w["position.table"]
    stages = [z]
    for n in range(c.depth):
        block = {
            name.removeprefix(f"blocks.{n}."): p for name, p in w.items() if name.startswith(f"blocks.{n}.")
        }
        normalized = _layer_norm(z, block["norm1.weight"], block["norm1.bias"])
        z = _attention(normalized, block, c.heads) + (normalized if add_normalized else z)
        hidden = _layer_norm(z, block["norm2.weight"], block["norm2.bias"]) @ block["mlp.fc1.weight"].T
        hidden = _gelu(hidden + block["mlp.fc1.bias"])  # (1, T, F)
        z = hidden @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"] + z
        stages.append(z)
    pooled = _layer_norm(z, w["norm.weight"], w["norm.bias"])[:, 0]
    return [*stages, pooled @ w["head.weight"].T + w["head.bias"]]


def _attention(z: Tensor, block: Mapping[str, Tensor], heads: int) -> Tensor:
    """Each head from its own rows of the weights, then all heads concatenated and projected."""
    matrices, biases = block["attention.qkv.weight"].chunk(3), block["attention.qkv.bias"].chunk(3)
    d = len(matrices[0]) // heads
    outputs = []
    for head in range(heads):
        columns = slice(d * head, d * (head + 1))
        q, k, v = (z @ W[columns].T + b[columns] for W, b in zip(matrices, biases, strict=True))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(d)).softmax(dim=-1)  # (1, T, T)
        outputs.append(weights @ v)
    return torch.cat(outputs, dim=-1) @ block["attention.out.weight"].T + block["attention.out.bias"]


def _layer_norm(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = z - z.mean(dim=-1, keepdim=True)
    variance = centered.pow(2).mean(dim=-1, keepdim=True)
    return weight * centered / torch.sqrt(variance + 1e-12) + bias


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _relative_differences(stages: list[Tensor], expected: list[Tensor]) -> list[float]:
    """For each stage, the largest difference as a fraction of the largest value."""
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(stages, expected, strict=True)]


@styled
def draw(corrected: list[float], as_printed: list[float]) -> Figure:
    figure = new_figure(6.4, 3.0)
    axis = figure.subplots()
    stage_numbers = range(len(corrected))
    for values, label, color in (
        (as_printed, "every layer as printed", LINES[1]),
        (corrected, "corrected", LINES[0]),
    ):
        axis.plot(
            stage_numbers,
            [max(value, 1e-17) for value in values],
            "o-",
            label=label,
            color=color,
            markersize=4,
        )
    names = ["embed", *(str(n) for n in range(1, len(corrected) - 1)), "logits"]
    axis.set(yscale="log", xticks=stage_numbers, xlabel="stage (layers are numbered)")
    axis.set_xticklabels(names)
    axis.set_ylabel("maximum relative\ndifference")
    axis.legend()
    return figure
