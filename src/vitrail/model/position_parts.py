"""Parts of the position schemes: sines and cosines, rotation of q and k, tables of biases."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from vitrail.model.config import ViTConfig


def sincos(index: Tensor, width: int) -> Tensor:
    """[sin(p w_0), cos(p w_0), sin(p w_1), ...] with w_i = 10000^(-2i/width): (index, width).

    An odd width ends with a sine.
    """
    frequencies = 10_000 ** (-torch.arange(0, width, 2) / width)
    angles = index[:, None] * frequencies  # (index, width/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]


def side_by_side(down: Tensor, across: Tensor) -> Tensor:
    """For each patch, row by row, the vector of its grid row beside that of its column: (h w, 2 D')."""
    h, w = down.shape[0], across.shape[0]
    return torch.cat([down[:, None].expand(h, w, -1), across[None].expand(h, w, -1)], dim=-1).flatten(0, 1)


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor, prefix: int, *, adjacent: bool = False) -> Tensor:
    """Rotate the patches of q or k, (B, k, T, d), but not the first `prefix` tokens.

    Args:
        adjacent: whether channels 2i and 2i + 1 form a pair; otherwise i and i + d/2.
    """
    front, patches = heads[..., :prefix, :], heads[..., prefix:, :]
    if adjacent:
        turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = patches.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    rotated = patches * cos.to(heads.dtype) + turned * sin.to(heads.dtype)
    return torch.cat([front, rotated], dim=-2)


class PairwiseBias(nn.Module):
    """p_ij, one for each head and each pair of tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.heads, config.tokens, config.tokens))

    def forward(self) -> Tensor:
        return self.table  # (k, T, T)


class RelativeBias(nn.Module):
    """A bias for each offset; and three for pairs with prefix tokens: to a patch, from one, and both."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        (h, w), n = config.grid, config.prefix
        offsets = (2 * h - 1) * (2 * w - 1)
        down, across = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        down, across = down.flatten(), across.flatten()
        between = (down[:, None] - down + h - 1) * (2 * w - 1) + (across[:, None] - across + w - 1)  # (N, N)
        index = torch.empty(config.tokens, config.tokens, dtype=torch.long, device=between.device)
        index[n:, n:] = between
        index[:n, n:], index[n:, :n], index[:n, :n] = offsets, offsets + 1, offsets + 2
        self.register_buffer("index", index, persistent=False)
        self.table = nn.Parameter(torch.empty(config.heads, offsets + (3 if n else 0)))

    def forward(self) -> Tensor:
        return self.table[:, cast(Tensor, self.index)]  # (k, T, T)
