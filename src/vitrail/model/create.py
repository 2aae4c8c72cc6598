"""Building a model by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from vitrail.model.presets import preset
from vitrail.model.vit import ViT


def create(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> ViT:
    """Build a ViT by name, with random weights: `create("B/16@384", classes=10)`.

    Args:
        name: a size of `vitrail.model.presets` with patch size and, after "@", image size.
        device: the device of its parameters; "meta" allocates no memory.
        dtype: the dtype of its parameters; float32 by default.
        fields: fields of ViTConfig, which override those of the name.
    """
    config = preset(name, **fields)
    with nullcontext() if device is None else torch.device(device):
        model = ViT(config)
        return model if dtype is None else model.to(dtype=dtype)
