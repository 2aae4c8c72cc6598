"""What is minimised: (1 - w) L(labels) + w L(teacher), the second only where there is a teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.sources import Split
from vitrail.training.settings import TrainConfig


def targets_of(split: Split, classes: int, settings: TrainConfig) -> Tensor:
    """One row for each picture (N, K): 1 for what it shows, some of it spread over all classes."""
    labels = torch.from_numpy(split.labels)
    hot = labels.float() if labels.ndim == 2 else F.one_hot(labels, classes).float()
    return hot * (1 - settings.smoothing) + settings.smoothing / classes


def weights_of(split: Split, classes: int, settings: TrainConfig) -> Tensor:
    """How much each class counts (K,): all alike, or the rarer the more, 1 on average."""
    if settings.class_weights == "none":
        return torch.ones(classes)
    labels = torch.from_numpy(split.labels)
    counts = labels.sum(0) if labels.ndim == 2 else labels.bincount(minlength=classes)
    rare = 1 / counts.clamp(min=1).double()
    return (rare * classes / rare.sum()).float()


def loss_of(logits: Tensor, targets: Tensor, weights: Tensor, settings: TrainConfig) -> Tensor:
    """A loss for each picture (B,), in float32."""
    logits = logits.float()
    match settings.loss:
        case "cross-entropy":
            return -(targets * weights * logits.log_softmax(dim=1)).sum(dim=1)
        case "bce":
            each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            return (each * weights).mean(dim=1)


def distance_of(logits: Tensor, teacher: Tensor, settings: TrainConfig) -> Tensor:
    """How far each answer is from the teacher's (B,), as in DeiT (Touvron et al. 2020, Eq. 2 and 3).

    hard: the cross-entropy to the class that the teacher would name
    soft: tau^2 KL(softmax(teacher / tau) || softmax(logits / tau))
    """
    logits, teacher = logits.float(), teacher.float()
    if settings.distill == "hard":
        return F.cross_entropy(logits, teacher.argmax(dim=1), reduction="none")
    tau = settings.distill_temperature
    ours, theirs = (logits / tau).log_softmax(dim=1), (teacher / tau).log_softmax(dim=1)
    return tau**2 * (theirs.exp() * (theirs - ours)).sum(dim=1)
