"""Position schemes: E_pos of Eq. 1, and what other models use instead.

A scheme is one class. It adds a row to each token (`rows`), rotates q and k (`rotation`), or adds a bias to
the attention scores of each block (`bias`). The same class resamples its parameters to another patch
grid (`resize`) and compares positions (`similarity`), so that no code outside this file depends on which
scheme a model has.

To add one: write the class, add it to POSITIONS, describe it in `config.POSITIONS`, and give it a row in
tests/model/test_position.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.model.config import ViTConfig, format_sides
from vitrail.model.position_parts import PairwiseBias, RelativeBias, apply_rotary, side_by_side, sincos
from vitrail.model.resample import ResizeOptions, multiply_grid, resize_grid, scalar_tensor

Grid = tuple[int, ...]
State = dict[str, Tensor]
Rotate = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


class Position(nn.Module):
    """position="none": tokens are a set without order. Also the interface of every other scheme."""

    equation: ClassVar[str] = ""
    """How the position is used, in the paper's notation."""
    meaning: ClassVar[str] = ""
    """How the position is used, in words."""
    measure: ClassVar[str] = ""
    """The name of what `similarity` returns; empty if there is nothing to compare."""
    fixed_grid: ClassVar[str] = ""
    """Why the scheme supports one image size only; empty if it supports others."""
    bias: ClassVar[type[PairwiseBias | RelativeBias] | None] = None
    """The module that returns one block's attention bias, (k, T, T)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix, self.grid = config.prefix, config.grid
        self.resize_options: ResizeOptions | None = None
        """Set by `ViT.accept_any_size`: how learned rows are resampled to the grid of each batch."""

    def forward(self, z: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, T, D) before the first block."""
        return z

    def before_block(self, z: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, T, D) before every other block."""
        return z

    def rotation(self, grid: Grid) -> Rotate:
        """The function applied to q and k, (B, k, T, d), in every block."""
        return identity

    def packed_rotation(self, grids: Iterable[Grid]) -> Rotate:
        """The rotation for the tokens of several images in one sequence, each on its own grid."""
        return identity

    @classmethod
    def resize(cls, state: State, old: ViTConfig, new: ViTConfig, **options: Any) -> None:
        """Resample the learned positions in a state dict from the old grid to the new one, in place.

        Schemes that are computed from the grid have none.
        """

    @classmethod
    def add_prefix_tokens(cls, state: State, old: ViTConfig, new: ViTConfig) -> None:
        """Add positions for new prefix tokens to a state dict, in place."""

    def similarity(self, blocks: Iterable[nn.Module]) -> Tensor:
        """Between all tokens (T, T) or all patches (N, N); (L, k, T, T) if blocks and heads differ.

        Empty if there is nothing to compare.
        """
        return torch.empty(0)


class AddedPosition(Position):
    """z_0 = [x_class; x_p E] + E_pos: a row is added to each token. Subclasses define `rows`.

    `config.rows` says which prefix tokens have a row; the others get zeros.
    """

    equation = "s = {e} + E_pos"
    meaning = "E_pos adds each token's position to it, one row per token."
    measure = "cosine similarity"

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.every = config.position_at == "every"
        self.prefix_rows = {"all": config.prefix, "class": 1, "patches": 0}[config.rows]

    @abstractmethod
    def rows(self, grid: Grid) -> Tensor:
        """The position rows, those of the prefix first: (prefix rows + N, D)."""

    def all_rows(self, grid: Grid) -> Tensor:
        """E_pos, with zeros for prefix tokens without a row: (T, D)."""
        rows = self.rows(grid)
        if self.prefix_rows == self.prefix:
            return rows
        zeros = rows.new_zeros(self.prefix - self.prefix_rows, rows.shape[1])
        return torch.cat([rows[: self.prefix_rows], zeros, rows[self.prefix_rows :]])

    def forward(self, z: Tensor, grid: Grid) -> Tensor:
        return z + self.all_rows(grid)

    def before_block(self, z: Tensor, grid: Grid) -> Tensor:
        return z + self.all_rows(grid) if self.every else z

    def similarity(self, blocks: Iterable[nn.Module]) -> Tensor:
        """Cosines of the rows of E_pos, (T, T); a zero row has similarity 0 with all, itself included."""
        rows = self.all_rows(self.grid).double()
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        return rows @ rows.T

    @classmethod
    def add_prefix_tokens(cls, state: State, old: ViTConfig, new: ViTConfig) -> None:
        for name in ("position.table", "position.front"):
            if name in state and new.rows == "all":
                rows = state[name]
                zeros = rows.new_zeros(new.prefix - old.prefix, old.width)
                state[name] = torch.cat([rows[: old.prefix], zeros, rows[old.prefix :]])


class LearnedPosition(AddedPosition):
    """One learned row for each token: N + 1 with the class token, as in the paper."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(self.prefix_rows + config.patches, config.width))

    def rows(self, grid: Grid) -> Tensor:
        if self.resize_options is None:
            return self.table
        front, patches = self.table[: self.prefix_rows], self.table[self.prefix_rows :]
        return torch.cat([front, multiply_grid(patches, self.grid, grid, self.resize_options)])

    @classmethod
    def resize(cls, state: State, old: ViTConfig, new: ViTConfig, **options: Any) -> None:
        rows = state["position.table"]
        first = rows.shape[0] - old.patches  # rows of the prefix do not change
        patches = resize_grid(rows[first:], old.grid, new.grid, **options)
        state["position.table"] = torch.cat([rows[:first], patches])


