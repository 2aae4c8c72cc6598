"""Pictures as the figures need them: what the model sees, as levels and as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.data.decode import open_picture, quiet
from vitrail.errors import InputError, printable
from vitrail.memory import check_fits, weights_bytes
from vitrail.model import ViT
from vitrail.preprocess import Preprocess

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Pictures:
    """Some pictures, resized and cut as the model sees them."""

    names: list[str]
    pixels: NDArray[np.uint8]
    """(B, H, W, C), to be drawn."""
    images: Tensor
    """(B, C, H, W), the same normalised: what the model takes."""

    def __len__(self) -> int:
        return len(self.names)


def from_pixels(pixels: NDArray[np.uint8], preprocess: Preprocess, names: Sequence[str]) -> Pictures:
    """Pictures (B, H, W, C) that have the model's size already."""
    return Pictures(list(names), pixels, torch.stack([preprocess.normalise(one) for one in pixels]))


def from_files(paths: Sequence[Path], preprocess: Preprocess) -> Pictures:
    """Picture files, through the model's own preprocessing."""
    with quiet():
        found = [preprocess.pixels(open_picture(path)) for path in paths]
    return from_pixels(np.stack(found), preprocess, [path.name for path in paths])


def check_pictures(model: ViT, images: Tensor | None = None) -> None:
    """Figures are of models that take pictures, and of a batch of these."""
    if model.config.input != "picture":
        got = f"one that takes {model.config.input}"
        raise InputError("The model must take pictures.", got, "Look at it with vitrail.record.")
    if images is not None and (images.ndim != 4 or not len(images)):
        got = f"a tensor of shape {tuple(images.shape)}"
        raise InputError("Pictures must come as a batch (B, C, H, W).", got, "Add the batch axis.")


def check_weights_fit(model: ViT, pictures: int, blocks: int = 1) -> None:
    """Attention that is looked at is written down: for each head a number for every pair of tokens."""
    if device_of(model).type == "cpu":
        needed = blocks * weights_bytes(model.config, pictures)
        do = "use a smaller --size or fewer images at once"
        check_fits(needed, model.config, pictures, "Looking at attention", do)


def check_number(what: str, number: int, count: int) -> int:
    """A layer or head by its number, from 0; a negative one counts from the end."""
    if not isinstance(number, int) or not -count <= number < count:
        do = f"Choose one; -1 is the last, -{count} the first."
        raise InputError(f"{what} must be a number from 0 to {count - 1}.", printable(number), do)
    return number % count


def check_pixels(pixels: NDArray[np.uint8], count: int) -> None:
    """What is drawn on must be what was computed."""
    if pixels.ndim != 4 or len(pixels) != count:
        must = f"The pixels to draw on must be the {count} pictures that were computed, (B, H, W, C)."
        got = f"an array of shape {pixels.shape}"
        raise InputError(must, got, "Pass Pictures.pixels of the same pictures.")


def check_finite(what: str, values: NDArray[np.floating]) -> None:
    """A broken model or a broken picture must not become a figure."""
    if not np.isfinite(values).all():
        count = int((~np.isfinite(values)).sum())
        got = f"{count:,} of {values.size:,} that are infinite or not a number"
        do = "Look for them in the pictures and in the model's parameters."
        raise InputError(f"{what} must be finite numbers.", got, do)


def device_of(model: ViT) -> torch.device:
    return next(model.parameters()).device
