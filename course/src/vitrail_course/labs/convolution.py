"""Lab `convolution`: gradient descent on a self-attention layer finds the neighborhood of a convolution.

After Jelassi, Sander and Li 2022, cited in note 004: the target is a convolution, the layer is the slide's,
softmax(v_i^T Q K^T v_j + p_ij) with a value matrix. p is initialized to zero. In the first arms Q and K are
zero, as in the slide's intuition, and attention starts uniform; in the others they are trained too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vitrail.experiment.interval import confidence_interval, share_interval
from vitrail.experiment.trial import map_in_processes
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.views.canvas import LINES, new_figure, show_map, styled
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Statement, Verdict, decide, format_interval, is_above, reaches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "convolution"
TITLE = "attention learns a convolution"
NOTE = '004 "Self-Attention can learn convolution"'
CLAIM = (
    "If the target is a convolution, gradient descent on a self-attention layer finds its structure: patches "
    "come to attend to their neighbors, and attention no longer depends on their content."
)
ACCEPTS = ""

_WIDTH, _BATCH = 4, 32
_SGD_LR, _MOMENTUM, _ADAM_LR = 0.1, 0.9, 0.03
# The 3 x 3 edge kernel. The mean kernel averages the neighbors that exist, fewer at the border.
EDGE = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
_MIN_ON_NEIGHBORS, _MAX_ERROR = 0.9, 0.1
_MAX_CONTENT = 0.1  # of the norm of Q K^T before training that may remain


@dataclass(frozen=True)
class LayerArm:
    """How a layer is trained."""

    steps: int
    """A multiple of the lab's number of steps."""
    optimizer: Literal["SGD", "Adam"]
    higher_rate: bool = False
    """Whether p learns with 10 N times the learning rate: softmax over N patches scales its gradient by about
    1 / N. With a grid of 6 x 6 patches that is 360 times."""
    content: bool = False
    """Whether Q and K are trained, too, and not zero."""
    kernel: Literal["mean", "edge"] = "mean"
    heads: int = 1