class LearnedPosition2D(AddedPosition):
    """Half of each row from the patch's row in the grid, half from its column (paper, D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        h, w = config.grid
        self.down = nn.Parameter(torch.empty(h, config.width // 2))
        self.across = nn.Parameter(torch.empty(w, config.width // 2))
        self.front = nn.Parameter(torch.empty(self.prefix_rows, config.width)) if self.prefix_rows else None

    def rows(self, grid: Grid) -> Tensor:
        down: Tensor = self.down
        across: Tensor = self.across
        if self.resize_options is not None:
            (h, w), (h2, w2), options = self.grid, grid, self.resize_options
            down = multiply_grid(down, (h, 1), (h2, 1), options)
            across = multiply_grid(across, (1, w), (1, w2), options)
        patches = side_by_side(down, across)
        return patches if self.front is None else torch.cat([self.front, patches])

    @classmethod
    def resize(cls, state: State, old: ViTConfig, new: ViTConfig, **options: Any) -> None:
        (h, w), (h2, w2) = old.grid, new.grid
        state["position.down"] = resize_grid(state["position.down"], (h, 1), (h2, 1), **options)
        state["position.across"] = resize_grid(state["position.across"], (1, w), (1, w2), **options)


class SinCosPosition(AddedPosition):
    """Fixed sines and cosines of the token's index in the sequence; the class token has index 0."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.width = config.width
        self.register_buffer("fixed", self.compute(config.grid), persistent=False)

    def rows(self, grid: Grid) -> Tensor:
        fixed = cast(Tensor, self.fixed)
        return fixed if self.resize_options is None else self.compute(grid).to(fixed)

    def compute(self, grid: Grid) -> Tensor:
        return sincos(torch.arange(self.prefix_rows + math.prod(grid)), self.width)


