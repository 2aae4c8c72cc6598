"""A slip of a note, or a point left open, with the function that shows it; and what those functions need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.build import create
from vitrail.config import ViTConfig
from vitrail.labs.trial import one_thread
from vitrail.model import ViT, record

Kind = Literal["wrong", "left open"]
Evidence = Mapping[str, Any]

NOTES = {
    "000": "slides with the four equations (DKRZ)",
    "001": "an article that walks through the code of ViT",
    "002": "lecture slides with a practice on MNIST",
    "003": 'slides "Visual Transformers", from text to pictures',
    "004": "lecture slides of CMU 10-417",
}


@dataclass(frozen=True)
class Erratum:
    """One slip or open point."""

    note: str
    where: str
    kind: Kind
    says: str
    """In our words."""
    holds: str
    shown: Callable[[], Evidence]

    @property
    def name(self) -> str:
        return self.shown.__name__

    def evidence(self) -> Evidence:
        """The numbers, the same in every run; the caller's chance is left as it was."""
        with one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.shown()


ERRATA: list[Erratum] = []


def erratum(note: str, where: str, kind: Kind, *, says: str, holds: str) -> Callable[..., Any]:
    """The function below is the evidence for this."""

    def enter(shown: Callable[[], Evidence]) -> Callable[[], Evidence]:
        ERRATA.append(Erratum(note, where, kind, says, holds, shown))
        return shown

    return enter


def tiny(**fields: Any) -> Any:
    """A small ViT, every parameter of which matters: 4 patches, D = 12, 3 heads, 7 classes."""
    base = {"width": 12, "depth": 1, "heads": 3, "patch": 4, "size": 8, "channels": 2, "classes": 7}
    model = ViT(ViTConfig(**{**base, **fields})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def embedded(model: ViT, images: Tensor) -> Tensor:
    """z_0."""
    with record(model, "embed") as tape:
        model(images)
    return tape["embed"]


@cache
def count(name: str, **fields: Any) -> int:
    """The parameters of a named model, none of them made."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create(name, **fields).parameters())


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def outcome(attempt: Callable[[], Any]) -> str:
    """Whether it runs, or which error comes."""
    try:
        attempt()
    except Exception as error:
        return type(error).__name__
    return "runs"
