"""Lab `convolution`: gradient descent on a self-attention layer finds the neighborhood of a convolution.

After Jelassi, Sander and Li 2022, cited in note 004: the target is a convolution, the layer is the slide's,
softmax(v_i^T Q K^T v_j + p_ij) with a value matrix. p is initialized to zero. In the first arms Q and K are
zero, as in the slide's intuition, and attention starts uniform; in the others they are trained too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vitrail.experiment.interval import share_interval
from vitrail.experiment.trial import map_in_processes
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.views.canvas import LINES, new_figure, show_map, styled
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import OURS, Verdict, exceeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "convolution"
TITLE = "attention learns a convolution"
NOTE = '004 "Self-Attention can learn convolution"'
CLAIM = (
    "If the ground-truth function is a convolution, then doing gradient descent on a self-attention "
    "layer can recover the convolution structure. [...] Intuitively, the network just learns [...] "
    "softmax(p_i,j)"
)
ACCEPTS = ""

_WIDTH, _BATCH = 4, 32
_SGD_LR, _MOMENTUM, _ADAM_LR = 0.1, 0.9, 0.03
_MIN_ON_NEIGHBORS = 0.9
_MAX_CONTENT = 0.1  # of the norm of Q K^T before training that may remain


@dataclass(frozen=True)
class LayerArm:
    """How a layer is trained."""

    steps: int
    """A multiple of the lab's number of steps."""
    optimizer: Literal["SGD", "Adam"]
    content: bool = False
    """Whether Q and K are trained, too, and not zero."""


CONTENT, POSITIONS, PLAIN, LONG = "Adam, Q and K trained too", "Adam", "SGD", "SGD, ten times the steps"
ARMS = {
    CONTENT: LayerArm(3, "Adam", content=True),
    POSITIONS: LayerArm(1, "Adam"),
    PLAIN: LayerArm(1, "SGD"),
    LONG: LayerArm(10, "SGD"),
}


