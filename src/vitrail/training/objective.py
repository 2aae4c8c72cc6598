"""The training objective: (1 - w) L(labels) + w L(teacher), the second term only with a teacher."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.images.classes import class_counts
from vitrail.images.formats.sources import Dataset, Split
from vitrail.images.normalize import build_normalize
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice
from vitrail.model.head import DistilledHead
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.digest import bundle_digest
from vitrail.weights.bundle.labels import match_labels


def build_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One-hot or multi-hot targets (B, K) with label smoothing, of labels (B,) or (B, K).

    Smoothing mixes a target with the uniform distribution: over the classes, or in multi-label data over yes
    and no. Targets are made for each batch: those of a million images of a thousand classes take 4 GB.
    """
    if labels.ndim == 2:
        return labels.float() * (1 - smoothing) + smoothing / 2
    labels = labels[:, None] == torch.arange(classes, device=labels.device)
    return labels.float() * (1 - smoothing) + smoothing / classes


def class_weights(split: Split, classes: int, settings: TrainConfig) -> Tensor:
    """The weight of each class in the loss (K,): 1, or proportional to 1 / frequency with mean 1."""
    if settings.class_weights == "none":
        return torch.ones(classes)
    counts = torch.from_numpy(class_counts(split, classes))
    inverse = 1 / counts.clamp(min=1).double()
    return (inverse * classes / inverse.sum()).float()


def loss_scale(labels: Tensor, weights: Tensor, settings: TrainConfig, ranks: ProcessGroup) -> Tensor | float:
    """The factor that makes the mean loss of a step the weighted mean of `F.cross_entropy`: sum w l / sum w.

    w is the weight of an image's class, before mixing and smoothing: mixing a pair keeps the sum of its
    weights, and torch does not smooth them either. The weights of binary cross-entropy have mean 1.

    Args:
        labels: (B,) or (B, K), those of all micro-batches of this process.
    """
    if settings.loss == "bce" or labels.ndim == 2:
        return 1.0
    return ranks.count / ranks.sum(weights[labels.long()].mean())


def per_image_loss(logits: Tensor, targets: Tensor, weights: Tensor, settings: TrainConfig) -> Tensor:
    """The loss of each image (B,), in float32."""
    logits = logits.float()
    if settings.loss == "cross-entropy":
        return -(targets * weights * logits.log_softmax(dim=1)).sum(dim=1)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (losses * weights).mean(dim=1)


def correct_predictions(logits: Tensor, labels: Tensor) -> Tensor:
    """1 for each correct prediction (B,); for multi-label images, the fraction of correct classes."""
    if labels.ndim == 2:
        return ((logits > 0) == labels.bool()).float().mean(dim=1)
    return (logits.argmax(dim=1) == labels).float()


def distillation_loss(logits: Tensor, teacher: Tensor, settings: TrainConfig) -> Tensor:
    """The distillation loss of each image (B,), as in DeiT (Touvron et al. 2020, Eq. 2 and 3).

    hard: the cross-entropy to the teacher's most likely class
    soft: tau^2 KL(softmax(teacher / tau) || softmax(logits / tau))
    """
    logits, teacher = logits.float(), teacher.float()
    if settings.distill == "hard":
        return F.cross_entropy(logits, teacher.argmax(dim=1), reduction="none")
    tau = settings.distill_temperature
    student, target = (logits / tau).log_softmax(dim=1), (teacher / tau).log_softmax(dim=1)
    return tau**2 * (target.exp() * (target - student)).sum(dim=1)


# ---- distillation ---------------------------------------------------------------------------


class Teacher:
    """A frozen model that predicts the student's images, after augmentation and mixing.

    Images are resized to its own size and normalized with its own mean and standard deviation. Its logits are
    in the order of the data's classes.
    """

    def __init__(self, bundle: Bundle, data: Dataset, channels: int, compute: ComputeDevice) -> None:
        config = bundle.model.config
        if bundle.preprocess is None or config.channels != channels:
            raise InputError(
                f"the teacher must take images of {channels} channel{'s' * (channels > 1)}, like the "
                f"student; this one takes {config.input}s of {config.channels}. Choose another, or pass "
                f"load(file, channels={channels}) as the teacher."
            )
        if data.multilabel:
            raise InputError("distillation needs exactly one class per image, and this data is multi-label.")
        self.preprocess, self.notes = bundle.preprocess, list(bundle.notes)
        try:
            columns = match_labels(bundle.labels, config.classes, data.classes, self.notes)
        except InputError as error:
            raise InputError(f"the teacher must have the classes of the data. {error}") from error
        self.columns = torch.tensor(columns, device=compute.device)
        """The teacher's class for each class of the data."""
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
