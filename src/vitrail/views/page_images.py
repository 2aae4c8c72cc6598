"""Images with their predictions and attention rollout, encoded as small files for a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitrail.base.errors import InputError
from vitrail.images.decode import open_image, suppress_warnings
from vitrail.images.formats.sources import Split
from vitrail.images.preprocess import Preprocess
from vitrail.model.device import eval_mode
from vitrail.views import rollout
from vitrail.views.canvas import OVERLAY
from vitrail.weights.bundle.bundle import Bundle

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_SIDE = 320  # pixels
_MAX_PNG_SIDE = 64  # small images are PNG to show exact pixels; as JPEG larger ones take a fifth of the space
_OPACITY = 0.65  # of a map over its image


@dataclass(frozen=True, eq=False)
class ExplainedImage:
    """A preprocessed image with its logits and attention rollout."""

    index: int
    """Index in the split."""
    pixels: NDArray[np.uint8]
    """(H, W, C)"""
    logits: NDArray[np.float64]
    """(K,), in the order of the model's classes."""
    rollout: NDArray[np.floating] | None
    """(h, w), summing to 1; None if the model has no such map."""
    patch: tuple[int, ...]
    """Height and width of a patch."""

    def views(self, description: str) -> list[tuple[bytes, str]]:
        """The image, and the image with the rollout map over it, each with an alt text."""
        views = [(encode_image(self.pixels), f"{description}, after preprocessing")]
        if self.rollout is not None:
            row, column = np.unravel_index(self.rollout.argmax(), self.rollout.shape)
            h, w = self.rollout.shape
            overlay = encode_image(overlay_rollout(self.pixels, self.rollout, self.patch))
            peak = f"row {row + 1} of {h}, column {column + 1} of {w}"
            views.append((overlay, f"Attention rollout, highest at {peak}"))
        return views


def explain_images(bundle: Bundle, split: Split, indices: Sequence[int]) -> list[ExplainedImage]:
    """Run the model on some images of a split; images that cannot be read are skipped."""
    model, spec = bundle.model, bundle.preprocess
    assert spec is not None
    readable = [(index, pixels) for index in indices if (pixels := _read(split, index, spec)) is not None]
    if not readable:
        return []
    parameter = next(model.parameters())
    images = torch.stack([spec.normalize(pixels) for _, pixels in readable]).to(parameter)
    with eval_mode(model):
        logits = model(images).double().cpu().numpy()
    maps: Sequence[NDArray[np.floating] | None]
    try:
        maps = list(rollout.compute(model, images).maps.reshape(len(readable), *model.config.grid))
    except InputError:  # not every model has a rollout map
        maps = [None] * len(readable)
    return [
        ExplainedImage(index, pixels, row, image_map, model.config.patch_pixels)
        for (index, pixels), row, image_map in zip(readable, logits, maps, strict=True)
    ]


def _read(split: Split, index: int, spec: Preprocess) -> NDArray[np.uint8] | None:
    """The pixels of an image after resizing and cropping; None if it cannot be read."""
    try:
        if split.images is not None:
            return spec.pixels(split.images[index])
        assert split.paths is not None
        with suppress_warnings():
            return spec.pixels(open_image(split.paths[index]))
    except (ValueError, OSError):
        return None


def overlay_rollout(
    pixels: NDArray[np.uint8], values: NDArray[np.floating], patch: tuple[int, ...]
) -> NDArray[np.uint8]:
    """A map over the image in gray, patch by patch, without smoothing.

    Pixels beyond the last complete patch are not an input of the model and stay gray.
    """
    import matplotlib

    tiles = np.kron(values / (values.max() or 1.0), np.ones(patch))
    colors = matplotlib.colormaps[OVERLAY](tiles)[..., :3] * 255
    over = np.repeat(pixels[..., :3].mean(axis=2, keepdims=True), 3, axis=2)
    h, w = tiles.shape
    over[:h, :w] = _OPACITY * colors + (1 - _OPACITY) * over[:h, :w]
    return np.rint(over).astype(np.uint8)


def encode_image(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an image (H, W, C) as a PNG or JPEG file; other than 3 or 4 channels are averaged."""
    from PIL import Image

    gray = pixels.shape[2] not in (3, 4)
    shown = pixels.mean(axis=2).round().astype(np.uint8) if gray else pixels[..., :3]
    image = Image.fromarray(shown)
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    file = io.BytesIO()
    if max(image.size) <= _MAX_PNG_SIDE:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=88)
    return file.getvalue()
