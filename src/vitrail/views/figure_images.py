"""What figures are computed from: images, target classes, log-probabilities, covered patches; and checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vitrail.base.errors import InputError, printable
from vitrail.images.decode import open_image, suppress_warnings
from vitrail.images.formats.stored_images import StoredImage
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.model_memory import attention_bytes, check_fits
from vitrail.weights.bundle.scores import Activation

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH = 64  # images in one forward pass
Target = int | Sequence[int] | Tensor | None  # a class for all images, or one each; None: the predicted one


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images after the model's resizing and cropping."""

    names: list[str]
    pixels: NDArray[np.uint8]
    """(B, H, W, C), for drawing."""
    images: Tensor
    """(B, C, H, W), the same images normalized: the input of the model."""


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


# ---- checks --------------------------------------------------------------------------------------


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


# ---- predictions and covered patches ----------------------------------------------------------------


def check_classifier(model: ViT, images: Tensor) -> None:
    """Check that the model is a classifier, and the images."""
    check_images(model, images)
    if model.config.classes < 2:
        raise InputError(
            "This figure needs a classifier with at least two classes, but the model has "
            f"classes={model.config.classes}; add a head with vitrail.surgery.reclass."
        )


def log_probabilities(model: ViT, images: Tensor, activation: Activation) -> Tensor:
    """Log-probabilities (B, K) in float32, computed in chunks of `BATCH` images."""
    return activate(torch.cat([model(part) for part in images.split(BATCH)]), activation)


def activate(logits: Tensor, activation: Activation) -> Tensor:
    """The log-probabilities of logits (..., K): by softmax, or of each class alone by sigmoid."""
    return logits.float().log_softmax(dim=-1) if activation == "softmax" else logsigmoid(logits.float())


def check_classes(what: str, indices: Iterable[int] | Tensor, count: int, classes: int) -> Tensor:
    """Check that there is one class index for each of `count` images: (B,)."""
    array = np.asarray(indices.cpu() if isinstance(indices, Tensor) else list(indices))
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise InputError(
            f"{what} must hold one integer class index for each of {count} images, but its dtype is "
            f"{array.dtype} and its shape {array.shape}."
        )
    if wrong := [int(index) for index in array if not 0 <= index < classes]:
        listed = printable(", ".join(map(str, wrong)))
        raise InputError(f"{what} must hold class indices from 0 to {classes - 1}, not {listed}.")
    return torch.from_numpy(array.astype(np.int64))


def choose_target(outputs: Tensor, target: Target) -> Tensor:
    """The class to explain for each image, (B,): the given one, or that of the largest output."""
    count, classes = outputs.shape
    if target is None:
        return outputs.argmax(dim=1)
    indices = [target] * count if isinstance(target, int) else target
    return check_classes("target", indices, count, classes).to(outputs.device)


def cover(images: Tensor, hidden: Tensor, patch: tuple[int, ...]) -> Tensor:
    """The images with the `hidden` patches (B, h, w) painted in the mean color, which normalization makes 0.

    Pixels beyond the last complete patch (remainder="cut") belong to no patch and stay as they are.
    """
    mask = hidden.repeat_interleave(patch[0], 1).repeat_interleave(patch[1], 2)  # (B, h P, w P)
    spare = (0, images.shape[3] - mask.shape[2], 0, images.shape[2] - mask.shape[1])
    return images.masked_fill(torch.nn.functional.pad(mask, spare)[:, None], 0)
