"""Resampling of position tables to another patch grid, and of patch kernels to another patch size.

The paper (Section 3.2) fine-tunes at a higher resolution by interpolating the position table to the new
grid, as if it were an image of D channels. Each library does this in its own way, and the same options
are needed to get the same logits:

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

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import InputError, suggest
from vitrail.model.init import has_values

Method = Literal["bicubic", "bilinear"]
Grid = tuple[int, ...]
_OFFSET_ADVICE = "use 0.1 for DINOv2 without registers, and 0 for everything else."


class ResizeOptions(NamedTuple):
    """How a grid is resampled: a row of the table above."""

    method: Method = "bicubic"
    antialias: bool = True
    """Whether to low-pass filter when the grid shrinks."""
    corners: bool = False
    """Whether the centers of the corner patches are aligned (`align_corners`), not the edges."""
    offset: float = 0.0
    """DINOv2 scales by (h' + offset) / h and crops to the new grid."""

    def check(self) -> ResizeOptions:
        """Refuse options that exclude each other; returns them."""
        if self.method not in get_args(Method):
            raise InputError(f"unknown method {self.method!r}. {suggest(str(self.method), get_args(Method))}")
        if self.corners and self.antialias:
            raise InputError(
                "corners=True cannot be combined with antialias=True, which does not align corners; set "
                "antialias=False."
            )
        if self.corners and self.offset:
            raise InputError(
                f"corners=True cannot be combined with offset={self.offset}; set only one of the two."
            )
        if not 0 <= self.offset < 1:
            raise InputError(f"offset must be at least 0 and below 1, not {self.offset}; {_OFFSET_ADVICE}")
        return self


def resize_grid(
    rows: Tensor,
    old: Grid,
    new: Grid,
    *,
    method: Method = "bicubic",
    antialias: bool = True,
    corners: bool = False,
    offset: float = 0.0,
) -> Tensor:
    """Interpolate position rows (h w, D) from the old patch grid to the new one: (h' w', D).

    If the grid does not change, the same tensor is returned, whatever the options.

    Args:
        rows: the rows of the patches, in row-major order, without those of prefix tokens.
        old: (h, w).
        new: (h', w').
        method, antialias, corners, offset: as in `ResizeOptions`.
    """
    _check_rows(rows, old, new)
    if tuple(old) == tuple(new):
        return rows
    ResizeOptions(method, antialias, corners, offset).check()
    grid = _at_least_float32(rows).T.unflatten(1, old)[None]  # (1, D, h, w)
    if new[1] == 1:
        # With antialias, torch 2.13 on a CPU gets a single column wrong, but not a single row.
        grid, old, new = grid.mT, old[::-1], new[::-1]
    target = dict(scale_factor=_scale_factors(old, new, offset)) if offset else dict(size=new)
    grid = F.interpolate(grid, **target, mode=method, antialias=antialias, align_corners=corners)
    return grid[0].flatten(1).T.to(rows.dtype).contiguous()  # (h' w', D)


def multiply_grid(rows: Tensor, old: Grid, new: Grid, options: ResizeOptions) -> Tensor:
    """Interpolate rows (h w, D) by a matrix for each axis: (h' w', D), the same to rounding.

    h' and w' may be symbolic in torch.export. The resize operators of other runtimes are avoided because
    they differ from each other and from torch's.
    """
    if has_values(rows) and not torch.compiler.is_compiling():
        down, across = (_ready_weights(axis, old, new, options, rows.device, rows.dtype) for axis in (0, 1))
    else:  # while a graph is traced
        down, across = (_side_weights(axis, old, new, options).to(rows) for axis in (0, 1))
    grid = rows.T.unflatten(1, old)  # (D, h, w)
    return (down @ grid @ across.T).flatten(1).T


def resize_kernel(
    weight: Tensor, new: tuple[int, int], *, method: Method = "bilinear", antialias: bool = False
) -> Tensor:
    """Resize a patch kernel (D, C, P, Q) to another patch size: (D, C, P', Q').

    PI-resize of FlexiViT (Beyer et al. 2022): if resizing a patch maps x to B x, the new kernel is the one
    whose tokens are closest to the old ones,

        w' = argmin E (<w', B x> - <w, x>)^2 = (B^T)^+ w        for x ~ N(0, I)

    For larger patches the tokens are equal. If the size does not change, the same tensor is returned.

    Args:
        new: (P', Q').
        method, antialias: how patches are resized, which defines B. The defaults are FlexiViT's.
    """
    _check_tensor("A patch kernel", weight)
    _check_sides("The new patch size", new)
    if weight.ndim != 4:
        raise InputError(
            f"A patch kernel must have the shape (D, C, P, Q), not {tuple(weight.shape)}; unflatten a "
            "flattened one with weight.unflatten(1, (C, P, Q))."
        )
    old = tuple(weight.shape[2:])
    if old == tuple(new):
        return weight
    kernel, options = _at_least_float32(weight), ResizeOptions(method, antialias).check()
    # Resizing is separable, B = B_P x B_Q (Kronecker product), and so is the pseudo-inverse.
    B_P, B_Q = (_side_weights(axis, old, new, options).to(kernel) for axis in (0, 1))  # (P', P), (Q', Q)
    kernel = torch.linalg.pinv(B_P.T) @ kernel @ torch.linalg.pinv(B_Q)  # (D, C, P', Q')
    return kernel.to(weight.dtype)


# ---- the matrices, also for grids with symbolic sizes -------------------------------------------------


@lru_cache(maxsize=4096)
def _ready_weights(
    axis: int, old: Grid, new: Grid, options: ResizeOptions, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """`_side_weights` on a device: computed once, because many images of a pack have the same few grids."""
    with torch.inference_mode(False):  # or no later step could train with it
        return _side_weights(axis, old, new, options).to(device, dtype)


def _side_weights(axis: int, old: Grid, new: Grid, options: ResizeOptions) -> Tensor:
    """The interpolation matrix M of one axis, (new, old); the identity if neither side changes."""
    sizes = [scalar_tensor(side) for side in new]
    same = (sizes[0] == old[0]) & (sizes[1] == old[1])
    size, index = sizes[axis], torch.arange(new[axis], dtype=torch.float64)
    if options.corners:
        sources = index * ((old[axis] - 1) / (size - 1).clamp(min=1))
    else:
        scale = torch.where(same, 1.0, old[axis] / (size + options.offset))
        if options.antialias:
            return antialias_weights(index, old[axis], scale, *FILTERS[options.method])
        sources = (index + 0.5) * scale - 0.5
    kernel = triangle if options.method == "bilinear" else lambda x: cubic(x, -0.75)
    return _interpolation_weights(sources, old[axis], kernel)


def triangle(x: Tensor) -> Tensor:
    """The kernel of linear interpolation."""
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor, a: float = -0.5) -> Tensor:
    """Keys' kernel. a is -0.5 in Pillow and in torch with antialias, -0.75 in torch without."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


Filter = tuple[Callable[[Tensor], Tensor], float]
FILTERS: dict[str, Filter] = {"bilinear": (triangle, 1.0), "bicubic": (cubic, 2.0)}  # kernel and support


def scalar_tensor(value: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A size as a scalar tensor, so that what is computed from it stays symbolic in a traced graph."""
    return torch.full((), value, dtype=dtype)


def antialias_weights(
    index: Tensor, old: int, scale: Tensor, kernel: Callable[[Tensor], Tensor], support: float
) -> Tensor:
    """M (index, old) with antialiasing: the kernel is widened by the scale when downsampling.

    A box filter ends so abruptly that the last bit of rounding decides whether it includes a pixel. Pillow
    applies two tests, an integer range of pixels and the kernel; both are applied here, in its order.

    Args:
        index: the output pixels to compute.
        scale: the number of input pixels per output pixel.
        support: the half width of the kernel.
    """
    widening = scale.clamp(min=1)
    centers, pixels = (index[:, None] + 0.5) * scale, torch.arange(old, dtype=torch.float64)
    first, end = ((centers + side * support * widening + 0.5).floor() for side in (-1, 1))
    inside = (pixels >= first) & (pixels < end)
    weights = torch.where(inside, kernel((pixels - centers + 0.5) * (1 / widening)), 0.0)
    return weights / weights.sum(dim=1, keepdim=True)


def _interpolation_weights(sources: Tensor, old: int, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """M (sources, old) without antialiasing: four input pixels per output pixel, with a repeated border."""
    neighbors = sources.floor()[:, None] + torch.arange(-1, 3, dtype=torch.float64)  # (new, 4)
    weights = kernel(sources[:, None] - neighbors)
    clamped = torch.minimum(neighbors.clamp(min=0), scalar_tensor(old) - 1)
    one_hot = clamped[..., None] == torch.arange(old, dtype=torch.float64)  # (new, 4, old)
    return (weights[..., None] * one_hot).sum(dim=1)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """bfloat16 has three digits, too few to sum weighted rows."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _scale_factors(old: Grid, new: Grid, offset: float) -> tuple[float, float]:
    """The factors for which torch rounds h (h' + offset) / h down to h'."""
    down, across = (new[0] + offset) / old[0], (new[1] + offset) / old[1]
    # A tiny offset can be lost to rounding, and with it a row: 49 * (1 / 49) < 1.
    if (int(old[0] * down), int(old[1] * across)) != tuple(new):
        raise InputError(f"offset={offset} is too small for this grid; {_OFFSET_ADVICE}")
    return down, across


def _check_rows(rows: Tensor, old: Grid, new: Grid) -> None:
    _check_tensor("Position rows", rows)
    _check_sides("The old grid", old)
    _check_sides("The new grid", new)
    h, w = old
    if rows.ndim != 2 or rows.shape[0] != h * w:
        extra = rows.shape[0] - h * w
        if rows.ndim == 3 and rows.shape[0] == 1:
            advice = "drop the batch axis: rows[0]"
        elif rows.ndim == 2 and extra > 0:
            advice = f"omit the rows of prefix tokens: rows[{extra}:] if they come first"
        else:
            advice = "pass the grid that the table was trained on, and one row for each of its patches"
        raise InputError(
            f"Position rows must have the shape ({h * w}, D), a row for each patch of the old {h}x{w} grid, "
            f"not {tuple(rows.shape)}; {advice}."
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(
            f"{name} must be a floating-point tensor, not {kind}; convert with torch.as_tensor(..., "
            "dtype=torch.float32)."
        )


def _check_sides(name: str, sides: Grid) -> None:
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise InputError(
            f"{name} must be (height, width), two positive integers such as (14, 14), not {sides!r}."
        )
