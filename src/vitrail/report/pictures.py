"""Pictures as a model saw them, and where it looked, as small files for a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitrail.data.decode import open_picture, quiet
from vitrail.data.sources import Split
from vitrail.errors import InputError
from vitrail.inspect import rollout
from vitrail.inspect.canvas import HEAT
from vitrail.model.modes import evaluating
from vitrail.preprocess import Preprocess
from vitrail.weights.bundle import Bundle

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = 320  # pixels of a side on a page
EXACT = 64  # up to this side every pixel is kept; JPEG makes larger ones five times smaller
COVER = 0.65  # how much of a map covers the picture below it


@dataclass(frozen=True, eq=False)
class Seen:
    """A picture as the model saw it, what the model said of it, and where it looked."""

    place: int
    """In the split."""
    pixels: NDArray[np.uint8]
    """(H, W, C)"""
    logits: NDArray[np.float64]
    """(K,), in the model's order."""
    looked: NDArray[np.floating] | None
    """(h, w), a share for each patch; they add up to 1. None where the model has no such map."""
    patch: tuple[int, ...]
    """Height and width of a patch."""

    def views(self, what: str) -> list[tuple[bytes, str]]:
        """The picture, and the same with the map over it."""
        found = [(encode(self.pixels), f"{what}, as the model sees it")]
        if self.looked is not None:
            row, column = np.unravel_index(self.looked.argmax(), self.looked.shape)
            h, w = self.looked.shape
            where = f"mostly at row {row + 1} of {h}, column {column + 1} of {w}"
            found.append(
                (encode(lay_over(self.pixels, self.looked, self.patch)), f"where the model looked: {where}")
            )
        return found


def look(bundle: Bundle, split: Split, places: Sequence[int]) -> list[Seen]:
    """Some pictures of a split, those that can be read, through the model once more."""
    model, spec = bundle.model, bundle.preprocess
    assert spec is not None
    found = [(place, pixels) for place in places if (pixels := read(split, place, spec)) is not None]
    if not found:
        return []
    parameter = next(model.parameters())
    images = torch.stack([spec.normalise(pixels) for _, pixels in found]).to(parameter)
    with evaluating(model):
        logits = model(images).double().cpu().numpy()
    maps: Sequence[NDArray[np.floating] | None]
    try:
        maps = list(rollout.compute(model, images).maps.reshape(len(found), *model.config.grid))
    except InputError:  # not every model has such a map
        maps = [None] * len(found)
    patch = model.config.patch_pixels
    return [Seen(*one, row, looked, patch) for one, row, looked in zip(found, logits, maps, strict=True)]


def read(split: Split, place: int, spec: Preprocess) -> NDArray[np.uint8] | None:
    """The levels that the model sees; None where the picture cannot be read."""
    try:
        if split.images is not None:
            return spec.pixels(split.images[place])
        assert split.paths is not None
        with quiet():
            return spec.pixels(open_picture(split.paths[place]))
    except (ValueError, OSError):
        return None


def lay_over(
    pixels: NDArray[np.uint8], looked: NDArray[np.floating], patch: tuple[int, ...]
) -> NDArray[np.uint8]:
    """The map over the picture in grey, patch by patch: nothing is smoothed over.

    What lies beyond the last whole patch, the model does not see: it stays grey.
    """
    import matplotlib

    tiles = np.kron(looked / (looked.max() or 1.0), np.ones(patch))
    colours = matplotlib.colormaps[HEAT](tiles)[..., :3] * 255
    over = np.repeat(pixels[..., :3].mean(axis=2, keepdims=True), 3, axis=2)
    h, w = tiles.shape
    over[:h, :w] = COVER * colours + (1 - COVER) * over[:h, :w]
    return np.rint(over).astype(np.uint8)


def encode(pixels: NDArray[np.uint8]) -> bytes:
    """A picture (H, W, C) as a PNG or JPEG file; other than 1, 3 or 4 channels by their mean."""
    from PIL import Image

    grey = pixels.shape[2] not in (3, 4)
    shown = pixels.mean(axis=2).round().astype(np.uint8) if grey else pixels[..., :3]
    image = Image.fromarray(shown)
    image.thumbnail((LARGEST, LARGEST))
    file = io.BytesIO()
    if max(image.size) <= EXACT:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=88)
    return file.getvalue()
