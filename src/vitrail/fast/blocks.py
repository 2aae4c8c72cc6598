"""The blocks of a ViT prepared for the fused forward pass.

norms           in bf16, their weight and bias are part of the product that follows
biases          of the second product of a branch are not added to the tokens: they are the same for all
                tokens, so their sum so far, the shift, is added inside the next norm
LayerScale      multiplied into the weights
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.fast.products import Product
from vitrail.fast.quantize import FP8_MAX, to_fp8
from vitrail.fast.variants import has_exact_gelu
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.layers import LayerScale

_HEADROOM = 2.0  # of a static scale: activations may be this much larger than in calibration

Ranges = Mapping[str, float]
"""The largest absolute input of a linear layer on the calibration images, by its name."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm, and the sum of the biases that the tokens lack."""

    shift: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    centered: bool
    factor: float | None = None
    """Quantizes the result to fp8."""

    def __call__(self, z: Tensor, parts: Tensor | None = None, *, dependent: bool = False) -> Tensor:
        """Add `parts` to tokens (M, D) and normalize them; see `vitrail.fast.kernels.norm_inference`."""
        from vitrail.fast.kernels.norm_inference import norm

        return norm(self, z, parts, dependent=dependent)


@dataclass(frozen=True, kw_only=True)
class FusedBlock:
    norm1: Norm
    qkv: Product
    attention: Attention
    out: Product
    norm2: Norm
    fc1: Product | None
    fc2: Product | None
    mlp: Callable[[Tensor], Tensor]
    """The MLP branch by its own code, where there is no `fc1`."""


class BlockBuilder:
    """Builds the blocks one after the other, and sums up the biases that the tokens lack.

    Args:
        model: in its own precision.
        copy: the model in the precision of the forward pass.
        ranges: quantizes the products with fp8, except the attention's output (its input would need a
            pass of its own to be quantized, which takes longer than fp8 saves).
        keep: names of layers that stay in bf16 nevertheless.
    """

    def __init__(self, model: ViT, copy: ViT, ranges: Ranges | None, keep: Collection[str]) -> None:
        self.ranges, self.keep = ranges, set(keep)
        parameter = next(copy.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.shift = torch.zeros(model.config.width, device=self.device)
        pairs = zip(model.blocks, copy.blocks, strict=True)
        self.blocks = [self._block(index, *pair) for index, pair in enumerate(pairs)]
        self.last_norm = self._last_norm(model)
        """The norm of Eq. 4; None where it is not the norm of all tokens."""

    def _block(self, index: int, block: Any, own: Any) -> FusedBlock:
        name = f"blocks.{index}"
        qkv_in, fc1_in, fc2_in = (
            self._factor(f"{name}.{layer}") for layer in ("attention.qkv", "mlp.fc1", "mlp.fc2")
        )
        weight, bias = block.attention.qkv.weight, block.attention.qkv.masked_bias()
        norm1, qkv = self._normed_product(block.norm1, weight, bias, qkv_in)
        out = self._branch_end(block.attention.out, block.scale1, None)
        parts: dict[str, Any] = {"norm1": norm1, "qkv": qkv, "out": out, "attention": own.attention}
        if not _is_papers(block.mlp):
            norm2 = self._norm(block.norm2, None)
            return FusedBlock(**parts, norm2=norm2, fc1=None, fc2=None, mlp=own.mlp_branch)
        norm2, fc1 = self._normed_product(block.norm2, block.mlp.fc1.weight, block.mlp.fc1.bias, fc1_in)
        bias = torch.zeros(len(fc1.weight), device=self.device) if fc1.bias is None else fc1.bias
        fc1 = replace(fc1, bias=bias, gelu=True, factor=fc2_in)
        fc2 = self._branch_end(block.mlp.fc2, block.scale2, fc2_in)
        return FusedBlock(**parts, norm2=norm2, fc1=fc1, fc2=fc2, mlp=own.mlp_branch)

    def _factor(self, layer: str) -> float | None:
        if self.ranges is None or layer in self.keep or layer not in self.ranges:
            return None
        return FP8_MAX / _HEADROOM / max(self.ranges[layer], 1e-6)

    def _normed_product(
        self, norm: Any, weight: Tensor, bias: Tensor | None, factor: float | None
    ) -> tuple[Norm, Product]:
        """A norm and the linear layer after it. (The scales of fp8 are for inputs with the norm's weight.)"""
        found = self._norm(norm, factor)
        weight = weight.detach().float()
        if factor is not None:
            return found, self._product(weight, bias, factor)
        shifted = weight @ found.bias
        bias = shifted if bias is None else shifted + bias.detach().float()
        one, zero = torch.ones_like(found.weight), torch.zeros_like(found.weight)
        return replace(found, weight=one, bias=zero), self._product(weight * found.weight, bias, None)

    def _norm(self, norm: Any, factor: float | None) -> Norm:
        bias = getattr(norm, "bias", None)
        centered = isinstance(norm, nn.LayerNorm)
        eps = norm.eps if norm.eps is not None else torch.finfo(norm.weight.dtype).eps
        weight = norm.weight.detach().float()
        bias = torch.zeros_like(weight) if bias is None else bias.detach().float()
        shift = self.shift.clone()
        return Norm(shift=shift, weight=weight, bias=bias, eps=eps, centered=centered, factor=factor)

    def _last_norm(self, model: ViT) -> Norm | None:
        norm: Any = model.norm
        if model.config.pool_norm != "before" or not isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
            return None
        return self._norm(norm, None)

    def _product(self, weight: Tensor, bias: Tensor | None, factor: float | None) -> Product:
        """A linear layer, whose input is quantized to fp8 with this factor if there is one."""
        weight = weight.detach().float()
        bias = None if bias is None else bias.detach().float()
        if factor is None:
            return Product(weight=weight.to(self.dtype), bias=bias)
        rows = FP8_MAX / weight.abs().amax(1).clamp(min=1e-12)  # (N,): a scale for each channel
        return Product(weight=to_fp8(weight, rows[:, None]), bias=bias, scales=1 / (rows * factor))

    def _branch_end(self, layer: nn.Linear, scale: nn.Module, factor: float | None) -> Product:
        """The second product of a branch, added to the tokens; its bias goes to the shift."""
        scales = scale.weight.detach().float() if isinstance(scale, LayerScale) else 1.0
        weight = layer.weight.detach().float()
        weight = weight * scales[:, None] if isinstance(scales, Tensor) else weight
        if layer.bias is not None:
            self.shift = self.shift + layer.bias.detach().float() * scales
        return replace(self._product(weight, None, factor), add=True)


def _is_papers(mlp: Any) -> bool:
    """Whether an MLP is two products with an exact GELU between, and nothing else."""
    return has_exact_gelu(mlp) and isinstance(mlp.norm, nn.Identity)
