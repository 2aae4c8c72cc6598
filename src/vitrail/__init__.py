"""Vitrail: a Vision Transformer you can train, look inside and ship.

import vitrail as vt

model = vt.create("B/16", classes=10)
logits = model(images)                                   # (B, 3, 224, 224) -> (B, 10)
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitrail.base.moved import MovedModules
from vitrail.base.version import __version__ as __version__

sys.meta_path.append(MovedModules())

# The public names and their modules, which are imported on first use: `import vitrail` is fast, and torch
# is imported only when it is needed.
_MODULES = {
    "Bundle": "vitrail.weights.bundle.bundle",
    "Card": "vitrail.weights.bundle.bundle",
    "ConfigError": "vitrail.base.errors",
    "Decoder": "vitrail_course.decoder",
    "DecoderConfig": "vitrail_course.decoder",
    "Encoded": "vitrail.model",
    "FileError": "vitrail.base.errors",
    "InputError": "vitrail.base.errors",
    "Predictor": "vitrail.predict",
    "Preprocess": "vitrail.images.preprocess",
    "Scores": "vitrail.weights.bundle.scores",
    "ViT": "vitrail.model",
    "ViTConfig": "vitrail.model.config",
    "VitrailError": "vitrail.base.errors",
    "accelerate": "vitrail.fast.accelerate",
    "check": "vitrail_course.exercises.notebook",
    "convert": "vitrail.weights.conversion",
    "create": "vitrail.model.presets",
    "cross_validate": "vitrail.experiment.folds",
    "edit": "vitrail.model",
    "evaluate": "vitrail.evaluation.evaluate_model",
    "export": "vitrail.exporters.api",
    "find_lr": "vitrail.experiment.lr_finder",
    "generate": "vitrail_course.decoder",
    "load": "vitrail.weights.load",
    "preset": "vitrail.model.presets",
    "record": "vitrail.model",
    "study": "vitrail.experiment.study",
    "surgery": "vitrail.model",
    "sweep": "vitrail.experiment.halving_sweep",
    "train": "vitrail.training.start",
    "walk": "vitrail.views.walk",
}

__all__ = [
    "Bundle",
    "Card",
    "ConfigError",
    "Decoder",
    "DecoderConfig",
    "Encoded",
    "FileError",
    "InputError",
    "Predictor",
    "Preprocess",
    "Scores",
    "ViT",
    "ViTConfig",
    "VitrailError",
    "accelerate",
    "check",
    "convert",
    "create",
    "cross_validate",
    "edit",
    "evaluate",
    "export",
    "find_lr",
    "generate",
    "load",
    "preset",
    "record",
    "study",
    "surgery",
    "sweep",
    "train",
    "walk",
]

if TYPE_CHECKING:
    from vitrail.base.errors import ConfigError, FileError, InputError, VitrailError
    from vitrail.evaluation.evaluate_model import evaluate
    from vitrail.experiment.folds import cross_validate
    from vitrail.experiment.halving_sweep import sweep
    from vitrail.experiment.lr_finder import find_lr
    from vitrail.experiment.study import study
    from vitrail.exporters.api import export
    from vitrail.fast.accelerate import accelerate
    from vitrail.images.preprocess import Preprocess
    from vitrail.model import Encoded, ViT, edit, record, surgery
    from vitrail.model.config import ViTConfig
    from vitrail.model.presets import create, preset
    from vitrail.predict import Predictor
    from vitrail.training.start import train
    from vitrail.views.walk import walk
    from vitrail.weights.bundle.bundle import Bundle, Card
    from vitrail.weights.bundle.scores import Scores
    from vitrail.weights.conversion import convert
    from vitrail.weights.load import load


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("vitrail_course"):
            raise
        message = f"vitrail.{name} is part of the course; install it with: pip install vitrail-course"
        raise ModuleNotFoundError(message, name=error.name) from None
    globals()[name] = value  # so that __getattr__ is not called again
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