CONTENT, POSITIONS, PLAIN, LONG = "Adam, Q and K trained too", "Adam", "SGD", "SGD, ten times the steps"
HIGHER, EDGE_ONE, EDGE_MANY = "SGD, higher rate for p", "edge kernel, one head", "edge kernel, four heads"
ARMS = {
    CONTENT: LayerArm(3, "Adam", content=True),
    POSITIONS: LayerArm(1, "Adam"),
    PLAIN: LayerArm(1, "SGD"),
    LONG: LayerArm(10, "SGD"),
    HIGHER: LayerArm(1, "SGD", higher_rate=True),
    EDGE_ONE: LayerArm(3, "SGD", higher_rate=True, kernel="edge"),
    EDGE_MANY: LayerArm(3, "SGD", higher_rate=True, kernel="edge", heads=4),
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
        "rate of p over that of the rest": position_factor(side),
    }
    after = numbers["on neighbors"][CONTENT]
    return LabResult(
        number=fmean(after),
        unit="of the attention is on true neighbors after training Q, K, V and p "
        f"({numbers['before'][CONTENT]:.3f} before, by random Q and K)",
        n=seeds,
        sentence=summarize(numbers, side),
        figure=draw({arm: runs[0] for arm, runs in layers.items()}, side),
        interval=share_interval(after),
        numbers=numbers,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """All of the layer must be trained at one learning rate; then, by plain SGD, and for other kernels."""
    content = numbers["Q K^T after over before"]
    remains = is_above(confidence_interval(content), _MAX_CONTENT)
    steps = numbers["steps"]
    setting = f"by Adam in {steps[CONTENT]} steps with Q and K trained, too"
    by_adam = _on_neighbors(numbers, CONTENT, f"patches come to attend to their neighbors, {setting}")
    only_p = f"{fmean(numbers['on neighbors'][POSITIONS]):.1%} in {steps[POSITIONS]} steps with only p and V"
    return decide(
        [
            replace(by_adam, evidence=f"{by_adam.evidence}; {only_p}"),
            Statement(
                "attention no longer depends on the content of the patches",
                None if remains is None else not remains,
                f"{format_interval(fmean(content), confidence_interval(content))} of the norm of Q K^T "
                f"remain, threshold {_MAX_CONTENT:g}",
            ),
            _on_neighbors(
                numbers, PLAIN, f"they do by SGD with one learning rate for all in {steps[PLAIN]} steps"
            ),
            _on_neighbors(numbers, LONG, f"they do by SGD with one learning rate in {steps[LONG]:,} steps"),
            _on_neighbors(
                numbers,
                HIGHER,
                f"they do by SGD in {steps[HIGHER]} steps if p learns at "
                f"{numbers['rate of p over that of the rest']:g} times the rate",
            ),
            _fits(numbers, EDGE_ONE, "one head fits a kernel whose weights have both signs"),
            _fits(numbers, EDGE_MANY, "four heads fit such a kernel"),
        ]
    )


def _on_neighbors(numbers: Mapping[str, Any], arm: str, text: str) -> Statement:
    after = numbers["on neighbors"][arm]
    return reaches(text, fmean(after), share_interval(after), _MIN_ON_NEIGHBORS)


def _fits(numbers: Mapping[str, Any], arm: str, text: str) -> Statement:
    errors = numbers["error"][arm]
    above = is_above(confidence_interval(errors), _MAX_ERROR)
    evidence = (
        f"error {format_interval(fmean(errors), confidence_interval(errors))}, threshold {_MAX_ERROR:g}"
    )
    return Statement(text, None if above is None else not above, evidence)


def summarize(numbers: Mapping[str, Any], side: int) -> str:
    arms = "; ".join(
        f"{arm} {fmean(numbers['on neighbors'][arm]):.1%} ({numbers['steps'][arm]:,} steps, error "
        f"{fmean(numbers['error'][arm]):.2g})"
        for arm, one in ARMS.items()
        if one.kernel == "mean"
    )
    edge = {arm: fmean(numbers["error"][arm]) for arm in (EDGE_ONE, EDGE_MANY)}
    return (
        f"On a grid of {side} x {side} patches with a 3 x 3 kernel, neighbors get "
        f"{numbers['before'][POSITIONS]:.1%} of the attention before training, when it is uniform, and "
        f"{numbers['before'][CONTENT]:.1%} where Q and K are random and not zero. If the kernel is a mean, "
        f"they get after it: {arms}. The gradient of p is about {side**2} times smaller than that of the "
        "values, because softmax divides it among all patches; so with one learning rate SGD hardly moves "
        f"it, a rate {position_factor(side):g} times higher for p makes up for it, and Adam needs none. "
        f"Where Q and K are trained, Q K^T shrinks to {fmean(numbers['Q K^T after over before']):.1%} of its "
        "norm: the layer learns that content does not matter. With an edge kernel, whose weights have both "
        f"signs, one head leaves an error of {edge[EDGE_ONE]:.2f}, because attention weights cannot be "
        f"negative, and four heads {edge[EDGE_MANY]:.3f}."
    )


# ---- training -------------------------------------------------------------------------------


def position_factor(side: int) -> float:
    """The factor on the learning rate of p where it is higher."""
    return 10.0 * side**2


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
    mixing = neighbors / neighbors.sum(dim=1, keepdim=True) if arm.kernel == "mean" else edge_weights(side)
    values, _ = torch.linalg.qr(torch.randn(_WIDTH, _WIDTH))
    held_out = torch.randn(_BATCH, side**2, _WIDTH)
    before, content = _attention_weights(layer, held_out), _content_norm(layer)
    optimizer = _build_optimizer(layer, arm, side)
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
        heads=arm.heads,
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


def _build_optimizer(layer: Attention, arm: LayerArm, side: int) -> torch.optim.Optimizer:
    if arm.optimizer == "Adam":
        return torch.optim.Adam(layer.parameters(), lr=_ADAM_LR)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in layer.named_parameters() if not name.startswith("bias.")]},
        {"params": [p for name, p in layer.named_parameters() if name.startswith("bias.")]},
    ]
    groups[1]["lr"] = _SGD_LR * (position_factor(side) if arm.higher_rate else 1)
    return torch.optim.SGD(groups, lr=_SGD_LR, momentum=_MOMENTUM)


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
def draw(layers: Mapping[str, TrainedLayer], side: int) -> Figure:
    """Attention of the middle patch after training."""
    figure = new_figure(8.4, 1.9)
    names: Sequence[tuple[str, str, int]] = [
        ("Adam, Q and K\ntrained too", CONTENT, 0),
        ("Adam", POSITIONS, 0),
        ("SGD", PLAIN, 0),
        ("SGD, 10 times\nthe steps", LONG, 0),
        ("SGD, higher\nrate for p", HIGHER, 0),
        ("edge kernel,\nhead 1 of 4", EDGE_MANY, 0),
        ("head 2", EDGE_MANY, 1),
    ]
    axes = figure.subplots(1, len(names))
    middle = side // 2 * side + side // 2
    for axis, (title, arm, head) in zip(axes, names, strict=True):
        weights = layers[arm].weights[head, middle].view(side, side)
        show_map(axis, weights.double().numpy(), vmax=0.5 if arm == EDGE_MANY else 0.12, title="")
        axis.set_title(title, fontsize=8)
        axis.plot(side // 2, side // 2, "o", markersize=5, markerfacecolor="none", color=LINES[1])
    return figure