@dataclass(frozen=True, eq=False)
class TrainedLayer:
    """A trained layer."""

    before: float
    """Fraction of the attention on true neighbors before training."""
    after: float
    error: float
    """Relative squared error of the last step, 1 for an output of zeros."""
    content: float
    """Norm of Q K^T as a fraction of that before training; 0 if both are zero."""
    weights: Tensor
    """(k, N, N) mean attention weights after training."""


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    side, steps, seeds = (6, 300, 5) if size == "full" else (4, 40, 2)
    tasks = [(arm, side, steps, seed) for arm in ARMS for seed in range(seeds)]
    trained = dict(zip(tasks, map_in_processes(train_layer, tasks, process_count(size)), strict=True))
    layers = {arm: [trained[arm, side, steps, seed] for seed in range(seeds)] for arm in ARMS}
    numbers: dict[str, Any] = {
        "on neighbors": {arm: [one.after for one in runs] for arm, runs in layers.items()},
        "before": {arm: fmean(one.before for one in runs) for arm, runs in layers.items()},
        "error": {arm: [one.error for one in runs] for arm, runs in layers.items()},
        "Q K^T after over before": [one.content for one in layers[CONTENT]],
        "steps": {arm: steps * one.steps for arm, one in ARMS.items()},
    }
    after = numbers["on neighbors"][CONTENT]
    return LabResult(
        number=fmean(after),
        unit="of the attention is on true neighbors after training Q, K, V and p "
        f"({numbers['before'][CONTENT]:.3f} before, by random Q and K)",
        n=seeds,
        setting=f"{side} x {side} random patches of width {_WIDTH}, a 3 x 3 kernel; before training "
        "attention is "
        "uniform, or random where Q and K are trained.",
        figure=draw({arm: runs[0] for arm, runs in layers.items()}, side),
        interval=share_interval(after),
        numbers=numbers,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """All of the layer must be trained at one learning rate; then, by plain SGD."""
    steps = numbers["steps"]
    attend = {
        CONTENT: "by Adam with Q and K trained, too, patches come to attend to their neighbors",
        POSITIONS: "by Adam with only p and V",
        PLAIN: "by SGD with one learning rate for all",
        LONG: "by SGD with one learning rate and ten times the steps",
    }
    content = numbers["Q K^T after over before"]
    return Verdict(
        [
            *(
                exceeds(
                    f"{text} (fraction of the attention, {steps[arm]:,} steps)",
                    numbers["on neighbors"][arm],
                    _MIN_ON_NEIGHBORS,
                    OURS,
                    form=".3f",
                )
                for arm, text in attend.items()
            ),
            exceeds(
                "content no longer matters: the norm of Q K^T over that before",
                content,
                _MAX_CONTENT,
                OURS,
                below=True,
            ),
        ]
    )


# ---- training -------------------------------------------------------------------------------


def train_layer(task: tuple[str, int, int, int]) -> TrainedLayer:
    """Train the layer of an arm on new random patches at every step.

    Args:
        task: the arm, the side of the grid, the number of steps and the seed.
    """
    name, side, steps, seed = task
    arm = ARMS[name]
    torch.manual_seed(seed)
    layer = _build_layer(side, arm)
    assert layer.bias is not None
    neighbors = neighbor_matrix(side)
    mixing = neighbors / neighbors.sum(dim=1, keepdim=True)
    values, _ = torch.linalg.qr(torch.randn(_WIDTH, _WIDTH))
    held_out = torch.randn(_BATCH, side**2, _WIDTH)
    before, content = _attention_weights(layer, held_out), _content_norm(layer)
    optimizer = (
        torch.optim.Adam(layer.parameters(), lr=_ADAM_LR)
        if arm.optimizer == "Adam"
        else torch.optim.SGD(layer.parameters(), lr=_SGD_LR, momentum=_MOMENTUM)
    )
    loss = torch.tensor(1.0)
    for _ in range(steps * arm.steps):
        patches = torch.randn(_BATCH, side**2, _WIDTH)
        target = mixing @ patches @ values
        loss = (layer(patches) - target).square().mean() / target.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = _attention_weights(layer, held_out)
    return TrainedLayer(
        _on_mask(before, neighbors),
        _on_mask(after, neighbors),
        loss.item(),
        _content_norm(layer) / content if arm.content else 0.0,
        after,
    )


def _build_layer(side: int, arm: LayerArm) -> Attention:
    """The layer of the slide; without content it is softmax(p_ij), independent of the patches."""
    config = ViTConfig(
        width=_WIDTH,
        depth=1,
        heads=1,
        head_width=_WIDTH,
        patch=1,
        size=side,
        channels=1,
        classes=0,
        class_token=False,
        pool="mean",
        position="pairwise",
        scale="none" if arm.content else 0.0,
        qkv_bias="none",
    )
    layer = ViT(config).blocks[0].attention
    assert isinstance(layer, Attention)
    return layer


@torch.no_grad()
def _attention_weights(layer: Attention, patches: Tensor) -> Tensor:
    """(k, N, N): the attention weights, a mean over the patches of a batch."""
    assert layer.bias is not None
    q, k, _ = layer.project(patches, None)
    return (layer.scale * q @ k.transpose(-2, -1) + layer.bias()).softmax(dim=-1).mean(dim=0)


@torch.no_grad()
def _content_norm(layer: Attention) -> float:
    """The norm of Q K^T, for one head."""
    q, k, _ = layer.qkv.weight.chunk(3)  # (d, D) each
    return (q.T @ k).norm().item()


def _on_mask(weights: Tensor, mask: Tensor) -> float:
    return (weights * mask).sum(dim=-1).mean().item()


def neighbor_matrix(side: int) -> Tensor:
    """(N, N): 1 if two patches are at most one row and one column apart."""
    coordinates = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    offsets = coordinates[None] - coordinates[:, None]  # (N, N, 2)
    return (offsets.abs().amax(dim=-1) <= 1).float()


@styled
def draw(layers: Mapping[str, TrainedLayer], side: int) -> Figure:
    """Attention of the middle patch after training."""
    figure = new_figure(6.6, 1.9)
    axes = figure.subplots(1, len(layers))
    middle = side // 2 * side + side // 2
    for axis, (arm, layer) in zip(axes, layers.items(), strict=True):
        weights = layer.weights[0, middle].view(side, side)
        show_map(axis, weights.double().numpy(), vmax=0.12, title="")
        axis.set_title(arm.replace(", ", ",\n"), fontsize=8)
        axis.plot(side // 2, side // 2, "o", markersize=5, markerfacecolor="none", color=LINES[1])
    return figure
