"""Smoothing before int8 (Xiao et al. 2023, SmoothQuant): a model with the same answers, easier to quantize.

The input channels of a layer are divided by factors and the columns of its weights multiplied by them, so
that a channel with large values does not take the range of all others. The division costs nothing where a
linear operation is before it:

qkv, fc1   the norm before the branch, if nothing else reads it
out        the rows of v: attention only averages them
fc2        the rows of the value of a gated MLP; elsewhere a product with the factors' inverse is inserted
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.fast.quantize import Observed, smoothing
from vitrail.model import ViT
from vitrail.model.mlp import MLP, GatedMLP

_NORM_FIRST = ("pre-norm", "parallel", "no-residual")  # a norm's output goes into one product only


class Divide(nn.Module):
    """Divides each channel by its factor."""

    inverse: Tensor

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / factors)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inverse


def smooth(model: ViT, seen: Mapping[str, Observed], names: Collection[str]) -> tuple[ViT, dict[str, Tensor]]:
    """A copy of the model with factors moved into its weights, and the factors (K,) of the named layers.

    Layers whose input cannot be scaled have factors of 1.
    """
    copied = copy.deepcopy(model)
    factors = {name: torch.ones_like(seen[name].low) for name in names}
    with torch.no_grad():
        for index, block in enumerate(copied.blocks):
            for kind in ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2"):
                name = f"blocks.{index}.{kind}"
                if name not in factors:
                    continue
                layer: Any = block.get_submodule(kind)
                values = smoothing(layer.weight, seen[name])
                if _divide_input(block, kind, values, model.config.block):
                    layer.weight *= values
                    factors[name] = values
    return copied, factors


def _divide_input(block: Any, kind: str, factors: Tensor, order: str) -> bool:
    """Divide what a layer reads; whether that was possible."""
    if kind in ("attention.qkv", "mlp.fc1"):
        norm: Any = block.norm1 if kind == "attention.qkv" else block.norm2
        if order not in _NORM_FIRST or type(norm) not in (nn.LayerNorm, nn.RMSNorm):
            return False
        norm.weight /= factors
        if getattr(norm, "bias", None) is not None:
            norm.bias /= factors
        return True
    between = block.attention.norm if kind == "attention.out" else block.mlp.norm
    if not isinstance(between, nn.Identity):
        return False  # a norm would undo the division
    if kind == "attention.out":
        _divide_rows(block.attention.qkv, factors)
        return True
    if isinstance(block.mlp, GatedMLP):
        _divide_rows(block.mlp.fc1, factors)  # [gate; value]: the value is the second half
        return True
    if isinstance(block.mlp, MLP):
        block.mlp.hidden = Divide(factors)  # type: ignore[assignment]
        return True
    return False


def _divide_rows(layer: Any, factors: Tensor) -> None:
    """Divide the last outputs of a linear layer."""
    layer.weight[-len(factors) :] /= factors[:, None]
    if layer.bias is not None:
        layer.bias[-len(factors) :] /= factors
