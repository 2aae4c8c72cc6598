"""Weights for other sizes: a position table for another patch grid, a patch kernel for another patch.

The paper (section 3.2) fine-tunes at a higher resolution by stretching the position table over the
new grid, as if it were a picture of D channels. Every family stretches it in its own way, and to
get its numbers one has to do the same:

| family                                         | method   | antialias | corners | offset |
|------------------------------------------------|----------|-----------|---------|--------|
| timm, from a state dict; DINOv2 with registers | bicubic  | yes       | no      | 0      |
| timm, from an npz                              | bilinear | no        | no      | 0      |
| vit_jax, big_vision                            | bilinear | no        | yes     | 0      |
| transformers, its DINOv2 included              | bicubic  | no        | no      | 0      |
| torchvision                                    | bicubic  | no        | yes     | 0      |
| DINOv2 without registers, as first published   | bicubic  | no        | no      | 0.1    |
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import InputError, suggest

Method = Literal["bicubic", "bilinear"]


def resize_grid(
    rows: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    *,
    method: Method = "bicubic",
    antialias: bool = True,
    corners: bool = False,
    offset: float = 0.0,
) -> Tensor:
    """Position rows (h w, D), row by row on the old grid, stretched over the new one: (h' w', D).

    A grid that stays as it is gives back the same tensor, whatever the options.

    Args:
        rows: the rows of the patches alone, without those of prefix tokens.
        old: (h, w).
        new: (h', w').
        antialias: whether to average over all rows that fall together when the grid shrinks.
        corners: whether the middles of the corner patches stay in place, instead of the outer edges.
        offset: DINOv2 stretches by (h' + offset) / h and cuts off what is too much.
    """
    _check_rows(rows, old, new)
    if tuple(old) == tuple(new):
        return rows
    _check_options(method, antialias, corners, offset)
    grid = _widen(rows).T.unflatten(1, old)[None]  # (1, D, h, w)
    if new[1] == 1:
        # With antialias, torch 2.13 on a CPU gets a single column wrong. A single row it gets right.
        grid, old, new = grid.mT, old[::-1], new[::-1]
    target = dict(scale_factor=_stretch(old, new, offset)) if offset else dict(size=new)
    grid = F.interpolate(grid, **target, mode=method, antialias=antialias, align_corners=corners)
    return grid[0].flatten(1).T.to(rows.dtype).contiguous()  # (h' w', D)


def resize_kernel(
    weight: Tensor, new: tuple[int, int], *, method: Method = "bilinear", antialias: bool = False
) -> Tensor:
    """A patch kernel (D, C, P, Q) for patches of another size: (D, C, P', Q').

    PI-resize of FlexiViT (Beyer et al. 2022): where x becomes B x when a patch is resized, the new
    kernel is the one whose tokens are nearest to the old ones,

        w' = argmin E (<w', B x> - <w, x>)^2 = (B^T)^+ w        for x ~ N(0, I)

    For larger patches they are the same tokens. A patch that keeps its size gives back the same tensor.

    Args:
        new: (P', Q').
        method, antialias: how the pictures are resized, which is B. The defaults are FlexiViT's.
    """
    _check_tensor("A patch kernel", weight)
    _check_sides("The new patch", new)
    if weight.ndim != 4:
        raise InputError(
            "A patch kernel must have the shape (D, C, P, Q).",
            str(tuple(weight.shape)),
            "Unfold a flattened one: weight.unflatten(1, (C, P, Q)).",
        )
    P, Q = weight.shape[2:]
    if tuple(new) == (P, Q):
        return weight
    kernel = _widen(weight)
    # Rows and columns are resized apart, B = B_P x B_Q (Kronecker), and so are their pseudo-inverses.
    one_P, one_Q = (torch.eye(side, dtype=kernel.dtype, device=kernel.device) for side in (P, Q))
    B_P = resize_grid(one_P, (1, P), (1, new[0]), method=method, antialias=antialias)  # (P', P)
    B_Q = resize_grid(one_Q, (1, Q), (1, new[1]), method=method, antialias=antialias)  # (Q', Q)
    kernel = torch.linalg.pinv(B_P).T @ kernel @ torch.linalg.pinv(B_Q)  # (D, C, P', Q')
    return kernel.to(weight.dtype)


def _widen(tensor: Tensor) -> Tensor:
    """At least fp32: bf16 keeps three digits, which is too few to add up weighted rows in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _stretch(old: tuple[int, int], new: tuple[int, int], offset: float) -> tuple[float, float]:
    """How much longer the sides get, for torch to round h (h' + offset) / h down to h'."""
    high, wide = (new[0] + offset) / old[0], (new[1] + offset) / old[1]
    # The second half is for an offset so small that rounding takes a row away: 49 * (1 / 49) < 1.
    if not 0 < offset < 1 or (int(old[0] * high), int(old[1] * wide)) != tuple(new):
        raise InputError(
            "offset must be 0, or so far between 0 and 1 that the new grid stays as asked.",
            f"offset={offset}",
            "Use 0.1 for DINOv2 without registers, and 0 for everything else.",
        )
    return high, wide


def _check_options(method: Method, antialias: bool, corners: bool, offset: float) -> None:
    if method not in get_args(Method):
        raise InputError("method must be a way to resize.", repr(method), suggest(method, get_args(Method)))
    # torch takes both of these pairs without a word; it lets the corners drift, or ignores the offset.
    if corners and antialias:
        raise InputError(
            "Corners can be kept in place only without antialias.",
            "corners=True, antialias=True",
            "Set antialias=False.",
        )
    if corners and offset:
        raise InputError(
            "Corners that stay in place leave nothing to offset.",
            f"corners=True, offset={offset}",
            "Set only one of the two.",
        )


def _check_rows(rows: Tensor, old: tuple[int, int], new: tuple[int, int]) -> None:
    _check_tensor("Position rows", rows)
    _check_sides("The old grid", old)
    _check_sides("The new grid", new)
    h, w = old
    if rows.ndim != 2 or rows.shape[0] != h * w:
        extra = rows.shape[0] - h * w
        if rows.ndim == 3 and rows.shape[0] == 1:
            advice = "Drop the batch axis: rows[0]."
        elif rows.ndim == 2 and extra > 0:
            advice = f"Leave out the rows of prefix tokens: rows[{extra}:] where they come first."
        else:
            advice = "Give the grid that the table was trained on, and one row for each of its patches."
        raise InputError(
            f"Position rows must have the shape ({h * w}, D), a row for each patch of the old {h}x{w} grid.",
            str(tuple(rows.shape)),
            advice,
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise InputError(
            f"{name} must come as a torch tensor of floating-point numbers.",
            str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__,
            "Convert with torch.as_tensor(..., dtype=torch.float32).",
        )


def _check_sides(name: str, sides: tuple[int, int]) -> None:
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise InputError(
            f"{name} must be (height, width), two whole numbers above 0.",
            repr(sides),
            "Give a pair such as (14, 14).",
        )
