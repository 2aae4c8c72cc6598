"""A leaner training step, applied to a model from outside: its own code stays the paper's.

residual stream in bf16    halves what every norm and every sum reads and writes; the statistics of the norms
                           and the weights stay in fp32
GELU with one exponential  erf takes a GPU longer than reading and writing the values
attention over few tokens  its gradient in one kernel that holds a head as a whole

Evaluation does not change: all of this is for modules in training mode.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.position import Rotate, identity

MAX_TOKENS = 256
"""What `short_attention` holds at once."""


def use_bf16_residual(model: ViT) -> None:
    """Keep the tokens between blocks in bf16 during training. For training under autocast to bf16."""
    for block in model.blocks:
        block.register_forward_pre_hook(_cast_input)
        for name in ("norm1", "norm2", "scale1", "scale2"):
            getattr(block, name).register_forward_hook(_cast_output)


def _cast_input(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (args[0].bfloat16(), *args[1:]) if block.training else None


def _cast_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Autocast computes norms in fp32, and the factors of LayerScale are fp32."""
    return output.bfloat16() if module.training else output


# ---- GELU -----------------------------------------------------------------------------------


def use_fast_gelu(model: ViT) -> None:
    """Compute exact GELU with one exponential during training. For compiled models in bf16."""
    for module in model.blocks.modules():
        if isinstance(module, nn.GELU) and module.approximate == "none":
            module.__class__ = FastGELU


class FastGELU(nn.GELU):
    """x Phi(x) within 4e-7 of exact GELU, its gradient within 4e-7 too: far below the rounding of bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return _GELU.apply(x) if self.training else super().forward(x)


class _GELU(torch.autograd.Function):
    """GELU that saves its input only; compiled, each direction is a part of one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        cdf, _ = _normal(wide)
        return (wide * cdf).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        cdf, density = _normal(wide)
        return (gradient.float() * (cdf + wide * density)).to(x.dtype)


# Abramowitz and Stegun 7.1.26: erfc(z) = (a_1 t + ... + a_5 t^5) exp(-z^2) with t = 1 / (1 + p z), z >= 0,
# at most 1.5e-7 off.
_P = 0.3275911
_A = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal distribution at x: its cumulative distribution Phi(x), and its density."""
    exponential = torch.exp(-0.5 * x * x)
    t = 1 / (1 + _P * math.sqrt(0.5) * x.abs())
    series = _A[0] * t
    for a in _A[1:]:
        series = (series + a) * t
    tail = 0.5 * series * exponential  # Phi(-|x|)
    return torch.where(x < 0, tail, 1 - tail), exponential * (1 / math.sqrt(2 * math.pi))


# ---- attention ------------------------------------------------------------------------------


def use_short_attention(model: ViT) -> None:
    """Compute the gradient of attention over few tokens in one kernel. For compiled models in bf16."""
    c = model.config
    plain = c.position not in ("pairwise", "relative") and not c.qk_norm and not c.attention_dropout
    if not (plain and c.tokens <= MAX_TOKENS and c.d in (16, 32, 64) and find_spec("triton")):
        return
    for block in model.blocks:
        attention = block.attention
        if type(attention) is Attention:
            attention.__class__ = ShortAttention


class ShortAttention(Attention):
    """Attention whose gradient is one kernel; the general one where anything is special."""

    def forward(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        rotate: Rotate = identity,
    ) -> Tensor:
        special = context is not None or mask is not None or rotate is not identity or self.explicit
        if special or not (self.training and z.is_cuda):
            return super().forward(z, context, mask=mask, rotate=rotate)
        from vitrail.training.short_attention import short_attention

        qkv = self.qkv(z).unflatten(-1, (3, self.head_count, -1))  # (B, T, 3, k, d)
        if qkv.dtype != torch.bfloat16:
            return super().forward(z)
        return self.out(short_attention(qkv, self.scale).flatten(2))
