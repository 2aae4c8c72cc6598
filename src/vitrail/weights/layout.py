"""How one tensor lies in another library's file, and how it lies here.

A `Layout` goes both ways, and knows the shape without the numbers, so that a file can be described
without torch. Pieces that are one tensor here (q, k and v; the prefix tokens) are put one after the
other along the first axis by the table, after each has been read by its layout.

The letters: D width, k heads, d head width, C channels, P patch side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """What a layout may have to know to tell two axes apart."""

    heads: int = 1
    channels: int = 3
    patch: tuple[int, ...] = (1, 1)


@dataclass(frozen=True)
class Layout:
    """Theirs to ours and back; `shape` is what `read` does to a shape."""

    word: str
    read: Callable[[Tensor, Sizes], Tensor]
    write: Callable[[Tensor, Sizes], Tensor]
    shape: Callable[[Shape, Sizes], Shape]


def lead(count: int) -> Layout:
    """`count` axes of length 1 before ours, such as pos_embed (1, N, D); or none of them."""

    def write(ours: Tensor, sizes: Sizes) -> Tensor:
        return ours.reshape((1,) * count + tuple(ours.shape))

    def shape(theirs: Shape, sizes: Sizes) -> Shape:
        return theirs[count:] if set(theirs[:count]) <= {1} else theirs

    return Layout("lead", lambda t, s: t.reshape(shape(tuple(t.shape), s)), write, shape)


def tokens(axes: int) -> Layout:
    """Prefix tokens, as (D,) or with `axes` axes, (1, 1, D) or (1, n, D); ours are (n, D)."""

    def write(ours: Tensor, sizes: Sizes) -> Tensor:
        return ours.reshape((1,) * (axes - 2) + tuple(ours.shape)) if axes > 1 else ours.reshape(-1)

    return Layout(
        "tokens",
        lambda t, s: t.reshape(-1, t.shape[-1]),
        write,
        lambda shape, s: (math.prod(shape[:-1]), *shape[-1:]),
    )


def patch_of(columns: int, sizes: Sizes) -> tuple[int, ...]:
    """(P, P) of a flat patch with this many numbers, unless the patch is known."""
    if sizes.channels * math.prod(sizes.patch) == columns:
        return sizes.patch
    side = math.isqrt(columns // sizes.channels)
    if sizes.channels * side * side != columns:
        raise ConfigError(
            "A flat patch must hold channels x P x P numbers.",
            f"{columns} numbers with channels={sizes.channels}",
            "Give channels, and patch where it is not square.",
        )
    return side, side


def read_patch(theirs: Tensor, sizes: Sizes) -> Tensor:
    patch = patch_of(theirs.shape[1], sizes)
    return theirs.reshape(theirs.shape[0], *patch, -1).movedim(-1, 1)  # (D, P P C) -> (D, C, P, P)


def patch_shape(shape: Shape, sizes: Sizes) -> Shape:
    patch = patch_of(shape[1], sizes)
    return shape[0], shape[1] // math.prod(patch), *patch


same = Layout("same", lambda t, s: t, lambda t, s: t, lambda shape, s: shape)

turned = Layout("turned", lambda t, s: t.mT, lambda t, s: t.mT, lambda shape, s: shape[::-1])

# flax: a convolution's kernel is (P, P, C, D), q's kernel (D, k, d) with bias (k, d), and the
# kernel that mixes the heads (k, d, D).
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

# A matrix on flat patches. Rearranged by einops as "(p1 p2 c)", a pixel's channels lie side by side;
# flattened from (C, P, P) as here, they do not.
patch_rows = Layout(
    "patch_rows",
    read_patch,
    lambda t, s: t.movedim(1, -1).flatten(1),
    patch_shape,
)
patch_planes = Layout(
    "patch_planes",
    lambda t, s: t.reshape(t.shape[0], -1, *patch_of(t.shape[1], s)),
    lambda t, s: t.flatten(1),
    patch_shape,
)
patch_vector = Layout(
    "patch_vector",
    lambda t, s: t.reshape(*patch_of(t.shape[0], s), -1).movedim(-1, 0).flatten(),
    lambda t, s: t.reshape(-1, *patch_of(t.shape[0], s)).movedim(0, -1).flatten(),
    lambda shape, s: shape,
)

WORDS = {
    layout.word: layout
    for layout in (
        *(same, turned, lead(1), tokens(3), patch_rows, patch_planes, patch_vector),
        *(flax_conv, flax_heads, flax_heads_bias, flax_out),
    )
}
"""The layouts that a user's own table of keys can name."""
