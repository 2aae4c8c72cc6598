"""Rows of a key table: which of a library's tensors make up one of ours, and in which layout.

    Row(("{p}layer.{i}.query.weight", "{p}layer.{i}.key.weight", ...), "blocks.{i}.attention.qkv.weight")

`{i}` is the block index. `{p}` is the prefix a library puts before the names of its encoder, such as
"vit."; `{w}` is a prefix that a wrapper has put before every name, such as "module.". If several rows
produce the same tensor of ours, they are alternative spellings: the first one present is read, and the
first one in the table is written.

A `Layout` is how a tensor is stored there. It works in both directions, and on shapes alone, so that a file
can be described without torch. D is the width, k the number of heads, d the head width, C the channels, P
the patch side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vitrail.base.errors import ConfigError
from vitrail.model.config import ViTConfig

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """What a layout needs to know to split an axis."""

    heads: int = 1
    channels: int = 3
    patch: tuple[int, ...] = (1, 1)

    @classmethod
    def of(cls, config: ViTConfig) -> Sizes:
        return cls(config.heads, config.channels, config.patch_pixels)


@dataclass(frozen=True)
class Layout:
    """From theirs to ours and back; `shape` is what `read` does to a shape."""

    name: str
    read: Callable[[Tensor, Sizes], Tensor]
    write: Callable[[Tensor, Sizes], Tensor]
    shape: Callable[[Shape, Sizes], Shape]


def lead(count: int) -> Layout:
    """`count` leading axes of length 1, such as pos_embed (1, N, D); files without them are read as well."""

    def write(ours: Tensor, sizes: Sizes) -> Tensor:
        return ours.reshape((1,) * count + tuple(ours.shape))

    def shape(theirs: Shape, sizes: Sizes) -> Shape:
        return theirs[count:] if set(theirs[:count]) <= {1} else theirs

    return Layout("lead", lambda t, s: t.reshape(shape(tuple(t.shape), s)), write, shape)


def tokens(axes: int) -> Layout:
    """Prefix tokens with `axes` axes: (D,), (n, D) or (1, n, D); ours are (n, D)."""

    def write(ours: Tensor, sizes: Sizes) -> Tensor:
        return ours.reshape((1,) * (axes - 2) + tuple(ours.shape)) if axes > 1 else ours.reshape(-1)

    return Layout(
        "tokens",
        lambda t, s: t.reshape(-1, t.shape[-1]),
        write,
        lambda shape, s: (math.prod(shape[:-1]), *shape[-1:]),
    )


def _patch_of(columns: int, sizes: Sizes) -> tuple[int, ...]:
    """The patch sides of a flat patch with this many values: `sizes.patch` if it fits, else a square."""
    if sizes.channels * math.prod(sizes.patch) == columns:
        return sizes.patch
    side = math.isqrt(columns // sizes.channels)
    if sizes.channels * side * side != columns:
        raise ConfigError(
            f"A flat patch of {columns} values is not {sizes.channels} channels times a square; give "
            "channels, and patch if it is not square."
        )
    return side, side


def _read_patch(theirs: Tensor, sizes: Sizes) -> Tensor:
    patch = _patch_of(theirs.shape[1], sizes)
    return theirs.reshape(theirs.shape[0], *patch, -1).movedim(-1, 1)  # (D, P P C) -> (D, C, P, P)


def _patch_shape(shape: Shape, sizes: Sizes) -> Shape:
    patch = _patch_of(shape[1], sizes)
    return shape[0], shape[1] // math.prod(patch), *patch


same = Layout("same", lambda t, s: t, lambda t, s: t, lambda shape, s: shape)

transposed = Layout("transposed", lambda t, s: t.mT, lambda t, s: t.mT, lambda shape, s: shape[::-1])

# Flax: a convolution kernel is (P, P, C, D), q's kernel (D, k, d) with bias (k, d), and the kernel of
# the output projection (k, d, D).
flax_conv = Layout(
    "flax_conv",
    lambda t, s: t.permute(3, 2, 0, 1),
    lambda t, s: t.permute(2, 3, 1, 0),
    lambda shape, s: (shape[3], *shape[4:], shape[2], *shape[:2]),
)
flax_heads = Layout(
    "flax_heads",
    lambda t, s: t.flatten(1).mT,
    lambda t, s: t.mT.unflatten(1, (s.heads, -1)),
    lambda shape, s: (math.prod(shape[1:]), shape[0]),
)
flax_heads_bias = Layout(
    "flax_heads_bias",
    lambda t, s: t.flatten(),
    lambda t, s: t.unflatten(0, (s.heads, -1)),
    lambda shape, s: (math.prod(shape),),
)
flax_out = Layout(
    "flax_out",
    lambda t, s: t.flatten(0, 1).mT,
    lambda t, s: t.mT.unflatten(0, (s.heads, -1)),
    lambda shape, s: (shape[2], *shape[3:], math.prod(shape[:2])),
)

# A matrix on flat patches. Rearranged by einops as "(p1 p2 c)", the channels of a pixel are adjacent;
# flattened from (C, P, P) as here, they are not.
patch_rows = Layout("patch_rows", _read_patch, lambda t, s: t.movedim(1, -1).flatten(1), _patch_shape)
patch_planes = Layout(
    "patch_planes",
    lambda t, s: t.reshape(t.shape[0], -1, *_patch_of(t.shape[1], s)),
    lambda t, s: t.flatten(1),
    _patch_shape,
)
patch_vector = Layout(
    "patch_vector",
    lambda t, s: t.reshape(*_patch_of(t.shape[0], s), -1).movedim(-1, 0).flatten(),
    lambda t, s: t.reshape(-1, *_patch_of(t.shape[0], s)).movedim(0, -1).flatten(),
    lambda shape, s: shape,
)

LAYOUTS = {
    layout.name: layout
    for layout in (
        *(same, transposed, lead(1), tokens(3), patch_rows, patch_planes, patch_vector),
        *(flax_conv, flax_heads, flax_heads_bias, flax_out),
    )
}
"""The layouts that a user's key table can name."""

LAYOUTS["turned"] = transposed  # as files of version 0.1 call it


@dataclass(frozen=True)
class Row:
    """Tensors of a file that, concatenated along the first axis, are one tensor of ours."""

    theirs: tuple[str, ...]
    """An empty name is a gap: a part of the same length that their model does not have, and zeros here."""
    ours: str
    layout: Layout = same
    parts: tuple[int, ...] | Literal["prefix"] = ()
    """How ours is split into theirs again: evenly by default, in these proportions, or by prefix token.
    Of the three names of a prefix (class token, distillation token, registers) any may be missing."""
    requires: str = ""
    """Another name that must be in the file for the row to be read."""
    when: tuple[str, Any] | None = None
    """A config field and the value it must have for the row to be written."""
    custom: bool = False
    """From a user's table: its names are the file's, not respelled, and of whole stacks."""

    @property
    def has_gaps(self) -> bool:
        return "" in self.theirs and self.parts != "prefix"


def row(theirs: str | Iterable[str], ours: str, layout: Layout = same, **options: Any) -> Row:
    """A row of one or several names."""
    return Row((theirs,) if isinstance(theirs, str) else tuple(theirs), ours, layout, **options)


def layer(theirs: str | Iterable[str], ours: str, layout: Layout = same, **options: Any) -> tuple[Row, Row]:
    """The rows of a layer's weight and bias. `layout` is for the weight; biases are laid out as ours."""
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    weight = row([f"{name}.weight" for name in names], f"{ours}.weight", layout, **options)
    return weight, row([f"{name}.bias" for name in names], f"{ours}.bias", **options)
