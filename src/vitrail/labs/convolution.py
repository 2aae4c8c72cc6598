"""Lab `convolution`: gradient descent on attention by position alone finds the neighbourhood.

After Jelassi, Sander and Li 2022, whom note 004 cites: what is to be learned is a convolution, the layer
is softmax(p_ij) and a value matrix, and p begins with zeros: every patch looks at all alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.inspect.canvas import LINES, canvas, in_our_style, show_map
from vitrail.labs.interval import interval
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.model import ViT
from vitrail.model.attention import Attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "convolution"
NOTE = '004 "Self-Attention can learn convolution"'
CLAIM = (
    "If what is to be learned is a convolution, gradient descent on a self-attention layer finds its "
    "structure: patches come to look at their neighbours."
)
TAKES = ""

WIDTH, HEADS = 4, 4
RATE, MOMENTUM, BATCH = 0.1, 0.9, 32
# Of three rows and columns; `mean` has the neighbours that there are at a border count alike.
EDGE = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
FOUND, FITTED, FAILED = 0.9, 0.1, 0.3


@dataclass(frozen=True, eq=False)
class Learned:
    """What came out of one descent."""

    before: float
    """The share of the attention that lies on true neighbours, at first."""
    after: float
    loss: float
    """What is left of the error, 1 for an answer of zeros."""
    weights: Tensor
    """(k, N, N) who looks at whom at the end."""


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    side, steps, seeds = (6, 300, 5) if size == "full" else (4, 150, 2)
    mean = [descend(side, "mean", 1, steps, seed) for seed in range(seeds)]
    edge = [descend(side, "edge", 1, steps, seed) for seed in range(seeds // 2)]
    several = [descend(side, "edge", HEADS, 3 * steps, seed) for seed in range(seeds // 2)]
    after = [one.after for one in mean]
    losses = {
        "mean, one head": fmean(one.loss for one in mean),
        "edge, one head": fmean(one.loss for one in edge),
        "edge, several heads": fmean(one.loss for one in several),
    }
    before, share = mean[0].before, fmean(after)
    sentence = (
        f"On a grid of {side} x {side} patches and a kernel of 3 x 3, neighbours have {before:.1%} of the "
        f"attention at first and {share:.1%} after {steps} steps, where the kernel is a mean "
        f"(error {losses['mean, one head']:.4f}). Of an edge kernel, with weights of both signs, one head "
        f"leaves an error of {losses['edge, one head']:.2f}: its weights cannot be negative. {HEADS} heads "
        f"leave {losses['edge, several heads']:.3f} after three times as many steps."
    )
    return Result(
        number=share,
        unit=f"of the attention on true neighbours after descent ({before:.3f} before)",
        n=seeds,
        verdict=judge(before, share, losses),
        sentence=sentence,
        figure=draw(mean[0], several[0], side),
        interval=interval(after),
        numbers={"before": before, "after": after, "errors": losses},
    )


def judge(before: float, after: float, losses: dict[str, float]) -> Verdict:
    if after < FOUND or after <= before or losses["mean, one head"] > FITTED:
        return Verdict(
            "does not hold", f": {after:.0%} of the attention is on neighbours, {before:.0%} at first"
        )
    if losses["edge, one head"] > FAILED and losses["edge, several heads"] < FITTED:
        return Verdict("holds if", "the kernel's weights are of one sign, or there are several heads")
    return Verdict("holds")


def descend(side: int, kernel: str, heads: int, steps: int, seed: int) -> Learned:
    """Gradient descent on the layer's error, on fresh random patches at every step."""
    torch.manual_seed(seed)
    layer = position_only(side, heads)
    assert layer.bias is not None
    near = neighbours(side)
    mixing = near / near.sum(dim=1, keepdim=True) if kernel == "mean" else edges(side)
    values, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH))
    before = on_neighbours(layer, near)
    # A softmax over N patches passes on about 1/N of a gradient: p gets a rate that makes up for it.
    positions = {"params": list(layer.bias.parameters()), "lr": RATE * 10 * side**2}
    others = [p for name, p in layer.named_parameters() if not name.startswith("bias.")]
    groups: list[dict[str, Any]] = [positions, {"params": others}]
    descent = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM)
    loss = torch.tensor(1.0)
    for _ in range(steps):
        patches = torch.randn(BATCH, side**2, WIDTH)
        wanted = mixing @ patches @ values
        loss = (layer(patches) - wanted).square().mean() / wanted.square().mean()
        descent.zero_grad()
        loss.backward()
        descent.step()
    weights = layer.bias().softmax(dim=-1).detach()
    return Learned(before, on_neighbours(layer, near), loss.item(), weights)


def position_only(side: int, heads: int) -> Attention:
    """The layer as the slide has it: softmax(p_ij), whatever the patches hold."""
    config = ViTConfig(
        width=WIDTH,
        depth=1,
        heads=heads,
        head_width=WIDTH,
        patch=1,
        size=side,
        channels=1,
        classes=0,
        class_token=False,
        pool="mean",
        position="pairwise",
        scale=0.0,
        qkv_bias="none",
    )
    layer = ViT(config).blocks[0].attention
    assert isinstance(layer, Attention)
    return layer


def on_neighbours(layer: Attention, near: Tensor) -> float:
    assert layer.bias is not None
    return (layer.bias().softmax(dim=-1) * near).sum(dim=-1).mean().item()


def neighbours(side: int) -> Tensor:
    """(N, N): 1 where two patches are at most one row and one column apart."""
    return (apart(side).abs().amax(dim=-1) <= 1).float()


def edges(side: int) -> Tensor:
    """(N, N): the weight with which each patch enters each answer of the edge kernel."""
    between = apart(side)
    inside = between.abs().amax(dim=-1) <= 1
    row, column = (between.clamp(-1, 1) + 1).unbind(dim=-1)
    return torch.where(inside, EDGE[row, column], 0.0)


def apart(side: int) -> Tensor:
    """(N, N, 2): rows and columns from each patch to each other."""
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return place[None] - place[:, None]


@in_our_style
def draw(mean: Learned, several: Learned, side: int) -> Figure:
    """Where one patch in the middle looks, at first and at the end."""
    figure = canvas(7.2, 2.3)
    axes = figure.subplots(1, 4)
    middle = side // 2 * side + side // 2
    uniform = torch.full((side, side), 1 / side**2)
    maps = {
        "at first": uniform,
        "mean, one head": mean.weights[0, middle].view(side, side),
        "edge, head 1": several.weights[0, middle].view(side, side),
        "edge, head 2": several.weights[1, middle].view(side, side),
    }
    for axis, (title, values) in zip(axes, maps.items(), strict=True):
        show_map(axis, values.double().numpy(), most=0.5 if "edge" in title else 0.12, title=title)
        axis.plot(side // 2, side // 2, "o", markersize=5, markerfacecolor="none", color=LINES[1])
    return figure
