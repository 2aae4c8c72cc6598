"""Lab `convolution`: gradient descent on position-only attention finds the neighborhood of a convolution.

After Jelassi, Sander and Li 2022, cited in note 004: the target is a convolution, the layer is softmax(p_ij)
with a value matrix, and p is initialized to zero, so that attention starts uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.course.labs.lab import LabResult, LabSize, Verdict
from vitrail.experiment.interval import confidence_interval
from vitrail.inspect.canvas import LINES, new_figure, show_map, styled
from vitrail.model import ViT
from vitrail.model.attention import Attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "convolution"
TITLE = "attention learns a convolution"
NOTE = '004 "Self-Attention can learn convolution"'
CLAIM = (
    "If the target is a convolution, gradient descent on a self-attention layer finds its structure: patches "
    "come to attend to their neighbors."
)
ACCEPTS = ""

_WIDTH, _HEADS = 4, 4
_LR, _MOMENTUM, _BATCH = 0.1, 0.9, 32
# The 3 x 3 edge kernel. The mean kernel averages the neighbors that exist, fewer at the border.
EDGE = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
_MIN_ON_NEIGHBORS, _MAX_FITTED_ERROR, _MIN_FAILED_ERROR = 0.9, 0.1, 0.3


@dataclass(frozen=True, eq=False)
class _TrainedLayer:
    """A trained layer."""

    before: float
    """Fraction of the attention on true neighbors before training."""
    after: float
    loss: float
    """Relative squared error, 1 for an output of zeros."""
    weights: Tensor
    """(k, N, N) attention weights after training."""


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    side, steps, seeds = (6, 300, 5) if size == "full" else (4, 150, 2)
    mean_kernel = [_train_layer(side, "mean", 1, steps, seed) for seed in range(seeds)]
    edge_kernel = [_train_layer(side, "edge", 1, steps, seed) for seed in range(seeds // 2)]
    several_heads = [_train_layer(side, "edge", _HEADS, 3 * steps, seed) for seed in range(seeds // 2)]
    after = [trained.after for trained in mean_kernel]
    losses = {
        "mean, one head": fmean(trained.loss for trained in mean_kernel),
        "edge, one head": fmean(trained.loss for trained in edge_kernel),
        "edge, several heads": fmean(trained.loss for trained in several_heads),
    }
    before, mean_after = mean_kernel[0].before, fmean(after)
    sentence = (
        f"On a grid of {side} x {side} patches with a 3 x 3 kernel, neighbors get {before:.1%} of the "
        f"attention before training and {mean_after:.1%} after {steps} steps if the kernel is a mean (error "
        f"{losses['mean, one head']:.4f}). With an edge kernel, whose weights have both signs, one head "
        f"leaves an error of {losses['edge, one head']:.2f}, because attention weights cannot be negative. "
        f"{_HEADS} heads leave {losses['edge, several heads']:.3f} after three times as many steps."
    )
    return LabResult(
        number=mean_after,
        unit=f"of the attention is on true neighbors after training ({before:.3f} before)",
        n=seeds,
        verdict=decide_verdict(before, mean_after, losses),
        sentence=sentence,
        figure=draw(mean_kernel[0], several_heads[0], side),
        interval=confidence_interval(after),
        numbers={"before": before, "after": after, "errors": losses},
    )


def decide_verdict(before: float, after: float, losses: dict[str, float]) -> Verdict:
    if after < _MIN_ON_NEIGHBORS or after <= before or losses["mean, one head"] > _MAX_FITTED_ERROR:
        return Verdict(
            "does not hold", f"{after:.0%} of the attention is on neighbors, {before:.0%} before training"
        )
    if losses["edge, one head"] > _MIN_FAILED_ERROR and losses["edge, several heads"] < _MAX_FITTED_ERROR:
        return Verdict("partly", "the kernel's weights must have one sign, or there must be several heads")
    return Verdict("holds")


def _train_layer(side: int, kernel: str, heads: int, steps: int, seed: int) -> _TrainedLayer:
    """Train the layer with SGD on new random patches at every step."""
    torch.manual_seed(seed)
    layer = _build_position_only_attention(side, heads)
    assert layer.bias is not None
    neighbor_mask = neighbor_matrix(side)
    target_mixing = (
        neighbor_mask / neighbor_mask.sum(dim=1, keepdim=True) if kernel == "mean" else edge_weights(side)
    )
    values, _ = torch.linalg.qr(torch.randn(_WIDTH, _WIDTH))
    before = _attention_on_neighbors(layer, neighbor_mask)
    # Softmax over N patches scales gradients by about 1/N; a higher learning rate for p compensates.
    position_group = {"params": list(layer.bias.parameters()), "lr": _LR * 10 * side**2}
    other_parameters = [p for name, p in layer.named_parameters() if not name.startswith("bias.")]
    groups: list[dict[str, Any]] = [position_group, {"params": other_parameters}]
    optimizer = torch.optim.SGD(groups, lr=_LR, momentum=_MOMENTUM)
    loss = torch.tensor(1.0)
    for _ in range(steps):
        patches = torch.randn(_BATCH, side**2, _WIDTH)
        target = target_mixing @ patches @ values
        loss = (layer(patches) - target).square().mean() / target.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = layer.bias().softmax(dim=-1).detach()
    return _TrainedLayer(before, _attention_on_neighbors(layer, neighbor_mask), loss.item(), weights)


def _build_position_only_attention(side: int, heads: int) -> Attention:
    """The layer of the slide: softmax(p_ij), independent of the patches' content."""
    config = ViTConfig(
        width=_WIDTH,
        depth=1,
        heads=heads,
        head_width=_WIDTH,
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


def _attention_on_neighbors(layer: Attention, neighbor_mask: Tensor) -> float:
    assert layer.bias is not None
    return (layer.bias().softmax(dim=-1) * neighbor_mask).sum(dim=-1).mean().item()


def neighbor_matrix(side: int) -> Tensor:
    """(N, N): 1 if two patches are at most one row and one column apart."""
    return (_offsets(side).abs().amax(dim=-1) <= 1).float()


def edge_weights(side: int) -> Tensor:
    """(N, N): the weight of each input patch in each output of the edge kernel."""
    offset = _offsets(side)
    inside = offset.abs().amax(dim=-1) <= 1
    row, column = (offset.clamp(-1, 1) + 1).unbind(dim=-1)
    return torch.where(inside, EDGE[row, column], 0.0)


def _offsets(side: int) -> Tensor:
    """(N, N, 2): the offset in rows and columns between any two patches."""
    coordinates = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return coordinates[None] - coordinates[:, None]


@styled
def draw(mean_kernel: _TrainedLayer, several_heads: _TrainedLayer, side: int) -> Figure:
    """Attention of the middle patch before and after training."""
    figure = new_figure(7.2, 2.3)
    axes = figure.subplots(1, 4)
    middle = side // 2 * side + side // 2
    uniform = torch.full((side, side), 1 / side**2)
    maps = {
        "before training": uniform,
        "mean, one head": mean_kernel.weights[0, middle].view(side, side),
        "edge, head 1": several_heads.weights[0, middle].view(side, side),
        "edge, head 2": several_heads.weights[1, middle].view(side, side),
    }
    for axis, (title, values) in zip(axes, maps.items(), strict=True):
        show_map(axis, values.double().numpy(), vmax=0.5 if "edge" in title else 0.12, title=title)
        axis.plot(side // 2, side // 2, "o", markersize=5, markerfacecolor="none", color=LINES[1])
    return figure
