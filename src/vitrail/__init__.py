"""Vitrail: a Vision Transformer you can train, see through and ship.

import vitrail as vt

model = vt.create("B/16", classes=10)
logits = model(images)                                   # (B, 3, 224, 224) -> (B, 10)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Each public name and the module it lives in. They load when first used, so that `import vitrail`
# is quick and silent, and torch is loaded only by what needs it.
_HOMES = {
    "Bundle": "vitrail.weights.bundle",
    "Card": "vitrail.weights.bundle",
    "ConfigError": "vitrail.errors",
    "Decoder": "vitrail.model",
    "DecoderConfig": "vitrail.model",
    "Encoded": "vitrail.model",
    "FileError": "vitrail.errors",
    "InputError": "vitrail.errors",
    "Predictor": "vitrail.predict",
    "Preprocess": "vitrail.preprocess",
    "ViT": "vitrail.model",
    "ViTConfig": "vitrail.config",
    "VitrailError": "vitrail.errors",
    "convert": "vitrail.weights.convert",
    "create": "vitrail.build",
    "edit": "vitrail.model",
    "evaluate": "vitrail.evaluation.run",
    "generate": "vitrail.model",
    "load": "vitrail.weights.load",
    "preset": "vitrail.presets",
    "record": "vitrail.model",
    "study": "vitrail.labs.study",
    "surgery": "vitrail.model",
    "train": "vitrail.recipes.start",
    "walk": "vitrail.walkthrough",
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
    "ViT",
    "ViTConfig",
    "VitrailError",
    "convert",
    "create",
    "edit",
    "evaluate",
    "generate",
    "load",
    "preset",
    "record",
    "study",
    "surgery",
    "train",
    "walk",
]

if TYPE_CHECKING:
    from vitrail.build import create
    from vitrail.config import ViTConfig
    from vitrail.errors import ConfigError, FileError, InputError, VitrailError
    from vitrail.evaluation.run import evaluate
    from vitrail.labs.study import study
    from vitrail.model import Decoder, DecoderConfig, Encoded, ViT, edit, generate, record, surgery
    from vitrail.predict import Predictor
    from vitrail.preprocess import Preprocess
    from vitrail.presets import preset
    from vitrail.recipes.start import train
    from vitrail.walkthrough import walk
    from vitrail.weights.bundle import Bundle, Card
    from vitrail.weights.convert import convert
    from vitrail.weights.load import load


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
