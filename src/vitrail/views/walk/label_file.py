"""Names for the classes of a model: from a file of names, or words for a text tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.base.errors import InputError, option, printable
from vitrail.images.classes import read_names
from vitrail.weights.bundle.bundle import Bundle


def name_classes(bundle: Bundle, given: str) -> Bundle:
    """The model with these names for its classes; a model with a text tower gets a head from them.

    Args:
        given: "ant,bee", or a file: a text file with a name on each line, or JSON with a list of names,
            names by index {"0": "tench", ...} or indices by name.
    """
    if bundle.has_text:
        from vitrail.weights.text.prompts import bake_prompts, read_prompts

        return bake_prompts(bundle, read_prompts(given, None, None))
    classes = bundle.model.config.classes
    if not classes:
        raise InputError(f"This model has no head, so it has no classes to name; remove {option('labels')}.")
    where = option("labels")
    content: Any = [name.strip() for name in given.split(",")]
    if Path(given).is_file() or Path(given).suffix.lower() in (".json", ".txt"):
        where, content = printable(given), read_names(Path(given))
    return replace(bundle, labels=_in_order(content, classes, where))


def _in_order(content: Any, classes: int, where: str) -> list[str]:
    """One name for each class, by its index, from a list, {"0": "tench"} or {"tench": 0}."""
    if isinstance(content, Mapping):
        if content and all(type(index) is int for index in content.values()):
            content = {str(index): name for name, index in content.items()}
        keys = [str(index) for index in range(classes)]
        missing = next((key for key in keys if key not in content), None)
        if missing is not None and len(content) == classes:
            raise InputError(f"{where} has no name for class {missing}; its keys must be 0 to {classes - 1}.")
        content = [content[key] for key in keys] if len(content) == classes else list(content)
    if not isinstance(content, list):
        raise InputError(f"{where} must hold a list of names, or an object with a name for each index.")
    if len(content) != classes:
        raise InputError(
            f"{where} has {len(content):,} names, but the model has {classes:,} classes; give one name for "
            "each, in the order of the classes."
        )
    names = [one[-1] if isinstance(one, list) and one else one for one in content]  # [WordNet ID, name]
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"{where} has no name for class {index}: {printable(repr(name), 60)}.")
    return names
