"""The Vision Transformer. Start with vit.py, which names the file of each part.

config.py, config_checks.py, presets.py and model_memory.py do without torch, so the names below are imported
on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitrail.base.moved import moved_name

if TYPE_CHECKING:
    from vitrail.model import surgery as surgery
    from vitrail.model.attention import attend as attend
    from vitrail.model.attention import attend_explicitly as attend_explicitly
    from vitrail.model.tap import edit as edit
    from vitrail.model.tap import record as record
    from vitrail.model.vit import Encoded as Encoded
    from vitrail.model.vit import ViT as ViT

_MODULES = {
    "Encoded": "vit",
    "ViT": "vit",
    "attend": "attention",
    "attend_explicitly": "attention",
    "edit": "tap",
    "record": "tap",
    "surgery": "surgery",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        return moved_name(__name__, name)
    module = import_module(f"vitrail.model.{_MODULES[name]}")
    value = module if name == _MODULES[name] else getattr(module, name)
    globals()[name] = value  # so that __getattr__ is not called again
    return value
