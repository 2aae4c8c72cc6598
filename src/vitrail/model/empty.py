"""A model whose parameters take no memory until a state dict is loaded with `assign=True`."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT


def build_empty_model(config: ViTConfig) -> ViT:
    """A ViT with parameters on the meta device, and buffers with their values on the CPU."""
    with _EmptyParameters():
        return ViT(config)


class _EmptyParameters(TorchFunctionMode):
    """Sends what `torch.empty` makes to the meta device; buffers are made with a dtype and stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("dtype") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
