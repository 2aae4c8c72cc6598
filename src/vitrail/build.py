"""From a name to a model."""

from __future__ import annotations

from typing import Any

from vitrail.model import ViT
from vitrail.presets import preset


def create(name: str, **fields: Any) -> ViT:
    """Build a ViT by name, freshly initialised: `create("B/16@384", classes=10)`.

    Any field of ViTConfig can be given by keyword; it goes before what the name says. The name's
    grammar and the sizes are in `vitrail.presets`. To build without allocating memory, call it
    under `with torch.device("meta"):`.
    """
    return ViT(preset(name, **fields))
