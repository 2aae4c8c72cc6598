"""Labels: matching a model's to the classes of a data set, and heads for other classes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vitrail.base.errors import InputError, option, printable
from vitrail.weights.families.match import join_names

if TYPE_CHECKING:
    from vitrail.model import ViT

_WORDNET_ID = re.compile(r"n\d{8}")


def match_labels(
    labels: Sequence[str] | None,
    outputs: int,
    classes: Sequence[str],
    notes: list[str],
    *,
    subset: bool = False,
) -> list[int]:
    """The model's output index for each class of the data.

    Classes are matched by name where both sides have names, otherwise by index.

    Args:
        labels: the names of the model's outputs; None if it has none.
        outputs: the number of the model's outputs.
        classes: the names of the data's classes.
        notes: receives a sentence if the match is not the obvious one.
        subset: whether the data may lack classes of the model.
    """
    if subset and (len(classes) != outputs or (labels is not None and set(classes) < set(labels))):
        return _match_subset(labels, outputs, classes, notes)
    if outputs != len(classes):
        raise InputError(
            f"The model predicts {outputs:,} classes and the data has {len(classes):,}; train a head for the "
            "data, or load the model with classes=0 and probe its features."
        )
    indices = list(range(outputs))
    if labels is None or list(labels) == list(classes):
        return indices
    if sorted(labels) == sorted(classes) and len(set(labels)) == outputs:
        notes.append("The data has the model's classes in another order; they were matched by name.")
        return [labels.index(name) for name in classes]
    # ImageNet's folders are named by WordNet ids such as n01440764, and sorted ids give the class order.
    has_ids = all(map(_WORDNET_ID.fullmatch, classes)) and not any(map(_WORDNET_ID.fullmatch, labels))
    if has_ids or list(classes) == [str(index) for index in indices]:
        first = f"{printable(classes[0])} is {printable(labels[0])}"
        notes.append(f"The data's classes have no names; they were matched by index: {first}.")
        return indices
    if subset:
        raise unknown_classes(labels, [name for name in classes if name not in set(labels)])
    only_model = [name for name in labels if name not in set(classes)]
    only_data = [name for name in classes if name not in set(labels)]
    raise InputError(
        "The model's labels are not the data's classes: only the model has "
        f"{join_names(only_model) or 'a duplicate name'}, only the data has "
        f"{join_names(only_data) or 'none'}. Rename the data's classes or the model's labels."
    )


def _match_subset(
    labels: Sequence[str] | None, outputs: int, classes: Sequence[str], notes: list[str]
) -> list[int]:
    """Match the classes of data that has not all of the model's, or several names for one of them."""
    names = [str(index) for index in range(outputs)] if labels is None else list(labels)
    index = {name: number for number, name in reversed(list(enumerate(names)))}
    unknown = [name for name in classes if name not in index]
    if labels is not None and len(unknown) == len(classes) and _are_numbers(classes, outputs):
        first = f"{printable(classes[0])} is {printable(names[int(classes[0])])}"
        notes.append(f"The data's classes have no names; they were matched by index: {first}.")
        return [int(name) for name in classes]
    if unknown and labels is None:
        raise InputError(
            f"The model has {outputs:,} classes without names, and the data has {len(classes):,} with names; "
            f"name the data's classes by the numbers of the model's, 0 to {outputs - 1}, or map them: "
            f"{option('map', {unknown[0]: '0'})}."
        )
    if unknown:
        raise unknown_classes(names, unknown)
    return [index[name] for name in classes]


def _are_numbers(classes: Sequence[str], outputs: int) -> bool:
    return all(name.isascii() and name.isdecimal() and len(name) < 10 for name in classes) and all(
        int(name) < outputs for name in classes
    )


def unknown_classes(labels: Sequence[str], unknown: Sequence[str]) -> InputError:
    """The error for classes of the data that the model does not have: which, and how to map them."""
    target = _nearest(unknown[0], labels) or labels[0]
    example = option("map", {printable(unknown[0]): printable(target)})
    have = f"{len(unknown):,} classes of the data are" if len(unknown) > 1 else "One class of the data is"
    return InputError(
        f"{have} not among the model's: {join_names(unknown)}. Map each to one of the model's, such as "
        f"{example}, or remove it from the data. The model's {len(labels):,} classes: {join_names(labels)}."
    )


def _nearest(name: str, choices: Sequence[str]) -> str | None:
    """The choice that looks most like a name, whatever its case."""
    near = difflib.get_close_matches(name.lower(), [choice.lower() for choice in choices], n=1, cutoff=0.5)
    return next(choice for choice in choices if choice.lower() == near[0]) if near else None


def _hint(name: str, choices: Sequence[str]) -> str:
    near = _nearest(name, choices)
    return f"{f'Did you mean {printable(near)!r}? ' if near else ''}Choose from: {join_names(choices)}."


def map_classes(
    classes: Sequence[str], mapping: Mapping[str, str], labels: Sequence[str] | None, outputs: int
) -> list[str]:
    """The data's classes, renamed by the user's mapping to names of the model's classes."""
    targets = [str(index) for index in range(outputs)] if labels is None else list(labels)
    for old, new in mapping.items():
        if old not in classes:
            raise InputError(f"The data has no class {printable(repr(old))} to map. {_hint(old, classes)}")
        if new not in targets:
            raise InputError(
                f"{printable(repr(old))} cannot be mapped to {printable(repr(new))}, which is not a class of "
                f"the model. {_hint(new, targets)}"
            )
    return [mapping.get(name, name) for name in classes]


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
