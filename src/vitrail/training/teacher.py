"""Knowledge distillation: the teacher and the student (Hinton et al. 2015; Touvron et al. 2020, DeiT)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.images.formats.sources import Dataset
from vitrail.images.normalize import build_normalize
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice
from vitrail.model.head import DistilledHead
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.digest import bundle_digest
from vitrail.weights.bundle.labels import match_labels


class Teacher:
    """A frozen model that predicts the student's images, after augmentation and mixing.

    Images are resized to its own size and normalized with its own mean and standard deviation. Its logits are
    in the order of the data's classes.
    """

    def __init__(self, bundle: Bundle, data: Dataset, channels: int, compute: ComputeDevice) -> None:
        self.preprocess = _check_teacher(bundle, data, channels)
        self.notes = list(bundle.notes)
        self.columns = torch.tensor(_class_columns(bundle, data, self.notes), device=compute.device)
        self.digest = bundle_digest(bundle)
        self.compute = compute
        model = copy.deepcopy(bundle.model)  # the caller's own model stays as it is
        self.model = model.to(compute.device, torch.float32).eval().requires_grad_(False)
        self.normalize = build_normalize(self.preprocess, compute.device)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, K) for images (B, C, H, W) with pixel values from 0 to 1."""
        size = self.preprocess.target
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        with torch.no_grad(), self.compute.autocast():
            logits: Tensor = self.model(self.normalize(images))
        return logits[:, self.columns].float()


class Student(nn.Module):
    """A model that returns two logits: one is trained with the labels, the other with the teacher.

    A head without a distillation token has one output, which is trained with both.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pooled, head = self.model.encode(images).pooled, self.model.head
        if isinstance(head, DistilledHead):
            return head.separate_logits(pooled)
        logits = head(pooled)
        return logits, logits


def _check_teacher(bundle: Bundle, data: Dataset, channels: int) -> Preprocess:
    """Check that a model can teach on this data; return its preprocessing."""
    config = bundle.model.config
    if bundle.preprocess is None or config.channels != channels:
        raise InputError(
            f"the teacher must take images of {channels} channel{'s' * (channels > 1)}, like the student; "
            f"this one takes {config.input}s of {config.channels}. Choose another, or pass "
            f"load(file, channels={channels}) as the teacher."
        )
    if data.multilabel:
        raise InputError("distillation needs exactly one class per image, and this data is multi-label.")
    return bundle.preprocess


def _class_columns(bundle: Bundle, data: Dataset, notes: list[str]) -> list[int]:
    """The teacher's class for each class of the data."""
    try:
        return match_labels(bundle.labels, bundle.model.config.classes, data.classes, notes)
    except InputError as error:
        raise InputError(f"the teacher must have the classes of the data. {error}") from error
