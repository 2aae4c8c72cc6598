"""Parts of a twin that compute the same in less time, or for several processes (`vitrail.fast.executable`).

last block               computes only the tokens that the head reads: 2/12 of a block's products
shared draws             dropout of a batch that several processes share
residual stream in bf16  halves what every norm and every sum reads and writes; the statistics of the norms
                         and the weights stay in fp32
fused kernels            attention over few tokens, GELU and LayerNorm in one kernel each way, which also
                         add up the gradients of the biases before them (`vitrail.fast.kernels`)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.fast.executable import replace_modules, variant
from vitrail.model import ViT
from vitrail.model.attention import Attention
from vitrail.model.block import Block
from vitrail.model.config import ViTConfig
from vitrail.model.head import ClassPool
from vitrail.model.layers import MLP, DropPath
from vitrail.model.packing import Segments
from vitrail.model.position import RotaryPosition, Rotate, identity
from vitrail.model.tap import Tap
from vitrail.model.tokens import PatchDropout

NORM_FIRST = ("pre-norm", "parallel", "no-residual")
"""Blocks in which a norm's output goes into products only."""
MAX_TOKENS = 256  # of the attention kernels
MAX_FUSED = 128  # of those with norms of q and k, or rotary position embedding
_HEAD_WIDTHS = (32, 64)
_SHARED_MEMORY = {64: 48 * 1024, MAX_FUSED: 100 * 1024, MAX_TOKENS: 144 * 1024}  # bytes for so many tokens
_MAX_NORM = 4096  # the width of a norm


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
    twin.blocks[-1] = variant(LastBlock, twin.blocks[-1], read=count)
    return True


class LastBlock(Block):
    """The pre-norm block for its first tokens only: of the others, k and v are needed."""

    read: int
    """The tokens to compute."""

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


# ---- shared draws ---------------------------------------------------------------------------
#
# Torch draws the masks of a whole batch in one call, so an image's numbers depend on the batch they are drawn
# with. Each process therefore draws for all processes, from the same seed, and takes the rows of its own
# images: bit for bit what a single process draws for them.
#
# DropPath and patch dropout draw a few numbers for an image, so that costs nothing. Dropout draws one for
# every activation. On a CPU that is a small part of a step, also for a few processes. On GPUs, whose products
# are a thousand times as fast, the masks of eight processes would take about as long as the step, and a fused
# attention kernel draws only for the rows that it computes. There, a model with dropout keeps its own
# modules, and each process has a seed of its own. So do images in their own shape, which share no rows.


class Rows(Protocol):
    """Which rows of what is drawn for all processes are this one's."""

    @property
    def count(self) -> int: ...

    def take_rows(self, drawn: Tensor) -> Tensor: ...


def draw_for_all(twin: ViT, rows: Rows) -> None:
    """Let every module of a twin that draws random numbers draw for all processes."""
    shared: dict[type, type[nn.Module]] = {
        DropPath: _SharedDropPath,
        nn.Dropout: _SharedDropout,
        PatchDropout: _SharedPatchDropout,
    }

    def build(module: nn.Module) -> nn.Module | None:
        if isinstance(module, Attention) and module.dropout:
            drop = variant(_SharedDropout, nn.Dropout(module.dropout), rows=rows)
            return variant(_SharedAttention, module, dropout=0.0, weights=_SharedWeights(drop))
        if type(module) in shared and module.p:
            return variant(shared[type(module)], module, rows=rows)
        return None

    replace_modules(twin, build)


class _SharedDropPath(DropPath):
    rows: Rows

    def forward(self, branch: Tensor, images: Segments | None = None) -> Tensor:
        if not self.training:
            return branch
        drawn = super().forward(torch.ones(self.rows.count * len(branch), 1, 1, device=branch.device))
        return branch * (self.rows.take_rows(drawn) > 0) / (1 - self.p)