class SinCosPosition2D(SinCosPosition):
    """Half of each row from the patch's row in the grid, half from its column; zeros for the prefix."""

    def compute(self, grid: Grid) -> Tensor:
        down, across = (sincos(torch.arange(side), self.width // 2) for side in grid)
        return torch.cat([torch.zeros(self.prefix_rows, self.width), side_by_side(down, across)])


class RotaryPosition(Position):
    """Rotary embedding: q and k of each patch are rotated by angles of its row and column (Su et al. 2021).

    q.k then depends only on the offset between two patches. There are d/4 frequencies; rows rotate the first
    half of the channel pairs, columns the second. Prefix tokens are not rotated.
    """

    equation = "{letter} = R({made})"
    meaning = "rotated by the patch's row and column"
    measure = "phase kernel"
    base: ClassVar[float] = 100.0
    """The longest period, up to 2 pi; DINOv3's, suited to small grids."""
    adjacent: ClassVar[bool] = False
    """Whether channels 2i and 2i + 1 form a pair; otherwise i and i + d/2."""
    columns_first: ClassVar[bool] = False

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.frequencies = config.d // 4
        angles = self.angles(config.grid)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def coordinates(self, side: int) -> Tensor:
        """The coordinate of each row or column: its index."""
        return torch.arange(side, dtype=torch.float32)

    def angles(self, grid: Grid) -> Tensor:
        """The angle of each channel, (N, d); the two of a pair have the same."""
        count = self.frequencies
        periods = self.base ** (torch.arange(count) / count)
        down, across = (self.coordinates(side)[:, None] / periods for side in grid)  # (h, d/4), (w, d/4)
        angles = side_by_side(down, across)  # (N, d/2)
        if self.columns_first:
            angles = angles.roll(count, dims=1)
        return angles.repeat_interleave(2, dim=1) if self.adjacent else torch.cat([angles, angles], dim=-1)

    def packed_rotation(self, grids: Iterable[Grid]) -> Rotate:
        like = cast(Tensor, self.cos)
        still = like.new_zeros(self.prefix, like.shape[1])  # the prefix of each image is not rotated
        angles = torch.cat([part for grid in grids for part in (still, self.angles(grid).to(like))])
        return partial(apply_rotary, cos=angles.cos(), sin=angles.sin(), prefix=0, adjacent=self.adjacent)

    def rotation(self, grid: Grid) -> Rotate:
        cos, sin = cast(Tensor, self.cos), cast(Tensor, self.sin)
        if self.resize_options is not None:
            angles = self.angles(grid).to(cos)
            cos, sin = angles.cos(), angles.sin()
        return partial(apply_rotary, cos=cos, sin=sin, prefix=self.prefix, adjacent=self.adjacent)

    def similarity(self, blocks: Iterable[nn.Module]) -> Tensor:
        """q.k for equal q and k of unit length: the mean over frequencies of cos(a - b), (N, N)."""
        cos, sin = cast(Tensor, self.cos).double(), cast(Tensor, self.sin).double()
        return (cos @ cos.T + sin @ sin.T) / cos.shape[1]


class DINOv3RotaryPosition(RotaryPosition):
    """Rotary embedding with coordinates normalized to -1 ... 1, as in DINOv3; 2 pi is part of the period."""

    def coordinates(self, side: int) -> Tensor:
        centers = super().coordinates(side) + 0.5
        return 2 * math.pi * (2 * centers / scalar_tensor(side, torch.float32) - 1)


class EVA02Position(LearnedPosition, RotaryPosition):
    """Learned rows, and a rotary embedding as on the grid of 16 x 16 that EVA-02 was pretrained on."""

    base, adjacent = 10_000.0, True
    meaning = "E_pos adds each token's position to it; q and k are rotated as well."

    def coordinates(self, side: int) -> Tensor:
        return super().coordinates(side) / scalar_tensor(side, torch.float32) * 16


class PerceptionEncoderPosition(LearnedPosition, RotaryPosition):
    """Learned rows, and a rotary embedding; the first coordinate is 1 if there is a class token."""

    base, adjacent, columns_first = 10_000.0, True, True
    meaning = EVA02Position.meaning

    def coordinates(self, side: int) -> Tensor:
        return super().coordinates(side) + bool(self.prefix)


class BiasPosition(Position):
    """A learned bias on the scores, A = softmax(q k^T / sqrt(d) + p), with a table in each block."""

    equation = "p = P_head"
    measure = "bias added to the score"

    @classmethod
    def add_prefix_tokens(cls, state: State, old: ViTConfig, new: ViTConfig) -> None:
        raise InputError(
            f"add_registers does not work with position={old.position!r}, which has a bias for each pair of "
            "tokens; train the model with registers from the start."
        )

    def similarity(self, blocks: Iterable[nn.Module]) -> Tensor:
        """The biases themselves: (L, k, T, T)."""
        return torch.stack([cast(Any, block).attention.bias() for block in blocks])


class PairwisePosition(BiasPosition):
    """One learned bias p_ij for each head and each pair of tokens."""

    meaning = "A learned bias for each pair of tokens."
    bias = PairwiseBias
    fixed_grid = "Pairwise positions have a bias for each pair of patches"

    @classmethod
    def resize(cls, state: State, old: ViTConfig, new: ViTConfig, **options: Any) -> None:
        raise InputError(
            f"{cls.fixed_grid}, so the grid cannot change from {format_sides(old.grid)} to "
            f"{format_sides(new.grid)}; use relative positions for models that will be resized."
        )


class RelativePosition(BiasPosition):
    """One learned bias for each head and each offset (rows down, columns across) between two patches."""

    meaning = "A learned bias for each offset between tokens."
    bias = RelativeBias
    fixed_grid = "Relative positions have a table for one patch grid"

    @classmethod
    def resize(cls, state: State, old: ViTConfig, new: ViTConfig, **options: Any) -> None:
        before, after = (tuple(2 * side - 1 for side in config.grid) for config in (old, new))
        offsets = math.prod(before)
        for name in [name for name in state if name.endswith("attention.bias.table")]:
            table = state[name]  # (k, offsets + 3 for the prefix)
            patches = resize_grid(table[:, :offsets].T, before, after, **options).T
            state[name] = torch.cat([patches, table[:, offsets:]], dim=1)


POSITIONS: dict[str, type[Position]] = {
    "learned": LearnedPosition,
    "learned2d": LearnedPosition2D,
    "sincos1d": SinCosPosition,
    "sincos2d": SinCosPosition2D,
    "rotary": RotaryPosition,
    "rotary-dinov3": DINOv3RotaryPosition,
    "rotary-eva02": EVA02Position,
    "rotary-pe": PerceptionEncoderPosition,
    "pairwise": PairwisePosition,
    "relative": RelativePosition,
    "none": Position,
}


def build_position(config: ViTConfig) -> Position:
    """The position scheme of `config.position`."""
    return POSITIONS[config.position](config)


def build_bias(config: ViTConfig) -> nn.Module | None:
    """The position bias of one block's attention."""
    bias = POSITIONS[config.position].bias
    return None if bias is None else bias(config)
