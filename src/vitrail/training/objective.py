"""The training objective: (1 - w) L(labels) + w L(teacher), the second term only with a teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.images.classes import class_counts
from vitrail.images.formats.sources import Split
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig


def build_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One-hot or multi-hot targets (B, K) with label smoothing, of labels (B,) or (B, K).

    Smoothing mixes a target with the uniform distribution: over the classes, or, since each class of a
    multi-label image is a yes or no of its own, over these two.
    They are made for each batch: those of a million images of a thousand classes would take 4 GB.
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

    w is the weight of an image's class, before mixing and smoothing: mixing a pair leaves the sum of its
    weights as it is, and torch does not smooth them either. Binary cross-entropy is a mean over classes,
    whose weights have mean 1 for every image; and for multi-label targets torch divides by the number of
    images.

    Args:
        labels: (B,) or (B, K), those of all micro-batches of this process.
    """
    if settings.loss == "bce" or labels.ndim == 2:
        return 1.0
    return ranks.count / ranks.sum(weights[labels.long()].mean())


def per_image_loss(logits: Tensor, targets: Tensor, weights: Tensor, settings: TrainConfig) -> Tensor:
    """The loss of each image (B,), in float32."""
    logits = logits.float()
    match settings.loss:
        case "cross-entropy":
            return -(targets * weights * logits.log_softmax(dim=1)).sum(dim=1)
        case "bce":
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
