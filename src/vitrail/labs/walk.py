"""Lab `walk`: article 001's forward pass, done by hand on one picture, beside the model's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.build import create
from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.lab import Result, Size, Verdict, pictures
from vitrail.model import ViT, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "walk"
NOTE = '001, from "Patch Embedding" to the classifier'
CLAIM = (
    "The article's steps, one after the other with the model's own matrices, give what the model gives: "
    "after the embedding (197, 768), after every layer, and in the logits."
)
TAKES = "pictures"

EXACT, OTHER = 1e-9, 1e-2


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    model = shaken("B/16" if size == "full" else "mu/4")
    H, W = model.config.pixels
    picture = F.interpolate(pictures(data, 1), (H, W), mode="bilinear").repeat_interleave(3, dim=1)[:, :3]
    layers = [f"blocks.{n}.out" for n in range(model.config.depth)]
    with torch.no_grad(), record(model, "embed", *layers, "logits") as tape:
        model(picture)
    model_gives = [tape[name] for name in ("embed", *layers, "logits")]
    with torch.no_grad():
        right = by_hand(model, picture, add_normed=False)
        written = by_hand(model, picture, add_normed=True)
    shapes = [tuple(tensor.shape[1:]) for tensor in right]
    agree = shapes == [tuple(tensor.shape[1:]) for tensor in model_gives]
    corrected, slipped = differences(right, model_gives), differences(written, model_gives)
    verdict = judge(agree, max(corrected), slipped[1])
    sentence = (
        f"Corrected, every stage is the model's to {max(corrected):.1e} (random weights). As printed, the "
        f"first residual adds what LayerNorm has already changed, and the first layer's output is off by "
        f"{slipped[1]:.0%}; with the same in every layer, the logits by {slipped[-1]:.0%}. Three more slips "
        "change no number: the position table has no batch axis, embeddings[0][0] is the class token and not "
        "the first patch, and what is called std is the variance."
    )
    numbers = {
        "shapes": {"embedding": shapes[0], "layer": shapes[1], "logits": shapes[-1]},
        "corrected": corrected,
        "as printed": slipped,
    }
    unit = "of the largest value, the difference after the first layer as printed"
    return Result(slipped[1], unit, 1, verdict, sentence, draw(corrected, slipped), numbers=numbers)


def judge(shapes: bool, corrected: float, as_printed: float) -> Verdict:
    if not shapes or corrected > EXACT:
        return Verdict("does not hold", f": even corrected, the walk is off by {corrected:.1e}")
    if as_printed > OTHER:
        return Verdict("holds if", "the first residual adds the embeddings, not the normed ones")
    return Verdict("holds")


def shaken(name: str) -> ViT:
    """A model with every parameter away from its first value: biases and head begin with zeros."""
    model = create(name, classes=10, eps=1e-12).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return model


def by_hand(model: ViT, picture: Tensor, *, add_normed: bool) -> list[Tensor]:
    """The embedding, every layer's output and the logits, from nothing but matrices.

    Args:
        add_normed: whether the first residual adds the normed tokens, as the article's code does, or the
            embeddings, as its comment says.
    """
    w = dict(model.named_parameters())
    c = model.config
    patches = F.conv2d(picture, w["tokens.proj.weight"], w["tokens.proj.bias"], stride=c.patch_pixels)
    patches = patches.flatten(2).transpose(1, 2)  # (1, N, D)
    z = torch.cat([w["prefix"][None], patches], dim=1) + w["position.table"]
    stages = [z]
    for n in range(c.depth):
        block = {
            name.removeprefix(f"blocks.{n}."): p for name, p in w.items() if name.startswith(f"blocks.{n}.")
        }
        normed = layer_norm(z, block["norm1.weight"], block["norm1.bias"])
        z = attention(normed, block, c.heads) + (normed if add_normed else z)
        hidden = layer_norm(z, block["norm2.weight"], block["norm2.bias"]) @ block["mlp.fc1.weight"].T
        hidden = gelu(hidden + block["mlp.fc1.bias"])  # (1, T, F)
        z = hidden @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"] + z
        stages.append(z)
    pooled = layer_norm(z, w["norm.weight"], w["norm.bias"])[:, 0]
    return [*stages, pooled @ w["head.weight"].T + w["head.bias"]]


def attention(z: Tensor, block: Mapping[str, Tensor], heads: int) -> Tensor:
    """Each head from its own columns of the matrices, then all of them joined and projected."""
    matrices, biases = block["attention.qkv.weight"].chunk(3), block["attention.qkv.bias"].chunk(3)
    d = len(matrices[0]) // heads
    joined = []
    for head in range(heads):
        mine = slice(d * head, d * (head + 1))
        q, k, v = (z @ W[mine].T + b[mine] for W, b in zip(matrices, biases, strict=True))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(d)).softmax(dim=-1)  # (1, T, T)
        joined.append(weights @ v)
    return torch.cat(joined, dim=-1) @ block["attention.out.weight"].T + block["attention.out.bias"]


def layer_norm(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = z - z.mean(dim=-1, keepdim=True)
    variance = centred.pow(2).mean(dim=-1, keepdim=True)
    return weight * centred / torch.sqrt(variance + 1e-12) + bias


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def differences(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """Stage by stage, the largest difference as a share of the largest value."""
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)]


@in_our_style
def draw(corrected: list[float], slipped: list[float]) -> Figure:
    figure = canvas(6.4, 3.0)
    axis = figure.subplots()
    places = range(len(corrected))
    for values, label, colour in (
        (slipped, "every layer as printed", LINES[1]),
        (corrected, "corrected", LINES[0]),
    ):
        axis.plot(
            places, [max(value, 1e-17) for value in values], "o-", label=label, color=colour, markersize=4
        )
    names = ["embed", *(str(n) for n in range(1, len(corrected) - 1)), "logits"]
    axis.set(yscale="log", xticks=places, xlabel="stage: layers are numbered")
    axis.set_xticklabels(names)
    axis.set_ylabel("largest difference\nfrom the model")
    axis.legend()
    return figure
