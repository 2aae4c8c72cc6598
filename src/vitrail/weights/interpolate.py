"""Weights between two models (Wortsman et al. 2021, WiSE-FT): often more robust than either.

(1 - t) zero-shot + t fine-tuned        t from 0 to 1
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from vitrail.base.errors import InputError
from vitrail.base.fields import is_real, short_repr
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.head_rows import rehead

if TYPE_CHECKING:
    from vitrail.model import ViT

_TRAINING_ONLY = (
    "dropout",
    "attention_dropout",
    "patch_dropout",
    "drop_path",
    "init",
    "position_sigma",
    "layer_scale",
)


def interpolate(first: Bundle, second: Bundle, t: float) -> Bundle:
    """A bundle of the second's kind whose weights are t of the way from the first to the second."""
    if not is_real(t) or not 0 <= t <= 1:
        raise InputError(f"interpolate must be a number from 0 to 1, not {short_repr(t)}.")
    import copy

    import torch

    check_compatible(first, second)
    model = copy.deepcopy(second.model)
    start, end = _in_order(first, second).state_dict(), second.model.state_dict()
    mixed = {name: torch.lerp(start[name].to(end[name]), end[name], t) for name in end}
    model.load_state_dict(mixed)
    note = (
        f"Weights are {t:g} of the way from {first.card.source or 'one model'} to another of the same shape."
    )
    return replace(second, model=model, statistics=None, notes=[*second.notes, note])


def check_compatible(first: Bundle, second: Bundle) -> None:
    """Refuse models between which there is nothing: of another shape, or for other classes."""
    for one in fields(ViTConfig):
        values = [getattr(bundle.model.config, one.name) for bundle in (first, second)]
        if one.name not in _TRAINING_ONLY and values[0] != values[1]:
            raise InputError(
                f"Weights are interpolated between models of the same shape, but {one.name} is "
                f"{short_repr(values[0])} in one and {short_repr(values[1])} in the other; use a model and "
                "one that was fine-tuned from it."
            )
    if sorted(first.labels or []) != sorted(second.labels or []):
        raise InputError(
            "The two models have different classes, so their heads cannot be interpolated; use a model and "
            "one that was fine-tuned from it for the same classes."
        )


def _in_order(first: Bundle, second: Bundle) -> ViT:
    """The first model, its classes in the order of the second's: training takes that of the data."""
    labels = second.labels
    if labels is None or labels == first.labels or len(set(labels)) < len(labels):
        return first.model
    model, kept = rehead(first.model, first.labels, labels)
    if kept < len(labels):
        raise InputError("The classes of the two models cannot be matched by name; give both the same order.")
    return model
