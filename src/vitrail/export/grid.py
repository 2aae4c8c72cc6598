"""Positions for any patch grid, computed where the graph runs: what `surgery.resize` does beforehand.

A graph that takes pictures of any size has a model whose positions read the grid from `Sides`, which is
filled in with each batch, and compute their rows, angles or biases for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.export.resize import FILTERS, cubic, hat, number, spread, taps
from vitrail.fields import show
from vitrail.model import ViT
from vitrail.model.position import (
    LearnedPosition,
    LearnedPosition2D,
    RotaryPosition,
    SinCosPosition,
    sincos,
)

Grid = tuple[int, int]


class Sides:
    """The grid of the pictures at hand."""

    h: int
    w: int


def check_free(config: ViTConfig) -> None:
    """Whether a model can take pictures of any size."""
    for field, value, why in (
        ("position", "pairwise", "Pairwise positions hold a number for each pair of patches."),
        ("position", "relative", "Relative positions are gathered for each pair, which no tracer gets done."),
        ("embedding", "resnet", "This stem pads its maps by their size, which no tracer gets done."),
        ("pool", "flatten", "A flattened pool reads each patch by its place."),
    ):
        if getattr(config, field) == value:
            do = "Leave out --dynamic size; --size exports the model for another one."
            raise InputError(f"{why} So the grid must stay.", f"{field}={show(value)}", do)


def free(model: ViT, sides: Sides, how: Mapping[str, Any]) -> ViT:
    """A copy of the model whose positions follow the grid in `sides`.

    Args:
        how: method, antialias, corners, offset, as `resample.resize_grid` takes them.
    """
    config = model.config
    check_free(config)
    new = copy.deepcopy(model)
    old = new.position
    match config.position:
        case "learned":
            new.position = FreeLearned(old, config, sides, how)  # type: ignore[arg-type]
        case "learned2d":
            new.position = FreeLearned2D(old, config, sides, how)  # type: ignore[arg-type]
        case "sincos1d" | "sincos2d":
            new.position = FreeSinCos(config, sides)
        case "rotary" | "rotary-dinov3":
            new.position = FreeRotary(config, sides)
        case _:
            pass
    return new


def moved(rows: Tensor, old: Grid, new: Grid, how: Mapping[str, Any]) -> Tensor:
    """`resample.resize_grid` as matrix products: rows (h w, D) to (h' w', D), with h' and w' open."""
    down, across = (grid_weights(axis, old, new, how).to(rows.dtype) for axis in (0, 1))
    grid = rows.T.unflatten(1, old)  # (D, h, w)
    return (down @ grid @ across.T).flatten(1).T


def grid_weights(axis: int, old: Grid, new: Grid, how: Mapping[str, Any]) -> Tensor:
    """M along one side of the grid, (new, old); that of no change where neither side changes."""
    options = {"method": "bicubic", "antialias": True, "corners": False, "offset": 0.0, **how}
    sizes = [number(side) for side in new]
    same = (sizes[0] == old[0]) & (sizes[1] == old[1])
    size, places = sizes[axis], torch.arange(new[axis], dtype=torch.float64)
    if options["corners"]:
        sources = places * ((old[axis] - 1) / (size - 1).clamp(min=1))
    else:
        scale = torch.where(same, 1.0, old[axis] / (size + options["offset"]))
        if options["antialias"]:
            return spread(places, old[axis], scale, *FILTERS[options["method"]])
        sources = (places + 0.5) * scale - 0.5
    kernel = hat if options["method"] == "bilinear" else lambda x: cubic(x, -0.75)
    return taps(sources, old[axis], kernel)


class FreeLearned(LearnedPosition):
    """The learned table, stretched over the grid."""

    def __init__(self, old: LearnedPosition, config: ViTConfig, sides: Sides, how: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.table, self.sides, self.how, self.grid = old.table, sides, how, cast(Grid, config.grid)

    def given_rows(self) -> Tensor:
        front, patches = self.table[: self.prefix_rows], self.table[self.prefix_rows :]
        return torch.cat([front, moved(patches, self.grid, (self.sides.h, self.sides.w), self.how)])


class FreeLearned2D(LearnedPosition2D):
    """Rows and columns stretched each by itself."""

    def __init__(
        self, old: LearnedPosition2D, config: ViTConfig, sides: Sides, how: Mapping[str, Any]
    ) -> None:
        super().__init__(config)
        self.down, self.across, self.front = old.down, old.across, old.front
        self.sides, self.how = sides, how

    def given_rows(self) -> Tensor:
        h, w = self.sides.h, self.sides.w
        down = moved(self.down, (self.down.shape[0], 1), (h, 1), self.how)[:, None].expand(h, w, -1)
        across = moved(self.across, (1, self.across.shape[0]), (1, w), self.how)[None].expand(h, w, -1)
        patches = torch.cat([down, across], dim=-1).flatten(0, 1)  # (N, D)
        return patches if self.front is None else torch.cat([self.front, patches])


class FreeSinCos(SinCosPosition):
    """Sines of the grid's own places."""

    def __init__(self, config: ViTConfig, sides: Sides) -> None:
        super().__init__(config)
        self.kind, self.width, self.sides = config.position, config.width, sides

    def given_rows(self) -> Tensor:
        h, w = self.sides.h, self.sides.w
        if self.kind == "sincos1d":
            return sincos(torch.arange(self.prefix_rows + h * w), self.width)
        down = sincos(torch.arange(h), self.width // 2)[:, None].expand(h, w, -1)
        across = sincos(torch.arange(w), self.width // 2)[None].expand(h, w, -1)
        patches = torch.cat([down, across], dim=-1).flatten(0, 1)
        return torch.cat([torch.zeros(self.prefix_rows, self.width), patches])


class FreeRotary(RotaryPosition):
    """Angles of the grid's own places."""

    def __init__(self, config: ViTConfig, sides: Sides) -> None:
        super().__init__(config)
        self.scaled, self.count, self.sides = config.position == "rotary-dinov3", config.d // 4, sides

    def turn(self, heads: Tensor) -> Tensor:
        powers = 100.0 ** (torch.arange(self.count) / self.count)
        h, w = self.sides.h, self.sides.w
        down, across = (self.places(side)[:, None] / powers for side in (h, w))  # (h, d/4), (w, d/4)
        both = down[:, None].expand(h, w, -1), across[None].expand(h, w, -1)
        angles = torch.cat([*both, *both], dim=-1).flatten(0, 1)  # (N, d): each pair is (i, i + d/2)
        prefix, patches = heads[..., : self.prefix, :], heads[..., self.prefix :, :]
        first, second = patches.chunk(2, dim=-1)
        turned = patches * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
        return torch.cat([prefix, turned], dim=-2)

    def places(self, side: int) -> Tensor:
        at = torch.arange(side, dtype=torch.float32)
        return 2 * math.pi * (2 * (at + 0.5) / number(side, torch.float32) - 1) if self.scaled else at
