"""Vitrail: a Vision Transformer you can train, see through and ship.

import vitrail as vt

model = vt.create("B/16", classes=10)
logits = model(images)                                   # (B, 3, 224, 224) -> (B, 10)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# The public names and their modules, which are imported on first use: `import vitrail` is fast, and torch
# is imported only when it is needed.
_MODULES = {
    "Bundle": "vitrail.weights.bundle",
    "Card": "vitrail.weights.bundle",
    "ConfigError": "vitrail.errors",
    "Decoder": "vitrail.model",
    "DecoderConfig": "vitrail.model",
    "Encoded": "vitrail.model",
    "FileError": "vitrail.errors",
    "InputError": "vitrail.errors",
    "Predictor": "vitrail.predict",
    "Preprocess": "vitrail.images.preprocess",
    "Scores": "vitrail.weights.scores",
    "ViT": "vitrail.model",
    "ViTConfig": "vitrail.config",
    "VitrailError": "vitrail.errors",
    "accelerate": "vitrail.fast.accelerate",
    "check": "vitrail.course.exercises.notebook",
    "convert": "vitrail.weights.convert",
    "create": "vitrail.build",
    "cross_validate": "vitrail.experiment.folds",
    "edit": "vitrail.model",
    "evaluate": "vitrail.evaluation.run",
    "export": "vitrail.exporters.api",
    "find_lr": "vitrail.experiment.lr_finder",
    "generate": "vitrail.model",
    "load": "vitrail.weights.load",
    "preset": "vitrail.presets",
    "record": "vitrail.model",
    "study": "vitrail.experiment.study",
    "surgery": "vitrail.model",
    "sweep": "vitrail.experiment.sweep",
    "train": "vitrail.training.api",
    "walk": "vitrail.course.walk",
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
    from vitrail.build import create
    from vitrail.config import ViTConfig
    from vitrail.course.exercises.notebook import check
    from vitrail.course.walk import walk
    from vitrail.errors import ConfigError, FileError, InputError, VitrailError
    from vitrail.evaluation.run import evaluate
    from vitrail.experiment.folds import cross_validate
    from vitrail.experiment.lr_finder import find_lr
    from vitrail.experiment.study import study
    from vitrail.experiment.sweep import sweep
    from vitrail.exporters.api import export
    from vitrail.fast.accelerate import accelerate
    from vitrail.images.preprocess import Preprocess
    from vitrail.model import Decoder, DecoderConfig, Encoded, ViT, edit, generate, record, surgery
    from vitrail.predict import Predictor
    from vitrail.presets import preset
    from vitrail.training.api import train
    from vitrail.weights.bundle import Bundle, Card
    from vitrail.weights.convert import convert
    from vitrail.weights.load import load
    from vitrail.weights.scores import Scores


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # so that __getattr__ is not called again
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
