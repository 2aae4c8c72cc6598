"""An erratum with its evidence, and helpers for the functions that compute evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.experiment.trial import one_thread
from vitrail.model import ViT, record
from vitrail.model.config import ViTConfig
from vitrail.model.create import create

Kind = Literal["wrong", "imprecise"]
Evidence = Mapping[str, Any]

NOTES = {
    "000": "slides with the four equations (DKRZ)",
    "001": "an article on the code of ViT, step by step",
    "002": "lecture slides with a practice on MNIST",
    "003": 'slides "Visual Transformers", from text to images',
    "004": "lecture slides of CMU 10-417",
}


@dataclass(frozen=True)
class Erratum:
    """A wrong or imprecise claim of a note."""

    note: str
    where: str
    kind: Kind
    claim: str
    """What the note says, paraphrased."""
    correction: str
    compute: Callable[[], Evidence]

    @property
    def name(self) -> str:
        return self.compute.__name__

    def evidence(self) -> Evidence:
        """The numbers, the same in every run; the global random state is unchanged."""
        with one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.compute()


ERRATA: list[Erratum] = []


def erratum(note: str, where: str, kind: Kind, *, claim: str, correction: str) -> Callable[..., Any]:
    """Decorator for a function that computes the evidence for an erratum."""

    def register(compute: Callable[[], Evidence]) -> Callable[[], Evidence]:
        ERRATA.append(Erratum(note, where, kind, claim, correction, compute))
        return compute

    return register


def tiny(**fields: Any) -> Any:
    """A small ViT with random parameters: 4 patches, D = 12, 3 heads, 7 classes."""
    base = {"width": 12, "depth": 1, "heads": 3, "patch": 4, "size": 8, "channels": 2, "classes": 7}
    model = ViT(ViTConfig(**{**base, **fields})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def embedded(model: ViT, images: Tensor) -> Tensor:
    """z_0 of Eq. 1."""
    with record(model, "embed") as tape:
        model(images)
    return tape["embed"]


@cache
def count_parameters(name: str, **fields: Any) -> int:
    """The number of parameters of a named model, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create(name, **fields).parameters())


def max_difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def outcome(attempt: Callable[[], Any]) -> str:
    """ "runs", or the type of the error."""
    try:
        attempt()
    except Exception as error:
        return type(error).__name__
    return "runs"
