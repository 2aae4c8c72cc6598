"""The models of the lab `translation`, and how their features change when the image is shifted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model import ViT
from vitrail.model.config import ViTConfig

STRIDE = 4  # the patch size, and the total stride of the stem and of the CNN's pooling
# Without the hybrid: its stem pads with zeros, which differ from circular shifts.
SHIFTED_ARMS = ("CNN without pooling", "CNN", "ViT without positions", "ViT")


class CNN(nn.Module):
    """Three 3 x 3 convolutions and global average pooling; optionally two max pools between them."""

    def __init__(self, channels: int, classes: int, pooling: bool = True) -> None:
        super().__init__()
        widths = (channels, 32, 48, 56)
        self.features = nn.Sequential()
        for n in range(3):
            self.features.append(nn.Conv2d(widths[n], widths[n + 1], kernel_size=3, padding=1, bias=False))
            # A higher momentum than usual, because some runs have only a few steps.
            self.features.extend([nn.BatchNorm2d(widths[n + 1], momentum=0.3), nn.ReLU()])
            if pooling and n < 2:
                self.features.append(nn.MaxPool2d(2))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


def builders_for(images: Tensor, classes: int) -> dict[str, Callable[[], nn.Module]]:
    """A builder for each model, all with about the same number of parameters."""
    _, channels, H, W = images.shape

    def vit_builder(**feature_changes: Any) -> Callable[[], nn.Module]:
        config: dict[str, Any] = {
            "width": 32,
            "depth": 3,
            "heads": 2,
            "patch": STRIDE,
            "size": (H, W),
            "channels": channels,
            "classes": classes,
            "position": "sincos2d",
            "class_token": False,
            "pool": "mean",
        }
        return partial(ViT, ViTConfig(**{**config, **feature_changes}))

    return {
        "ViT": vit_builder(),
        "CNN": partial(CNN, channels, classes),
        "hybrid": vit_builder(embedding="conv"),
        "CNN without pooling": partial(CNN, channels, classes, pooling=False),
        "ViT without positions": vit_builder(position="none"),
    }


def build_random(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


# ---- shifted images -------------------------------------------------------------------------


def feature_changes(
    builders: Mapping[str, Callable[[], nn.Module]],
    states: Mapping[str, Mapping[str, Tensor]],
    images: Tensor,
) -> dict[str, dict[str, float]]:
    """Change of the features if the image is shifted by a pixel or a patch and the features shifted back."""
    result = {}
    for name in SHIFTED_ARMS:
        model = build_random(builders[name])
        model.load_state_dict(states[name])
        result[name] = {
            label: feature_change(model, images, pixels)
            for label, pixels in (("1 pixel", 1), ("1 patch", STRIDE))
        }
    return result


@torch.no_grad()
def feature_change(model: nn.Module, images: Tensor, pixels: int) -> float:
    """Distance of the features from those of the original image; 1 is the distance to another image.

    Images are shifted circularly, down and right. A CNN gets the image surrounded by eight others and only
    the center is compared, because border effects of padding are not part of the claim. A ViT accepts only
    one size.
    """
    is_cnn = isinstance(model, CNN)
    padded = surround(images) if is_cnn else images
    before = _crop_center(_features(model, padded), is_cnn)
    shifted = _features(model, padded.roll((pixels, pixels), dims=(2, 3)))
    cells = round(pixels * shifted.shape[2] / padded.shape[2])  # of the feature map, rounded
    after = _crop_center(shifted.roll((-cells, -cells), dims=(2, 3)), is_cnn)
    changed = before.roll(1, dims=0)
    return ((after - before).norm() / (changed - before).norm()).item()


def _features(model: nn.Module, images: Tensor) -> Tensor:
    """(B, D, h, w): the CNN's last feature map, or the ViT's patch tokens as a map."""
    if isinstance(model, ViT):
        return model.encode(images).patches.permute(0, 3, 1, 2)
    assert isinstance(model, CNN)
    return model.features(images)


def surround(images: Tensor) -> Tensor:
    """Every image surrounded by eight others: (B, C, 3 H, 3 W)."""
    rows = [
        torch.cat([images.roll(3 * row + column - 4, dims=0) for column in range(3)], 3) for row in range(3)
    ]
    return torch.cat(rows, dim=2)


def _crop_center(maps: Tensor, is_cnn: bool) -> Tensor:
    h, w = (side // 3 for side in maps.shape[2:])
    return maps[:, :, h : 2 * h, w : 2 * w] if is_cnn else maps


@torch.no_grad()
def influenced_pixels(model: nn.Module, images: Tensor) -> int:
    """The number of pixels in a row whose features depend on one pixel in the middle."""
    changed = images.clone()
    row, column = (side // 2 for side in images.shape[2:])
    changed[:, :, row, column] *= -1
    changed[:, :, row, column] += 1
    difference = (_features(model, images) - _features(model, changed)).abs().amax(dim=(0, 1, 2))  # (w,)
    return int((difference > 0).sum()) * images.shape[3] // len(difference)
