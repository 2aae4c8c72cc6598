"""The page of `vitrail walk --html`: each stage with its equation, its numbers and an image of its tensor."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from vitrail.course.walk.format import format_number, summarize
from vitrail.images.colormap import heat
from vitrail.report.page import Figure, Page, Section

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from vitrail.config import ViTConfig
    from vitrail.course.walk import Stage

_MAX_SIDE = 256  # of an image, in pixels; larger tensors are averaged down


def walk_page(stages: list[Stage], facts: dict[str, Any], config: ViTConfig, *, command: str = "") -> Page:
    """The page of a walk.

    Args:
        facts: model, weights, image, block, head and token_name, as in the JSON file.
    """
    detail = f"In detail: block {facts['block']}, head {facts['head']}, {facts['token_name']}."
    colors = "In the maps, dark blue is the smallest value and yellow the largest."
    return Page(
        title=f"{facts['image']} through {facts['model']}",
        lead=[facts["weights"], f"{detail} {colors}"],
        sections=[_stage_section(stage, config) for stage in stages],
        command=command,
    )


def _stage_section(stage: Stage, config: ViTConfig) -> Section:
    tensor, figures = stage.tensor, []
    if tensor.numel() <= 2:  # the values themselves say more than their mean
        numbers = ", ".join(format_number(value) for value in tensor.tolist())
    else:
        numbers = ", ".join(f"{name} {format_number(value)}" for name, value in summarize(tensor).items())
        image = _png(_enlarge(_draw(stage, config)))
        figures = [Figure(image, f"{stage.name} as an image", pixelated=True)]
    shape = " × ".join(map(str, stage.shape))
    return Section(
        stage.name, [stage.meaning, f"Shape {shape}: {numbers}."], figures, equation=stage.equation
    )


# ---- images ---------------------------------------------------------------------------------


def _draw(stage: Stage, config: ViTConfig) -> Image:
    """Pixels and patches as they look, attention weights of a token on the grid, the rest as a heat map."""
    tensor, C = stage.tensor, config.channels
    if stage.name == "pixels":
        return _pixels_image(tensor)
    (h, w), (height, width) = config.grid, config.patch_pixels
    if stage.name == "tokens.cut" and tensor.shape[1] == C * height * width:
        gap = max(1, min(height, width) // 8)
        sheet = tensor.new_ones(C, h * (height + gap) - gap, w * (width + gap) - gap)  # white gaps
        for index, patch in enumerate(tensor):
            top, left = index // w * (height + gap), index % w * (width + gap)
            sheet[:, top : top + height, left : left + width] = patch.reshape(C, height, width)
        return _pixels_image(sheet)
    if stage.name.endswith("attention.row"):
        return _heat_map(tensor[config.prefix :].reshape(h, w))
    if tensor.ndim == 3:  # feature maps of a stem: their mean over the channels
        return _heat_map(tensor.mean(0))
    return _heat_map(tensor if tensor.ndim == 2 else tensor[None])


def _pixels_image(values: Tensor) -> Image:
    """(C, H, W) from -1 to 1 as an RGB or grayscale image."""
    from PIL import Image

    pixels = ((values.float().clamp(-1, 1) + 1) * 127.5).round().byte()
    if len(pixels) == 3:
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return Image.fromarray(pixels[0].numpy())


def _heat_map(matrix: Tensor) -> Image:
    """A matrix in colors, from its minimum to its maximum."""
    import torch
    from PIL import Image
    from torch.nn.functional import adaptive_avg_pool2d

    matrix = torch.nan_to_num(matrix.float())
    rows, columns = (min(side, _MAX_SIDE) for side in matrix.shape)
    matrix = adaptive_avg_pool2d(matrix[None, None], (rows, columns))[0, 0]
    low, high = matrix.min(), matrix.max()
    pixels = ((matrix - low) / (high - low).clamp_min(1e-12) * 255).round().byte()
    image = Image.fromarray(pixels.numpy())
    image.putpalette([part for value in range(256) for part in heat(value / 255)])  # one byte per pixel
    return image


def _enlarge(image: Image) -> Image:
    """Enlarge small images by an integer factor to at least 128 pixels, so that single values can be seen.

    A strip becomes at least 12 pixels thick; large images are reduced.
    """
    from PIL.Image import Resampling

    step = math.ceil(128 / max(image.size))
    width, height = (max(12, side * step) for side in image.size)
    image = image.resize((width, height), Resampling.NEAREST)
    image.thumbnail((2 * _MAX_SIDE, 2 * _MAX_SIDE))
    return image


def _png(image: Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
