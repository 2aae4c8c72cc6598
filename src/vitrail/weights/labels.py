"""Matching a model's labels to the classes of a data set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vitrail.errors import InputError, printable
from vitrail.weights.match import join_names

_WORDNET_ID = re.compile(r"n\d{8}")


def match_labels(
    labels: Sequence[str] | None, outputs: int, classes: Sequence[str], notes: list[str]
) -> list[int]:
    """The model's output index for each class of the data.

    Classes are matched by name where both sides have names, otherwise by index.

    Args:
        labels: the names of the model's outputs; None if it has none.
        outputs: the number of the model's outputs.
        classes: the names of the data's classes.
        notes: receives a sentence if the match is not the obvious one.
    """
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
    only_model = [name for name in labels if name not in set(classes)]
    only_data = [name for name in classes if name not in set(labels)]
    raise InputError(
        "The model's labels are not the data's classes: only the model has "
        f"{join_names(only_model) or 'a duplicate name'}, only the data has "
        f"{join_names(only_data) or 'none'}. Rename the data's classes or the model's labels."
    )
