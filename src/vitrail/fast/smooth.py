"""Smoothing before int8 (Xiao et al. 2023, SmoothQuant): a model with the same answers, easier to quantize.

The input channels of a layer are divided by factors and the columns of its weights multiplied by them, so
that a channel with large values does not take the range of all others. The division costs nothing where a
linear operation is before it:

qkv, fc1   the norm before the branch, if nothing else reads it
out        the rows of v: attention only averages them
fc2        the rows of the value of a gated MLP; elsewhere a product with the factors' inverse is inserted,
           which takes time (`is_free`)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.fast.variants import NORM_FIRST
from vitrail.model import ViT
from vitrail.model.layers import MLP, GatedMLP


class Divide(nn.Module):
    """Divides each channel by its factor."""

    inverse: Tensor

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / factors)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inverse


def can_smooth(model: ViT, name: str) -> bool:
    """Whether the input of a layer can be divided by factors without changing the model's answers."""
    block: Any = model.get_submodule(".".join(name.split(".")[:2]))
    kind = ".".join(name.split(".")[2:])
    if kind in ("attention.qkv", "mlp.fc1"):
        norm = block.norm1 if kind == "attention.qkv" else block.norm2
        return model.config.block in NORM_FIRST and type(norm) in (nn.LayerNorm, nn.RMSNorm)
    if kind not in ("attention.out", "mlp.fc2"):
        return False
    between = block.attention.norm if kind == "attention.out" else block.mlp.norm
    known = kind == "attention.out" or isinstance(block.mlp, (MLP, GatedMLP))
    return known and isinstance(between, nn.Identity)  # a norm would undo the division


def is_free(model: ViT, name: str) -> bool:
    """Whether the division of a layer's input goes into weights that are there anyway."""
    block: Any = model.get_submodule(".".join(name.split(".")[:2]))
    return not name.endswith("mlp.fc2") or isinstance(block.mlp, GatedMLP)


def smooth(model: ViT, factors: Mapping[str, Tensor]) -> ViT:
    """A copy of the model with the same answers: inputs of layers divided by factors, weights multiplied."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, values in factors.items():
            if not can_smooth(model, name) or bool((values == 1).all()):
                continue
            block: Any = copied.get_submodule(".".join(name.split(".")[:2]))
            copied.get_submodule(name).weight *= values  # type: ignore[operator]
            _divide_input(block, ".".join(name.split(".")[2:]), values)
    return copied


def _divide_input(block: Any, kind: str, factors: Tensor) -> None:
    """Divide what a layer reads."""
    if kind in ("attention.qkv", "mlp.fc1"):
        norm = block.norm1 if kind == "attention.qkv" else block.norm2
        norm.weight /= factors
        if getattr(norm, "bias", None) is not None:
            norm.bias /= factors
    elif kind == "attention.out":
        _divide_rows(block.attention.qkv, factors)
    elif isinstance(block.mlp, GatedMLP):
        _divide_rows(block.mlp.fc1, factors)  # [gate; value]: the value is the second half
    else:
        block.mlp.hidden = Divide(factors)


def _divide_rows(layer: Any, factors: Tensor) -> None:
    """Divide the last outputs of a linear layer."""
    layer.weight[-len(factors) :] /= factors[:, None]
    if layer.bias is not None:
        layer.bias[-len(factors) :] /= factors
