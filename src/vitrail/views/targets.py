"""Shared helpers of the figures about predictions: target classes, log-probabilities, covered patches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vitrail.base.errors import InputError, printable
from vitrail.model import ViT
from vitrail.views.figure_images import check_images
from vitrail.weights.bundle.scores import Activation

BATCH = 64  # images in one forward pass

Baseline = float | Sequence[float]


def check_classifier(model: ViT, images: Tensor | None = None) -> None:
    """Check that the model is a classifier, and the images if they are given."""
    check_images(model, images)
    if model.config.classes < 2:
        raise InputError(
            "This figure needs a classifier with at least two classes, but the model has "
            f"classes={model.config.classes}; add a head with vitrail.surgery.reclass."
        )


def on_device(model: ViT, images: Tensor) -> Tensor:
    """The images on the device of the model, detached from any graph."""
    return images.detach().to(next(model.parameters()).device)


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


def choose_target(outputs: Tensor, target: int | Sequence[int] | Tensor | None) -> Tensor:
    """The class to explain for each image, (B,): the given one, or the predicted class."""
    count, classes = outputs.shape
    if target is None:
        return outputs.argmax(dim=1)
    indices = [target] * count if isinstance(target, int) else target
    return check_classes("target", indices, count, classes).to(outputs.device)


def baseline_color(baseline: Baseline, images: Tensor) -> Tensor:
    """The baseline color, (C, 1, 1), in the normalized units of the images."""
    values = [baseline] if isinstance(baseline, (int, float)) else list(baseline)
    C = images.shape[1]
    if len(values) not in (1, C) or not all(math.isfinite(value) for value in values):
        raise InputError(
            f"baseline must be one finite number, or one for each of {C} channels, not "
            f"{printable(baseline)}; 0 is the mean color after normalization."
        )
    return torch.tensor(values, dtype=images.dtype, device=images.device).expand(C)[:, None, None]


def cover(images: Tensor, hidden: Tensor, color: Tensor, patch: tuple[int, ...]) -> Tensor:
    """The images with the `hidden` patches (B, h, w) painted over.

    Pixels beyond the last complete patch (remainder="cut") belong to no patch and stay as they are.
    """
    mask = hidden.repeat_interleave(patch[0], 1).repeat_interleave(patch[1], 2)  # (B, h P, w P)
    spare = (0, images.shape[3] - mask.shape[2], 0, images.shape[2] - mask.shape[1])
    mask = torch.nn.functional.pad(mask, spare)[:, None]  # (B, 1, H, W)
    return torch.where(mask, color, images)
