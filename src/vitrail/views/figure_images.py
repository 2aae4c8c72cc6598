"""Images for the figures, as pixels to draw and as model inputs, and checks of what figures are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.images.decode import open_image, suppress_warnings
from vitrail.images.formats.stored_images import StoredImage
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.model_memory import attention_bytes, check_fits

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images after the model's resizing and cropping."""

    names: list[str]
    pixels: NDArray[np.uint8]
    """(B, H, W, C), for drawing."""
    images: Tensor
    """(B, C, H, W), the same images normalized: the input of the model."""

    def __len__(self) -> int:
        return len(self.names)


def from_pixels(pixels: NDArray[np.uint8], preprocess: Preprocess, names: Sequence[str]) -> ImageBatch:
    """A batch from pixels (B, H, W, C) that already have the model's input size."""
    return ImageBatch(list(names), pixels, torch.stack([preprocess.normalize(image) for image in pixels]))


def from_files(paths: Sequence[Path | StoredImage], preprocess: Preprocess) -> ImageBatch:
    """A batch from image files, with the model's preprocessing."""
    with suppress_warnings():
        pixels = [preprocess.pixels(open_image(path)) for path in paths]
    return from_pixels(np.stack(pixels), preprocess, [path.name for path in paths])


def tell_apart(names: Sequence[str], most: int = 16) -> list[str]:
    """Short names that differ: without folders and endings where that is enough, shortened in the middle.

    Photos of one camera often differ only in their last letters.
    """
    paths = [PurePath(name) for name in names]
    for kind in ([path.stem for path in paths], [path.name for path in paths], list(map(str, paths))):
        labels = [_shorten(text, most) for text in kind]
        if len(set(labels)) == len(set(names)):
            return labels
    return [f"{number}: {_shorten(path.stem, most - 4)}" for number, path in enumerate(paths, start=1)]


def _shorten(text: str, most: int) -> str:
    """Printable text with as many letters of its start as of its end."""
    text = printable(text, 2000)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def check_images(model: ViT, images: Tensor | None = None) -> None:
    """Check that the model takes images, and that `images` is a batch of at least one."""
    if model.config.input != "image":
        raise InputError(
            f"Figures need a model that takes images, but this one takes {model.config.input}; use "
            "vitrail.record to inspect it."
        )
    if images is not None and (images.ndim != 4 or not len(images)):
        raise InputError(
            f"Images must be a batch (B, C, H, W) of at least one, but the tensor has shape "
            f"{tuple(images.shape)}; add a batch dimension with images[None]."
        )


def check_weights_fit(model: ViT, images: int, blocks: int = 1) -> None:
    """Check that the attention weights of `blocks` blocks, (B, k, T, T) each, fit in memory."""
    if device_of(model).type == "cpu":
        needed = blocks * attention_bytes(model.config, images)
        advice = "use a smaller image size or fewer images at once"
        check_fits(needed, model.config, images, "Recording attention", advice)


def check_index(what: str, number: int, count: int) -> int:
    """Check an index such as a layer or head, counted from 0; a negative one counts from the end."""
    if not isinstance(number, int) or not -count <= number < count:
        raise InputError(
            f"{what} must be an integer from 0 to {count - 1}, or from -{count} to -1 to count from the end, "
            f"not {printable(number)}."
        )
    return number % count


def check_pixels(pixels: NDArray[np.uint8], count: int) -> None:
    """Check that the pixels to draw belong to the `count` images of a result."""
    if pixels.ndim != 4 or len(pixels) != count:
        raise InputError(
            f"pixels must hold the same {count} images as the result, as (B, H, W, C), but their shape is "
            f"{pixels.shape}; pass ImageBatch.pixels of the same images."
        )


def check_finite(what: str, values: NDArray[np.floating]) -> None:
    """Refuse NaN and infinity, which a broken model or image produces."""
    if not np.isfinite(values).all():
        count = int((~np.isfinite(values)).sum())
        raise InputError(
            f"{what} must be finite, but {count:,} of {values.size:,} values are NaN or infinity; check the "
            "images and the parameters of the model."
        )


def device_of(model: ViT) -> torch.device:
    """The device of the model's parameters."""
    return next(model.parameters()).device