class _SharedPatchDropout(PatchDropout):
    rows: Rows

    def forward(self, z: Tensor) -> Tensor:
        if not self.training:
            return z
        tokens = torch.arange(z.shape[1], device=z.device)[:, None]
        drawn = super().forward(tokens.expand(self.rows.count * len(z), -1, 1))
        return z.gather(1, self.rows.take_rows(drawn).expand(-1, -1, z.shape[2]))


class _SharedDropout(nn.Dropout):
    rows: Rows

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * self.rows.take_rows(super().forward(x.new_ones(self.rows.count * len(x), *x.shape[1:])))


class _SharedAttention(Attention):
    """Attention that computes its weights explicitly in training, because they are dropped one by one."""

    def forward(self, z: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        self.explicit = int(self.training)
        return super().forward(z, context, **options)


class _SharedWeights(Tap):
    """The attention weights; some of them zero."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__(explicit=True)
        self.drop = drop

    def forward(self, weights: Tensor) -> Tensor:
        dropped: Tensor = self.drop(super().forward(weights))
        return dropped


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


def use_fused_kernels(twin: ViT, *, compiled: bool) -> None:
    """Compute attention over few tokens, GELU and norms by fused kernels in training. For bf16 on a GPU.

    Args:
        compiled: whether the twin will be compiled; the compiler fuses norms with what is around them.
    """
    c = twin.config
    attends = _attention_fits(c, _shared_memory(next(twin.parameters()).device))
    normalizes = not compiled and c.block in NORM_FIRST and c.width <= _MAX_NORM
    norms = {norm for block in twin.blocks for norm in (block.norm1, block.norm2)}
    rotation = _rotation(twin)

    def build(module: nn.Module) -> nn.Module | None:
        if attends and type(module) is Attention:
            return variant(ShortAttention, module, **rotation)
        if has_exact_gelu(module) and c.linear_bias:
            return variant(FusedMLP, module)
        if normalizes and type(module) is nn.LayerNorm and module in norms:
            return variant(FusedNorm, module)
        return None

    replace_modules(twin.blocks, build)


def has_exact_gelu(mlp: Any) -> bool:
    """Whether an MLP is two products with an exact GELU between."""
    activation = mlp.activation if type(mlp) is MLP and not mlp.middle else None
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


def _rotation(model: ViT) -> dict[str, Tensor]:
    """Cosines and sines of the rotation of all tokens, (T, d / 2) each; empty if they are not rotated."""
    half, position, nothing = model.config.d // 2, model.position, next(model.parameters()).new_empty(0)
    cos = sin = nothing = nothing.detach().float()
    if isinstance(position, RotaryPosition) and not position.adjacent:
        prefix = nothing.new_zeros(model.config.prefix, half)  # is not rotated
        cos, sin = (position.get_buffer(name)[:, :half] for name in ("cos", "sin"))  # the other half is equal
        cos, sin = torch.cat([prefix + 1, cos]).float(), torch.cat([prefix, sin]).float()
    return {"cos": cos, "sin": sin, "nothing": nothing}


class ShortAttention(Attention):
    """Attention in one kernel each way; the general one where anything is special."""

    cos: Tensor
    sin: Tensor
    nothing: Tensor

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

    def forward(self, z: Tensor) -> Tensor:
        if not (self.training and _in_bf16(z)):
            return super().forward(z)
        from vitrail.fast.kernels.gelu_training import gelu

        bias = self.fc1.bias
        hidden = gelu(F.linear(z, self.fc1.weight, bias.detach()), bias)  # (B, T, F)
        return self.out(self.fc2(self.norm(self.drop(self.hidden(hidden)))))


class FusedNorm(nn.LayerNorm):
    """LayerNorm with its output in bf16, in one kernel each way."""

    def forward(self, z: Tensor) -> Tensor:
        if not (self.training and _in_bf16(z)):
            return super().forward(z)
        from vitrail.fast.kernels.norm_training import layer_norm

        return layer_norm(z, self.weight, self.bias, self.eps)[0]
