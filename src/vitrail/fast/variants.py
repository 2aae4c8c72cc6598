"""Parts of a twin that compute the same in less time (`vitrail.fast.twin`).

last block               computes only the tokens that the head reads: 2/12 of a block's products
residual stream in bf16  halves what every norm and every sum reads and writes; the statistics of the norms
                         and the weights stay in fp32
fused kernels            attention over few tokens, GELU and LayerNorm in one kernel each way, which also
                         add up the gradients of the biases before them (`vitrail.fast.kernels`)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.fast.twin import replace_modules, take_parts
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.block import Block
from vitrail.model.config import ViTConfig
from vitrail.model.head import ClassPool
from vitrail.model.layers import MLP
from vitrail.model.packing import Segments
from vitrail.model.position import RotaryPosition, Rotate, identity

MAX_TOKENS = 256  # of the attention kernels
MAX_FUSED = 128  # of those with norms of q and k, or rotary position embedding
_HEAD_WIDTHS = (32, 64)
_SHARED_MEMORY = {64: 48 * 1024, MAX_FUSED: 100 * 1024, MAX_TOKENS: 144 * 1024}  # bytes for so many tokens
_MAX_NORM = 4096  # the width of a norm
_NORM_FIRST = ("pre-norm", "parallel", "no-residual")  # a norm's output goes into products only


# ---- the last block -------------------------------------------------------------------------


def tokens_read(model: ViT) -> int | None:
    """How many tokens of its last block a model's head reads; None if it may read all of them."""
    block: Any = model.blocks[-1]
    config = model.config
    if not isinstance(model.pool, ClassPool) or type(block) is not Block or block.attention.bias is not None:
        return None
    return model.pool.count if config.prefix >= model.pool.count and config.tokens > config.prefix else None


def shorten_last_block(twin: ViT) -> bool:
    """Let the last block compute only what the head reads; False if that is all of it.

    `encode` then returns no other tokens of it.
    """
    if (count := tokens_read(twin)) is None:
        return False
    twin.blocks[-1] = LastBlock(twin.blocks[-1], count)
    return True


class LastBlock(Block):
    """The pre-norm block for its first tokens only, which attend to all: of the others, k and v are needed.

    Args:
        read: the tokens to compute.
    """

    def __init__(self, block: nn.Module, read: int) -> None:
        nn.Module.__init__(self)
        take_parts(self, block)
        self.read = read

    def forward(self, z: Tensor, mask: Tensor | Segments | None = None, rotate: Rotate = identity) -> Tensor:
        if isinstance(mask, Segments):
            return super().forward(z, mask, rotate)
        y, count = self.norm1(z), self.read

        def rotate_context(tokens: Tensor) -> Tensor:
            return tokens if tokens.shape[2] == count else rotate(tokens)  # no prefix token is rotated

        rows = None if mask is None else mask[..., :count, :]
        heads = self.attention(y[:, :count], y, mask=rows, rotate=rotate_context)
        z = z[:, :count] + self._skip(self.scale1(self.drop(heads)), None)  # Eq. 2
        return self.out(z + self.mlp_branch(self.norm2(z)))  # Eq. 3


# ---- the residual stream --------------------------------------------------------------------


def use_bf16_residual(twin: ViT) -> None:
    """Keep the tokens between blocks in bf16 during training. For training under autocast to bf16."""
    for block in twin.blocks:
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


def use_fused_kernels(twin: ViT, *, compiled: bool) -> None:
    """Compute attention over few tokens, GELU and norms by fused kernels in training. For bf16 on a GPU.

    Args:
        compiled: whether the twin will be compiled; the compiler fuses norms with what is around them.
    """
    c = twin.config
    attends = _attention_fits(c, _shared_memory(next(twin.parameters()).device))
    normalizes = not compiled and c.block in _NORM_FIRST and c.width <= _MAX_NORM
    norms = {norm for block in twin.blocks for norm in (block.norm1, block.norm2)}

    def build(module: nn.Module) -> nn.Module | None:
        if attends and type(module) is Attention:
            return ShortAttention(module, twin)
        if type(module) is MLP and not module.middle and _is_exact_gelu(module.activation) and c.linear_bias:
            return FusedMLP(module)
        if normalizes and type(module) is nn.LayerNorm and module in norms:
            return FusedNorm(module)
        return None

    replace_modules(twin.blocks, build)


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

    def __init__(self, attention: Attention, model: ViT) -> None:
        nn.Module.__init__(self)
        take_parts(self, attention)
        device = next(model.parameters()).device
        self.cos = self.sin = self.nothing = torch.empty(0, device=device)  # rotation of tokens, (T, d / 2)
        if isinstance(model.position, RotaryPosition) and not model.position.adjacent:
            prefix = torch.zeros(model.config.prefix, model.config.d // 2, device=device)  # is not rotated
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
        from vitrail.fast.kernels.attention_kernel import short_attention

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

    def __init__(self, mlp: MLP) -> None:
        nn.Module.__init__(self)
        take_parts(self, mlp)

    def forward(self, z: Tensor) -> Tensor:
        if not (self.training and _in_bf16(z)):
            return super().forward(z)
        from vitrail.fast.kernels.gelu_training import gelu

        bias = self.fc1.bias
        hidden = gelu(F.linear(z, self.fc1.weight, bias.detach()), bias)  # (B, T, F)
        return self.out(self.fc2(self.norm(self.drop(self.hidden(hidden)))))


class FusedNorm(nn.LayerNorm):
    """LayerNorm with its output in bf16, in one kernel each way."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        nn.Module.__init__(self)
        take_parts(self, norm)

    def forward(self, z: Tensor) -> Tensor:
        if not (self.training and _in_bf16(z)):
            return super().forward(z)
        from vitrail.fast.kernels.norm_training import layer_norm

        return layer_norm(z, self.weight, self.bias, self.eps)[0]
