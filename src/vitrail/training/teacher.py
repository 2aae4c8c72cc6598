"""The model that another one learns from (Hinton et al. 2015; Touvron et al. 2020, DeiT)."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.sources import Dataset
from vitrail.errors import InputError
from vitrail.evaluation.run import match_classes
from vitrail.model import ViT
from vitrail.model.head import DistilledHead
from vitrail.preprocess import Preprocess
from vitrail.training.precision import Machine
from vitrail.weights.bundle import Bundle


class Teacher:
    """Answers for the pictures that the student sees, changed and mixed as they are.

    It gets them in its own size and by its own mean and spread, does not learn, and answers for the
    classes in the data's order.
    """

    def __init__(self, bundle: Bundle, data: Dataset, channels: int, machine: Machine) -> None:
        self.preprocess = check(bundle, data, channels)
        self.notes = list(bundle.notes)
        self.columns = torch.tensor(columns_of(bundle, data, self.notes), device=machine.device)
        self.digest = digest_of(bundle)
        self.machine = machine
        model = copy.deepcopy(bundle.model)  # the caller's own stays where and as it is
        self.model = model.to(machine.device, torch.float32).eval().requires_grad_(False)
        self.normalise = normaliser(self.preprocess, machine.device)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, K) for pictures (B, C, H, W) of levels from 0 to 1."""
        size = self.preprocess.target
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        with torch.no_grad(), self.machine.computing():
            logits: Tensor = self.model(self.normalise(images))
        return logits[:, self.columns].float()


class Student(nn.Module):
    """A model whose two answers are wanted apart: one learns the labels, the other the teacher.

    A head without a distillation token has one answer, which learns both.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pooled, head = self.model.encode(images).pooled, self.model.head
        if isinstance(head, DistilledHead):
            return head.both(pooled)
        logits = head(pooled)
        return logits, logits


def normaliser(preprocess: Preprocess, device: torch.device) -> Callable[[Tensor], Tensor]:
    """(level * scale - mean) / std, for pictures of levels from 0 to 1 on the device."""
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (preprocess.mean, preprocess.std)
    )
    return lambda images: (images * (255 * preprocess.scale) - mean) / std


def check(bundle: Bundle, data: Dataset, channels: int) -> Preprocess:
    """Whether this model can teach on this data; how it takes its pictures."""
    config = bundle.model.config
    if bundle.preprocess is None or config.channels != channels:
        raise InputError(
            f"The teacher must take the student's pictures, of {channels} channels.",
            f"one that takes {config.input}s of {config.channels}",
            f"Name another, or give load(file, channels={channels}) as the teacher.",
        )
    if data.several:
        raise InputError(
            "A teacher needs one class for each picture.",
            "pictures that can show several",
            "Leave out the teacher.",
        )
    return bundle.preprocess


def columns_of(bundle: Bundle, data: Dataset, notes: list[str]) -> list[int]:
    """The teacher's class for each class of the data."""
    try:
        return match_classes(bundle, data.classes, notes)
    except InputError as error:
        raise InputError(
            "The teacher must have the classes of the data.", error.args[1], "Train one on this data first."
        ) from error


def digest_of(bundle: Bundle) -> str:
    """All that a teacher's answers depend on: its weights, config, preprocessing and labels."""
    assert bundle.preprocess is not None
    facts = [asdict(bundle.model.config), asdict(bundle.preprocess), bundle.labels]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, tensor in sorted(bundle.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
