"""What the figures about answers share: which class is asked about, and pictures with parts covered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError, printable
from vitrail.inspect.pictures import check_pictures
from vitrail.model import ViT

BATCH = 64  # pictures in one forward pass

Baseline = float | Sequence[float]


def check_answers(model: ViT, images: Tensor | None = None) -> None:
    """These figures are of models that choose one of several classes for a picture."""
    check_pictures(model, images)
    if model.config.classes < 2:
        got = f"one with classes={model.config.classes}"
        raise InputError(
            "The model must choose between classes.", got, "Give it a head with vitrail.surgery.reclass."
        )


def on_device(model: ViT, images: Tensor) -> Tensor:
    """The pictures where the model is; their graph, if they come with one, is not ours."""
    return images.detach().to(next(model.parameters()).device)


def log_probabilities(model: ViT, images: Tensor) -> Tensor:
    """(B, K), in float32 whatever the model computes in; large batches go through in parts."""
    logits = torch.cat([model(part) for part in images.split(BATCH)])
    return logits.float().log_softmax(dim=1)


def check_classes(what: str, given: Iterable[int] | Tensor, count: int, classes: int) -> Tensor:
    """A class for each of `count` pictures: (B,)."""
    found = np.asarray(given.cpu() if isinstance(given, Tensor) else list(given))
    if found.shape != (count,) or found.dtype.kind not in "iu":
        got = f"{found.dtype} of shape {found.shape}"
        raise InputError(
            f"{what} must be one class number for each of {count} pictures.", got, "Give as many."
        )
    if wrong := [int(one) for one in found if not 0 <= one < classes]:
        got = printable(", ".join(map(str, wrong)))
        raise InputError(f"{what} must be class numbers from 0 to {classes - 1}.", got, "Choose among these.")
    return torch.from_numpy(found.astype(np.int64))


def choose_target(answers: Tensor, target: int | Sequence[int] | Tensor | None) -> Tensor:
    """The class each picture is asked about (B,): the one given, or the model's own answer."""
    count, classes = answers.shape
    if target is None:
        return answers.argmax(dim=1)
    given = [target] * count if isinstance(target, int) else target
    return check_classes("target", given, count, classes).to(answers.device)


def colour_of(baseline: Baseline, images: Tensor) -> Tensor:
    """The colour that stands for nothing, (C, 1, 1), in the normalised units of the pictures."""
    values = [baseline] if isinstance(baseline, (int, float)) else list(baseline)
    C = images.shape[1]
    if len(values) not in (1, C) or not all(math.isfinite(value) for value in values):
        must = f"baseline must be one finite number, or one for each of {C} channels."
        raise InputError(must, printable(baseline), "0 is the mean colour after normalisation.")
    return torch.tensor(values, dtype=images.dtype, device=images.device).expand(C)[:, None, None]


def cover(images: Tensor, hidden: Tensor, colour: Tensor, patch: tuple[int, ...]) -> Tensor:
    """The pictures with patches painted over; `hidden` (B, h, w) says which.

    Pixels beside the last whole patch (remainder="cut") belong to none and stay.
    """
    mask = hidden.repeat_interleave(patch[0], 1).repeat_interleave(patch[1], 2)  # (B, h P, w P)
    spare = (0, images.shape[3] - mask.shape[2], 0, images.shape[2] - mask.shape[1])
    mask = torch.nn.functional.pad(mask, spare)[:, None]  # (B, 1, H, W)
    return torch.where(mask, colour, images)
