"""A new head that keeps the rows of the classes which a model knows by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.model import ViT


def rehead(model: ViT, labels: Sequence[str] | None, classes: Sequence[str]) -> tuple[ViT, int]:
    """The model with a linear head for these classes, and how many rows were kept from its own.

    Args:
        labels: the names of the model's classes; None if they are unknown.
        classes: the names of the new classes. A class that the model does not know has a row of zeros.
    """
    import torch

    from vitrail.model import surgery

    pairs = _known_classes(model, labels, classes)
    if not pairs:
        return surgery.reclass(model, len(classes)), 0
    new = surgery.reclass(model, len(classes), keep_projection=True)
    ours, theirs = (torch.tensor(indices) for indices in zip(*pairs, strict=True))
    with torch.no_grad():
        for name, parameter in new.head.named_parameters():
            if not name.startswith("fc1."):
                parameter[ours] = model.head.get_parameter(name)[theirs]
    return new, len(pairs)


def _known_classes(model: ViT, labels: Sequence[str] | None, classes: Sequence[str]) -> list[tuple[int, int]]:
    """The new and the old row of each class that the model knows by name."""
    if labels is None or model.config.head not in ("linear", "cosine") or not model.config.classes:
        return []
    rows = {_canonical(label): row for row, label in reversed(list(enumerate(labels)))}
    found = [_find_row(rows, name) for name in classes]
    return [(ours, theirs) for ours, theirs in enumerate(found) if theirs is not None]


def _find_row(rows: Mapping[str, int], name: str) -> int | None:
    """The row of a class; folders are often in the plural, "ants" for "ant"."""
    canonical = _canonical(name)
    return rows.get(canonical, rows.get(canonical.removesuffix("s")))


def _canonical(name: str) -> str:
    """The first of several synonyms, in lower case: "goldfish, Carassius auratus" is goldfish."""
    return name.split(",")[0].replace("_", " ").strip().casefold()
