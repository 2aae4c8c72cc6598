"""The modules that public names had in 0.2: importing one works with a warning. To be removed after 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# vitrail.model and vitrail.weights.bundle still exist, without these names.
_MOVED = {
    "vitrail.build": ("create",),
    "vitrail.config": ("ViTConfig",),
    "vitrail.course": (),
    "vitrail.course.exercises": (),
    "vitrail.course.exercises.notebook": ("check",),
    "vitrail.course.walk": ("walk",),
    "vitrail.errors": ("ConfigError", "FileError", "InputError", "VitrailError"),
    "vitrail.evaluation.run": ("evaluate",),
    "vitrail.experiment.sweep": ("sweep",),
    "vitrail.model": (
        "Decoder",
        "DecoderConfig",
        "generate",
    ),  # a module that still exists, like weights.bundle
    "vitrail.presets": ("preset",),
    "vitrail.training.api": ("train",),
    "vitrail.weights.bundle": ("Bundle", "Card"),
    "vitrail.weights.convert": ("convert",),
    "vitrail.weights.scores": ("Scores",),
}


class MovedModules(MetaPathFinder, Loader):
    """Finds the old modules that no longer exist: it is asked after all other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_package = any(other.startswith(name + ".") for other in _MOVED)
        return ModuleSpec(name, self, is_package=is_package) if name in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = partial(moved_name, module.__name__)  # type: ignore[method-assign]


def moved_name(module: str, name: str) -> Any:
    """A public name that a module had in 0.2: what its `__getattr__` returns."""
    if name not in _MOVED[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    import vitrail

    text = f"{module}.{name} has moved; use vitrail.{name} (the old path goes after 0.3)."
    warnings.warn(text, FutureWarning, stacklevel=2)
    return getattr(vitrail, name)
