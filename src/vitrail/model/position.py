"""Where each token stands: E_pos of Eq. 1, and what others use in its place.

Three ways in: a row added to each token (learned, learned2d, sincos1d, sincos2d), q and k turned by
their place (rotary), or a number added to the score of each pair (pairwise, relative).
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig


class Position(nn.Module):
    """No positions; and what every kind of position answers to."""

    def forward(self, z: Tensor) -> Tensor:
        """Tokens before the first block: (B, T, D)."""
        return z

    def again(self, z: Tensor) -> Tensor:
        """Tokens before every other block."""
        return z

    def turn(self, heads: Tensor) -> Tensor:
        """q or k, (B, k, T, d), where positions are rotary."""
        return heads


class AddedPosition(Position):
    """A row for each token, added; the kinds differ in where the rows come from.

    `rows` of the config says which tokens have one; the others get zeros.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.every = config.position_at == "every"
        self.prefix = config.prefix
        counts = {"all": config.prefix, "class": 1, "patches": 0}
        self.prefix_rows = counts[config.rows]  # they come first, as the class token does
        self.count = self.prefix_rows + config.patches

    def given_rows(self) -> Tensor:
        """The rows there are: (prefix rows + N, D)."""
        raise NotImplementedError

    def all_rows(self) -> Tensor:
        """E_pos with zeros for tokens without a row: (T, D)."""
        rows = self.given_rows()
        if self.prefix_rows == self.prefix:
            return rows
        zeros = rows.new_zeros(self.prefix - self.prefix_rows, rows.shape[1])
        return torch.cat([rows[: self.prefix_rows], zeros, rows[self.prefix_rows :]])

    def forward(self, z: Tensor) -> Tensor:
        return z + self.all_rows()

    def again(self, z: Tensor) -> Tensor:
        return z + self.all_rows() if self.every else z


class LearnedPosition(AddedPosition):
    """One learned row for each token: N + 1 with the class token, as in the paper."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(self.count, config.width))

    def given_rows(self) -> Tensor:
        return self.table


class LearnedPosition2D(AddedPosition):
    """Half of each row from the patch's row in the grid, half from its column (paper, D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        h, w = config.grid
        self.down = nn.Parameter(torch.empty(h, config.width // 2))
        self.across = nn.Parameter(torch.empty(w, config.width // 2))
        self.front = nn.Parameter(torch.empty(self.prefix_rows, config.width)) if self.prefix_rows else None

    def given_rows(self) -> Tensor:
        (h, _), (w, _) = self.down.shape, self.across.shape
        down = self.down[:, None].expand(h, w, -1)
        across = self.across[None].expand(h, w, -1)
        patches = torch.cat([down, across], dim=-1).flatten(0, 1)  # (N, D)
        return patches if self.front is None else torch.cat([self.front, patches])


class SinCosPosition(AddedPosition):
    """Fixed sines and cosines: of the token's number (1-D), or of its row and column (2-D)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        if config.position == "sincos1d":
            table = sincos(torch.arange(self.count), config.width)  # the class token is number 0
        else:
            h, w = config.grid
            down = sincos(torch.arange(h), config.width // 2)[:, None].expand(h, w, -1)
            across = sincos(torch.arange(w), config.width // 2)[None].expand(h, w, -1)
            patches = torch.cat([down, across], dim=-1).flatten(0, 1)
            table = torch.cat([torch.zeros(self.prefix_rows, config.width), patches])
        self.register_buffer("fixed", table, persistent=False)

    def given_rows(self) -> Tensor:
        return cast(Tensor, self.fixed)


def sincos(places: Tensor, width: int) -> Tensor:
    """[sin(p w_0), cos(p w_0), sin(p w_1), ...] with w_i = 10000^(-2i/width): (places, width)."""
    rates = 10_000 ** (-torch.arange(0, width, 2) / width)
    angles = places[:, None] * rates  # (places, width/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class RotaryPosition(Position):
    """q and k of a patch turned by its row and column, so that scores see only distances.

    Each quarter of a head holds as many angles: rows turn the first half, columns the second. For
    `rotary` a place is the number of the row or column; for DINOv3 it is scaled to -1 ... 1, and a
    full turn is part of the period.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix = config.prefix
        count = config.d // 4
        powers = 100.0 ** (torch.arange(count) / count)  # 100 is DINOv3's base, and fit for grids this small
        h, w = config.grid
        down, across = torch.arange(h), torch.arange(w)
        if config.position == "rotary-dinov3":
            down, across = (2 * math.pi * (2 * (at + 0.5) / len(at) - 1) for at in (down, across))
        grid = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1)  # (h, w, 2)
        angles = (grid[..., None] / powers).reshape(h * w, -1)  # (N, d/2): rows, then columns
        angles = torch.cat([angles, angles], dim=-1)  # (N, d): each pair is (i, i + d/2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turn(self, heads: Tensor) -> Tensor:
        prefix, patches = heads[..., : self.prefix, :], heads[..., self.prefix :, :]
        first, second = patches.chunk(2, dim=-1)
        cos, sin = cast(Tensor, self.cos).to(heads.dtype), cast(Tensor, self.sin).to(heads.dtype)
        turned = patches * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([prefix, turned], dim=-2)


class PairwiseBias(nn.Module):
    """p_ij of note 004: one learned number for each head and each pair of tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.heads, config.tokens, config.tokens))

    def forward(self) -> Tensor:
        return self.table  # (k, T, T)


class RelativeBias(nn.Module):
    """One learned number for each head and each distance (rows down, columns across) of patches.

    The prefix has three numbers of its own: from prefix to patch, from patch to prefix, within it.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        (h, w), n = config.grid, config.prefix
        distances = (2 * h - 1) * (2 * w - 1)
        down, across = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        down, across = down.flatten(), across.flatten()
        between = (down[:, None] - down + h - 1) * (2 * w - 1) + (across[:, None] - across + w - 1)  # (N, N)
        index = torch.empty(config.tokens, config.tokens, dtype=torch.long, device=between.device)
        index[n:, n:] = between
        index[:n, n:], index[n:, :n], index[:n, :n] = distances, distances + 1, distances + 2
        self.register_buffer("index", index, persistent=False)
        self.table = nn.Parameter(torch.empty(config.heads, distances + (3 if n else 0)))

    def forward(self) -> Tensor:
        return self.table[:, cast(Tensor, self.index)]  # (k, T, T)


def build_position(config: ViTConfig) -> Position:
    match config.position:
        case "learned":
            return LearnedPosition(config)
        case "learned2d":
            return LearnedPosition2D(config)
        case "sincos1d" | "sincos2d":
            return SinCosPosition(config)
        case "rotary" | "rotary-dinov3":
            return RotaryPosition(config)
        case "pairwise" | "relative" | "none":
            return Position()


def build_bias(config: ViTConfig) -> nn.Module | None:
    """The position bias of one block's attention."""
    match config.position:
        case "pairwise":
            return PairwiseBias(config)
        case "relative":
            return RelativeBias(config)
        case _:
            return None
