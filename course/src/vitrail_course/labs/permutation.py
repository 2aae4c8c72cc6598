"""Lab `permutation`: an encoder without positions is equivariant to shuffling its patches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.tokens import patchify
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize, load_images
from vitrail_course.labs.verdict import OURS, Verdict, identity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "permutation"
TITLE = "without positions, no order"
NOTE = '000 "Breaking the equations down - 1", 001 "Positional Embedding"'
CLAIM = "Position embedding preserve the position information."
ACCEPTS = "images"

_POSITIONS = ("none", "learned", "sincos1d", "sincos2d", "rotary", "pairwise", "relative")
_UNCHANGED, _CHANGED = 1e-10, 1e-3


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    count, shuffles, depth = (32, 20, 4) if size == "full" else (4, 2, 2)
    images = load_images(data, count)
    changes = {position: shuffle_changes(images, position, depth, shuffles) for position in _POSITIONS}
    return LabResult(
        number=changes["none"][1],
        unit="maximum relative change of the class token when patches are shuffled, without positions",
        n=count * shuffles,
        setting=f"{count} images, {shuffles} shuffles each, random models of {depth} blocks in float64.",
        figure=draw({position: value for position, (_, value) in changes.items()}),
        numbers={
            position: {"tokens": tokens, "class token": class_token}
            for position, (tokens, class_token) in changes.items()
        },
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Nothing may change without positions, and the class token must with each kind of positions."""
    without = max(numbers["none"].values())
    changes = {name: values["class token"] for name, values in numbers.items() if name != "none"}
    unaffected = [name for name, change in changes.items() if change < _CHANGED]
    return Verdict(
        [
            identity(
                "without positions the prediction is unchanged and the patch tokens are shuffled",
                without <= _UNCHANGED,
                f"relative change {without:.1e}",
                f"{_UNCHANGED:g}",
            ),
            identity(
                "with positions the prediction changes",
                not unaffected,
                f"by {min(changes.values()):.2g} or more"
                + (f"; not with {', '.join(unaffected)}" if unaffected else ""),
                f"{_CHANGED:g}",
                OURS,
            ),
        ]
    )


def shuffle_changes(images: Tensor, position: str, depth: int, shuffles: int) -> tuple[float, float]:
    """The largest relative change of the patch tokens, after undoing the shuffle, and of the class token."""
    model = build_model(images, position, depth)
    rng = torch.Generator().manual_seed(1)
    tokens, class_token = 0.0, 0.0
    with torch.no_grad():
        before = model.encode(images)
        for _ in range(shuffles):
            order = torch.randperm(model.config.patches, generator=rng)
            after = model.encode(shuffle_patches(images, order, model.config))
            tokens = max(
                tokens,
                _relative_difference(after.patches.flatten(1, 2), before.patches.flatten(1, 2)[:, order]),
            )
            class_token = max(class_token, _relative_difference(after.tokens[:, 0], before.tokens[:, 0]))
    return tokens, class_token


def build_model(images: Tensor, position: str, depth: int) -> ViT:
    """A small random model in which positions have an effect without training."""
    fields: dict[str, Any] = {"position": position}
    if position == "learned":
        fields["position_sigma"] = 1.0
    size = (images.shape[2], images.shape[3])
    patch = tuple(side // 4 for side in size)
    config = ViTConfig(
        width=48,
        depth=depth,
        heads=3,
        patch=patch,
        size=size,
        channels=images.shape[1],
        classes=0,
        remainder="cut",
        **fields,
    )
    torch.manual_seed(0)
    model = ViT(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def shuffle_patches(images: Tensor, order: Tensor, config: ViTConfig) -> Tensor:
    """The images with their patches in another order."""
    (h, w), (P, Q) = config.grid, config.patch_pixels
    patches = patchify(images, (P, Q))[:, order]  # (B, N, C P Q)
    patches = patches.unflatten(2, (images.shape[1], P, Q)).unflatten(1, (h, w))  # (B, h, w, C, P, Q)
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)  # (B, C, H, W)


def _relative_difference(tokens: Tensor, expected: Tensor) -> float:
    return ((tokens - expected).abs().max() / expected.abs().max()).item()


@styled
def draw(changes: dict[str, float]) -> Figure:
    figure = new_figure(6.4, 2.8)
    axis = figure.subplots()
    colors = [LINES[1] if position == "none" else LINES[0] for position in changes]
    axis.barh(list(changes), [max(value, 1e-17) for value in changes.values()], color=colors)
    axis.set(xscale="log", xlim=(1e-17, 10), xlabel="maximum relative change of the class token")
    axis.invert_yaxis()
    axis.set_title("shuffled patches, by kind of positions")
    return figure
