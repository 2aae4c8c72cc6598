"""A leaner training step, applied to a model from outside: its own code stays the paper's.

residual stream in bf16  halves what every norm and every sum reads and writes; the statistics of the norms
                         and the weights stay in fp32
fused kernels            attention over few tokens, GELU and LayerNorm in one kernel each way, which also
                         add up the gradients of the biases before them (`vitrail.training.kernels`)

Evaluation does not change: all of this is for modules in training mode.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.mlp import MLP
from vitrail.model.position import RotaryPosition, Rotate, identity
from vitrail.model.segments import Segments

MAX_TOKENS = 256  # of the attention kernels
MAX_FUSED = 128  # of those with norms of q and k, or rotary position embedding
_HEAD_WIDTHS = (32, 64)
_SHARED_MEMORY = {64: 48 * 1024, MAX_FUSED: 100 * 1024, MAX_TOKENS: 144 * 1024}  # bytes for so many tokens
_MAX_NORM = 4096  # the width of a norm
_NORM_FIRST = ("pre-norm", "parallel", "no-residual")  # a norm's output goes into products only


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


# ---- fused kernels --------------------------------------------------------------------------


def has_kernels() -> bool:
    """Whether Triton is installed, which the kernels are written in."""
    return find_spec("triton") is not None


def use_fused_kernels(model: ViT, *, compiled: bool) -> None:
    """Compute attention over few tokens, GELU and norms by fused kernels in training. For bf16 on a GPU.

    Args:
        compiled: whether the model will be compiled; the compiler fuses norms with what is around them.
    """
    c = model.config
    attends = _attention_fits(c, _shared_memory(next(model.parameters()).device))
    for block in model.blocks:
        if attends and type(block.attention) is Attention:
            block.attention.__class__ = ShortAttention
            cast(ShortAttention, block.attention).prepare(model)
        mlp = block.mlp
        if type(mlp) is MLP and not mlp.middle and _is_exact_gelu(mlp.activation) and c.linear_bias:
            mlp.__class__ = FusedMLP
        for norm in (block.norm1, block.norm2):
            fits = type(norm) is nn.LayerNorm and c.block in _NORM_FIRST and c.width <= _MAX_NORM
            if fits and not compiled:
                norm.__class__ = FusedNorm


def _is_exact_gelu(activation: nn.Module) -> bool:
    return isinstance(activation, nn.GELU) and activation.approximate == "none"


def _shared_memory(device: torch.device) -> int:
    """The bytes that a kernel can have on each multiprocessor of a GPU."""
    if device.type != "cuda":
        return max(_SHARED_MEMORY.values())
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _attention_fits(c: ViTConfig, shared_memory: int) -> bool:
    if c.position in ("pairwise", "relative") or c.attention_dropout or c.d not in _HEAD_WIDTHS:
        return False
    if c.qk_norm and c.norm != "layer":
        return False
    special = c.qk_norm or c.position.startswith("rotary")
    most = max((tokens for tokens, needed in _SHARED_MEMORY.items() if needed <= shared_memory), default=0)
    return c.tokens <= min(most, MAX_FUSED if special else MAX_TOKENS)


def _in_bf16(x: Tensor) -> bool:
    """Whether products of x are computed in bf16 on a GPU."""
    return (
        x.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    )


class ShortAttention(Attention):
    """Attention in one kernel each way; the general one where anything is special."""

    def prepare(self, model: ViT) -> None:
        """The rotation of each token, (T, d / 2): none for the prefix."""
        device = next(model.parameters()).device
        self.cos = self.sin = self.nothing = torch.empty(0, device=device)
        if isinstance(model.position, RotaryPosition) and not model.position.adjacent:
            prefix = torch.zeros(model.config.prefix, model.config.d // 2, device=device)
            half = model.config.d // 2  # the other half has the same angles
            self.cos = torch.cat([prefix + 1, model.position.get_buffer("cos")[:, :half]]).float()
            self.sin = torch.cat([prefix, model.position.get_buffer("sin")[:, :half]]).float()

    def forward(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | Segments | None = None,
        rotate: Rotate = identity,
    ) -> Tensor:
        tokens = z.shape[1]
        rotates = bool(self.cos.numel())
        special = context is not None or mask is not None or self.explicit or tokens > MAX_TOKENS
        special = special or (len(self.cos) != tokens if rotates else rotate is not identity)
        if special or not (self.training and _in_bf16(z)):
            return super().forward(z, context, mask=mask, rotate=rotate)
        from vitrail.training.kernels.attention import short_attention

        bias, norms, eps = self.qkv.masked_bias(), self.nothing, 0.0
        if isinstance(self.q_norm, nn.LayerNorm) and isinstance(self.k_norm, nn.LayerNorm):
            q, k, eps = self.q_norm, self.k_norm, self.q_norm.eps
            norms = torch.stack([q.weight, q.bias, k.weight, k.bias])
        qkv = F.linear(z, self.qkv.weight, None if bias is None else bias.detach())
        qkv = qkv.unflatten(-1, (3, self.head_count, -1))  # (B, T, 3, k, d)
        bias = self.nothing if bias is None else bias
        heads, _ = short_attention(qkv, bias, norms, self.cos, self.sin, self.scale, eps)
        return self.out(self.norm(heads.flatten(2)))


class FusedMLP(MLP):
    """The MLP with GELU in one kernel each way."""

    def forward(self, z: Tensor) -> Tensor:
        if not (self.training and _in_bf16(z)):
            return super().forward(z)
        from vitrail.training.kernels.gelu import gelu

        bias = self.fc1.bias
        hidden = gelu(F.linear(z, self.fc1.weight, bias.detach()), bias)  # (B, T, F)
        return self.out(self.fc2(self.norm(self.drop(self.hidden(hidden)))))


class FusedNorm(nn.LayerNorm):
    """LayerNorm with its output in bf16, in one kernel each way."""

    def forward(self, z: Tensor) -> Tensor:
        if not (self.training and _in_bf16(z)):
            return super().forward(z)
        from vitrail.training.kernels.norm import layer_norm

        return layer_norm(z, self.weight, self.bias, self.eps)[0]
