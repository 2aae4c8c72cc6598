"""The models of the lab `translation`, and what becomes of their features when the picture moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model import ViT

P = 4  # a patch, and the stride of the stem and of the CNN's two pools together
# Not the hybrid: its stem pads with zeros, which a picture that is moved round its edges would meet.
MOVED_ARMS = ("CNN without pools", "CNN", "ViT without positions", "ViT")


class CNN(nn.Module):
    """Three convolutions of 3 x 3, and the mean of the last map; two pools between them, or none."""

    def __init__(self, channels: int, classes: int, pools: bool = True) -> None:
        super().__init__()
        widths = (channels, 32, 48, 56)
        self.features = nn.Sequential()
        for n in range(3):
            self.features.append(nn.Conv2d(widths[n], widths[n + 1], kernel_size=3, padding=1, bias=False))
            # The momentum lets the running means follow within a few steps, which some runs have only.
            self.features.extend([nn.BatchNorm2d(widths[n + 1], momentum=0.3), nn.ReLU()])
            if pools and n < 2:
                self.features.append(nn.MaxPool2d(2))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


def builders_for(images: Tensor, classes: int) -> dict[str, Callable[[], nn.Module]]:
    """What makes each model for pictures such as these; all of about as many parameters."""
    _, channels, H, W = images.shape

    def vit(**changes: Any) -> Callable[[], nn.Module]:
        config: dict[str, Any] = {
            "width": 32,
            "depth": 3,
            "heads": 2,
            "patch": P,
            "size": (H, W),
            "channels": channels,
            "classes": classes,
            "position": "sincos2d",
            "class_token": False,
            "pool": "mean",
        }
        return partial(ViT, ViTConfig(**{**config, **changes}))

    return {
        "ViT": vit(),
        "CNN": partial(CNN, channels, classes),
        "hybrid": vit(embedding="conv"),
        "CNN without pools": partial(CNN, channels, classes, pools=False),
        "ViT without positions": vit(position="none"),
    }


def random(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


# ---- moving the picture ---------------------------------------------------------------------


def changes(
    builders: Mapping[str, Callable[[], nn.Module]],
    states: Mapping[str, Mapping[str, Tensor]],
    images: Tensor,
) -> dict[str, dict[str, float]]:
    """By how much features change when the picture is moved by a pixel and by a patch, then moved back."""
    found = {}
    for name in MOVED_ARMS:
        model = random(builders[name])
        for word in ("random", "trained"):
            if word == "trained":
                model.load_state_dict(states[name])
            found[f"{name}, {word}"] = {
                label: change(model, images, pixels) for label, pixels in (("1 pixel", 1), ("1 patch", P))
            }
    return found


@torch.no_grad()
def change(model: nn.Module, images: Tensor, pixels: int) -> float:
    """How far features are from those of the unmoved picture, 1 for as far as those of another picture.

    Pictures are moved round their edges, down and right, so that nothing is lost. What the edge does to a
    CNN is no matter of translation: it sees the picture amid eight others, and only the middle counts. A
    ViT takes one size only.
    """
    local = isinstance(model, CNN)
    scenes = amid(images) if local else images
    before = middle(features(model, scenes), local)
    moved = features(model, scenes.roll((pixels, pixels), dims=(2, 3)))
    cells = round(pixels * moved.shape[2] / scenes.shape[2])  # to the nearest cell
    after = middle(moved.roll((-cells, -cells), dims=(2, 3)), local)
    other = before.roll(1, dims=0)
    return ((after - before).norm() / (other - before).norm()).item()


def features(model: nn.Module, images: Tensor) -> Tensor:
    """(B, D, h, w): the CNN's last map, or the ViT's tokens where they lie."""
    if isinstance(model, ViT):
        return model.encode(images).patches.permute(0, 3, 1, 2)
    assert isinstance(model, CNN)
    return model.features(images)


def amid(images: Tensor) -> Tensor:
    """Every picture with eight others round it: (B, C, 3 H, 3 W)."""
    rows = [
        torch.cat([images.roll(3 * row + column - 4, dims=0) for column in range(3)], 3) for row in range(3)
    ]
    return torch.cat(rows, dim=2)


def middle(maps: Tensor, local: bool) -> Tensor:
    h, w = (side // 3 for side in maps.shape[2:])
    return maps[:, :, h : 2 * h, w : 2 * w] if local else maps


@torch.no_grad()
def reach(model: nn.Module, images: Tensor) -> int:
    """How many pixels of a row have a feature that one pixel in the middle can change."""
    other = images.clone()
    row, column = (side // 2 for side in images.shape[2:])
    other[:, :, row, column] *= -1
    other[:, :, row, column] += 1
    apart = (features(model, images) - features(model, other)).abs().amax(dim=(0, 1, 2))  # (w,)
    return int((apart > 0).sum()) * images.shape[3] // len(apart)
