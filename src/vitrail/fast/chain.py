"""The blocks for a few images: five kernels each, of which each one starts before the last one is done.

qkv       y -> q, k, v
attend    -> heads
out       z += heads W^T, and the statistics of the tokens for the norm
fc1       GELU(norm(z) W^T + b): the norm is part of the product
fc2       in parts, so that all multiprocessors work on so few tokens
norm1     of the next block: y = norm(z += parts)

For one image a product takes 4 to 7 microseconds, a norm 2, and the pause between two kernels 1. For larger
batches the products of libraries win (`vitrail.fast.fused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.fast.blocks import FusedBlock, Norm
from vitrail.fast.products import processors
from vitrail.model import ViT
from vitrail.model.position import Position

MAX_ROWS = 1024
"""Tokens of all images up to which it is measured whether this is faster."""
USUAL_ROWS = 512
"""Tokens up to which it is used where nothing is measured."""
_FEW_ROWS = 256
_SPLITS = 4
_HEAD_WIDTHS = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class ChainTiles:
    """How a product of few rows is cut; `splits` is the number of parts of K."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    splits: int = 1


@dataclass(frozen=True, kw_only=True)
class FoldedNorm:
    """Statistics and sums with which a product normalizes its input."""

    statistics: Tensor
    """(2, M, chunks): the mean, and the sum of squared deviations from it, of each chunk of the input."""
    sums: Tensor
    """W 1, (N,) in fp32."""
    shifted: Tensor
    """W s, (N,) in fp32; s is what the input lacks."""
    eps: float
    centered: bool
    """Whether the mean is subtracted, as LayerNorm does and RMSNorm does not."""


def can_chain(model: ViT, blocks: Sequence[FusedBlock]) -> bool:
    """Whether the blocks of a model fit these kernels: those of the paper do, in bf16, of usual widths."""
    c, position, device = model.config, model.position, next(model.parameters()).device
    if type(position).rotation is not Position.rotation or getattr(position, "every", False):
        return False  # positions act inside the blocks
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False  # no tensor memory accelerator
    for block in blocks:
        if block.fc1 is None or block.fc2 is None or len(block.fc1.weight) % 32:
            return False  # not the MLP of the paper
        if any(product.scales is not None for product in (block.qkv, block.fc1, block.fc2)):
            return False  # in fp8
        attention = block.attention
        norms = (attention.q_norm, attention.k_norm, attention.norm)
        if attention.bias is not None or not all(isinstance(norm, nn.Identity) for norm in norms):
            return False
    return c.d in _HEAD_WIDTHS and c.width % 32 == 0 and c.heads_width % 32 == 0


def load_operations() -> Any:
    """Import the kernels of a chain, which need Triton."""
    from vitrail.fast.kernels import chain_products

    return chain_products


def choose_tiles(rows: int, weight: Tensor, *, parts: bool = False, add: bool = False) -> ChainTiles:
    """The fastest tiles that were measured for so many rows, of those whose columns divide N (H200, B/16)."""
    N, K = weight.shape
    few = rows <= _FEW_ROWS

    def columns(*wanted: int) -> int:
        return next(one for one in (*wanted, 64, 32) if N % one == 0)

    if parts:
        width = columns(128)
        tiles = -(-rows // 64) * (N // width)
        splits = max(1, min(_SPLITS, processors(weight.device) // tiles, K // 128))
        return ChainTiles(
            rows=64, columns=width, depth=64 if few else 128, stages=6 if few else 3, splits=splits
        )
    if add:
        return ChainTiles(rows=64, columns=columns(32 if few else 64), depth=128, stages=6 if few else 4)
    if few and N <= 3 * K:
        return ChainTiles(rows=128, columns=columns(64), depth=64, stages=6)
    if few or N <= 3 * K:
        return ChainTiles(rows=64, columns=columns(128), depth=128, stages=3)
    return ChainTiles(rows=128, columns=columns(128), depth=64, warps=8, stages=6)


class Chain:
    """Tokens (B, T, D) to tokens after the last block.

    Args:
        last_norm: the norm of the tokens after the last block, if there is one.
        read: how many tokens of the last block are needed; None for all.
    """

    def __init__(self, blocks: Sequence[FusedBlock], last_norm: Norm | None, read: int | None) -> None:
        self.blocks, self.last_norm, self.read = blocks, last_norm, read
        self._constants = [
            (block.fc1.weight.float().sum(1), block.fc1.weight.float() @ block.norm2.shift)
            for block in blocks
            if block.fc1 is not None
        ]

    def __call__(self, z: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Tokens after the last block, and after the last norm if there is one."""
        width = z.shape[-1]
        parts, y = None, self.blocks[0].norm1(z.view(-1, width), dependent=True)
        for index, block in enumerate(self.blocks):
            z, parts = self._run_block(index, block, z, y)
            after = self.blocks[index + 1].norm1 if index + 1 < len(self.blocks) else self.last_norm
            if after is not None:
                y = after(z.view(-1, width), parts, dependent=True)
        if self.last_norm is None:
            assert parts is not None
            return (z.float() + parts.sum(0).view_as(z)).to(z.dtype), None
        return z, y.view_as(z)

    def _run_block(self, index: int, block: FusedBlock, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 2 and 3, but for the sum of the parts that are returned."""
        ops = load_operations()
        assert block.fc1 is not None
        assert block.fc2 is not None
        images, tokens, _ = z.shape
        read = tokens if self.read is None or index < len(self.blocks) - 1 else self.read
        qkv = ops.project(y, block.qkv.weight, choose_tiles(len(y), block.qkv.weight), bias=block.qkv.bias)
        attention, qkv = block.attention, qkv.view(images, tokens, -1)
        heads = ops.attend_first(qkv, attention.head_count, attention.scale, read)
        z = z[:, :read].contiguous()
        flat = z.view(-1, z.shape[-1])
        tiles = choose_tiles(len(flat), block.out.weight, add=True)
        statistics = ops.add_project(heads, block.out.weight, flat, block.norm2.shift, tiles)
        sums, shifted = self._constants[index]
        norm = FoldedNorm(
            statistics=statistics,
            sums=sums,
            shifted=shifted,
            eps=block.norm2.eps,
            centered=block.norm2.centered,
        )
        tiles = choose_tiles(len(flat), block.fc1.weight)
        hidden = ops.project(flat, block.fc1.weight, tiles, bias=block.fc1.bias, norm=norm, gelu=True)
        tiles = choose_tiles(len(flat), block.fc2.weight, parts=True)
        return z, ops.project_in_parts(hidden, block.fc2.weight, tiles)
