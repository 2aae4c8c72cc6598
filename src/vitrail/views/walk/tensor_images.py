"""Tensors of a stage as images: pixels and patches as they look, the rest as heat maps."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from vitrail.images.colormap import heat

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from vitrail.model.config import ViTConfig
    from vitrail.views.walk import Stage

_SHOWN_SIDE = 192  # CSS pixels of the longer side of a small image
_SHOWN_STRIP = 14  # and the least of the shorter one


def stage_image(stage: Stage, config: ViTConfig, max_side: int) -> tuple[bytes, int, int]:
    """The PNG file of a stage, and the width and height to show it at, in CSS pixels.

    Args:
        max_side: larger tensors are averaged down to this many values along a side.
    """
    image = _draw(stage, config, max_side)
    step = max(1, math.ceil(_SHOWN_SIDE / max(image.size)))
    width, height = (max(_SHOWN_STRIP, side * step) for side in image.size)
    return png(image), width, height


def _draw(stage: Stage, config: ViTConfig, max_side: int) -> Image:
    """Pixels and patches as they look, attention weights of a token on the grid, the rest as a heat map."""
    tensor, C = stage.tensor, config.channels
    if stage.name == "pixels":
        return pixels_image(tensor)
    (h, w), (height, width) = config.grid, config.patch_pixels
    if stage.name == "tokens.cut" and tensor.shape[1] == C * height * width:
        gap = max(1, min(height, width) // 8)
        sheet = tensor.new_ones(C, h * (height + gap) - gap, w * (width + gap) - gap)  # white gaps
        for index, patch in enumerate(tensor):
            top, left = index // w * (height + gap), index % w * (width + gap)
            sheet[:, top : top + height, left : left + width] = patch.reshape(C, height, width)
        return pixels_image(sheet)
    if stage.name.endswith("attention.row"):
        return _heat_map(tensor[config.prefix :].reshape(h, w), max_side)
    if tensor.ndim == 3:  # feature maps of a stem: their mean over the channels
        return _heat_map(tensor.mean(0), max_side)
    return _heat_map(tensor if tensor.ndim == 2 else tensor[None], max_side)


def pixels_image(values: Tensor) -> Image:
    """(C, H, W) as an RGB or grayscale image: from -1 to 1, or as far as the values go beyond that."""
    from PIL import Image

    low, high = min(-1.0, float(values.min())), max(1.0, float(values.max()))
    pixels = ((values.float() - low) / (high - low) * 255).round().byte()
    if len(pixels) == 3:
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return Image.fromarray(pixels[0].numpy())


def _heat_map(matrix: Tensor, max_side: int) -> Image:
    """A matrix in colors, from its minimum to its maximum."""
    import torch
    from PIL import Image
    from torch.nn.functional import adaptive_avg_pool2d

    matrix = torch.nan_to_num(matrix.float())
    rows, columns = (min(side, max_side) for side in matrix.shape)
    matrix = adaptive_avg_pool2d(matrix[None, None], (rows, columns))[0, 0]
    low, high = matrix.min(), matrix.max()
    pixels = ((matrix - low) / (high - low).clamp_min(1e-12) * 255).round().byte()
    image = Image.fromarray(pixels.numpy())
    image.putpalette([part for value in range(256) for part in heat(value / 255)])  # one byte per pixel
    return image


def png(image: Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
