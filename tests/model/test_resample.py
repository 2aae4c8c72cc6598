"""Resampling of position tables and patch kernels, compared with other libraries."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torchvision.models.vision_transformer import interpolate_embeddings
from transformers import Dinov2Config, Dinov2WithRegistersConfig
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersEmbeddings,
)

import vitrail as vt
from vitrail.base.errors import InputError
from vitrail.model.resample import resize_grid, resize_kernel

GRIDS = [
    ((4, 4), (7, 7)),
    ((7, 7), (3, 3)),
    ((3, 5), (6, 4)),
    ((5, 2), (2, 9)),
    ((4, 6), (6, 4)),  # the same number of patches
    ((2, 3), (1, 7)),
    ((1, 4), (5, 2)),
]
PATCHES = [((4, 4), (8, 8)), ((8, 8), (5, 5)), ((4, 6), (7, 5)), ((6, 3), (6, 4)), ((4, 4), (1, 9))]
DINOV2 = dict(antialias=False, offset=0.1)
GOOGLE = dict(method="bilinear", antialias=False, corners=True)
OPTIONS = [
    dict(),
    dict(antialias=False),
    dict(method="bilinear"),
    dict(method="bilinear", antialias=False),
    dict(antialias=False, corners=True),
    GOOGLE,
    DINOV2,
]


def table(grid, dtype=torch.float32):
    return torch.randn(grid[0] * grid[1], 6, dtype=dtype)


def close(ours, theirs, atol=1e-6):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


# Position tables.


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_grids_equal_timm(old, new, method, antialias):
    rows = table(old)
    theirs = resample_abs_pos_embed(
        rows[None], new, old, num_prefix_tokens=0, interpolation=method, antialias=antialias
    )
    close(resize_grid(rows, old, new, method=method, antialias=antialias), theirs[0])


def test_the_defaults_are_timms():
    rows = table((4, 6))
    theirs = resample_abs_pos_embed(rows[None], (3, 9), (4, 6), num_prefix_tokens=0)
    close(resize_grid(rows, (4, 6), (3, 9)), theirs[0])


@pytest.mark.parametrize(("old", "new"), [*GRIDS, ((14, 14), (24, 24)), ((24, 24), (14, 14))])
def test_aligned_corners_equal_vit_jax(old, new):
    rows = table(old, torch.float64)
    theirs = zoom(rows.unflatten(0, old).numpy(), (new[0] / old[0], new[1] / old[1], 1), order=1)
    close(resize_grid(rows, old, new, **GOOGLE), torch.from_numpy(theirs).flatten(0, 1), atol=1e-12)


def test_the_last_row_is_not_zero_as_in_scipy():
    """For some sizes scipy's zoom rounds beyond the edge and fills the last row with zeros; we do not."""
    old, new = (24, 24), (22, 22)
    rows = 3 + torch.rand(24 * 24, 2, dtype=torch.float64)
    factors = (22 / 24, 22 / 24, 1)
    with_zeros = zoom(rows.unflatten(0, old).numpy(), factors, order=1)
    expected = zoom(rows.unflatten(0, old).numpy(), factors, order=1, mode="nearest")
    assert (with_zeros[-1] == 0).all()
    assert (with_zeros[:-1, :-1] == expected[:-1, :-1]).all()
    close(resize_grid(rows, old, new, **GOOGLE), torch.from_numpy(expected).flatten(0, 1), atol=1e-12)


@pytest.mark.parametrize(("old", "new"), [(4, 7), (7, 3)])
def test_aligned_corners_equal_torchvision(old, new):
    rows = table((old, old))
    entry = "encoder.pos_embedding"
    theirs = interpolate_embeddings(new * 2, 2, {entry: torch.cat([rows[:1], rows])[None]})[entry][0, 1:]
    close(resize_grid(rows, (old, old), (new, new), antialias=False, corners=True), theirs)


@pytest.mark.parametrize("new", [(7, 7), (3, 2), (2, 8)])
@pytest.mark.parametrize(
    ("embeddings", "config", "options"),
    [
        (Dinov2Embeddings, Dinov2Config, dict(antialias=False)),
        (Dinov2WithRegistersEmbeddings, Dinov2WithRegistersConfig, dict()),
    ],
)
def test_grids_equal_transformers_dinov2(embeddings, config, options, new):
    peer = embeddings(config(hidden_size=6, num_attention_heads=2, image_size=8, patch_size=2))
    rows = peer.position_embeddings[0, 1:]
    tokens = torch.zeros(1, 1 + new[0] * new[1], 6)
    theirs = peer.interpolate_pos_encoding(tokens, new[0] * 2, new[1] * 2)[0, 1:]
    close(resize_grid(rows, (4, 4), new, **options), theirs)


def cubic(old, new, offset):
    """The matrix of 1-D resizing with Keys' cubic, a = -0.75, and repeated edges: (new, old)."""

    def weight(t):
        t = abs(t)
        if t < 1:
            return 1.25 * t**3 - 2.25 * t**2 + 1
        return -0.75 * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0

    matrix = np.zeros((new, old))
    for i in range(new):
        source = (i + 0.5) * old / (new + offset) - 0.5  # in old coordinates
        for j in range(math.floor(source) - 1, math.floor(source) + 3):
            matrix[i, min(max(j, 0), old - 1)] += weight(source - j)
    return matrix


@pytest.mark.parametrize(("old", "new"), [*GRIDS, ((37, 37), (16, 16)), ((16, 16), (16, 37))])
def test_the_offset_of_dinov2(old, new):
    rows = table(old, torch.float64)
    high, wide = cubic(old[0], new[0], 0.1), cubic(old[1], new[1], 0.1)
    theirs = np.einsum("ih,jw,hwd->ijd", high, wide, rows.unflatten(0, old).numpy())
    ours = resize_grid(rows, old, new, **DINOV2)
    close(ours, torch.from_numpy(theirs).flatten(0, 1), atol=1e-10)
    assert (ours - resize_grid(rows, old, new, antialias=False)).abs().max() > 1e-3  # it matters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [*OPTIONS, dict(corners=True), dict(corners=True, offset=7.0)])
def test_the_same_grid_returns_the_same_tensor(options, dtype):
    rows = table((3, 5), dtype)
    before = rows.clone()
    same = resize_grid(rows, (3, 5), (3, 5), **options)
    assert same is rows
    assert torch.equal(same, before)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_constant_tables_and_transposed_grids(old, new, options):
    rows = table(old, torch.float64)
    flat = rows[:1].expand(len(rows), -1)
    close(resize_grid(flat, old, new, **options), rows[:1].expand(new[0] * new[1], -1), atol=1e-12)

    def transpose(rows, grid):
        return rows.unflatten(0, grid).transpose(0, 1).flatten(0, 1)

    transposed = resize_grid(transpose(rows, old), old[::-1], new[::-1], **options)
    close(transposed, transpose(resize_grid(rows, old, new, **options), new), atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_single_column_is_a_transposed_single_row(options):
    """Not so in torch 2.13 and timm: interpolate with antialias repeats one value."""
    rows = torch.arange(3.0)[:, None].expand(3, 6)
    column = resize_grid(rows, (3, 1), (5, 1), **options)
    assert torch.equal(column, resize_grid(rows, (1, 3), (1, 5), **options))
    assert (column.diff(dim=0) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_half_precision_is_rounded_once_at_the_end(options, dtype):
    rows = table((4, 3), dtype)
    ours = resize_grid(rows, (4, 3), (5, 7), **options)
    assert torch.equal(ours, resize_grid(rows.float(), (4, 3), (5, 7), **options).to(dtype))


def test_double_precision_is_kept():
    rows, kernel = table((4, 3), torch.float64), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for ours, single in [
        (resize_grid(rows, (4, 3), (5, 7)), resize_grid(rows.float(), (4, 3), (5, 7))),
        (resize_kernel(kernel, (6, 5)), resize_kernel(kernel.float(), (6, 5))),
    ]:
        assert ours.dtype == torch.float64
        assert single.dtype == torch.float32
        assert 0 < (ours - single).abs().max() < 1e-5


def test_a_resampled_table_fits_a_model_and_has_gradients():
    small = vt.ViT(vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=(12, 8)))
    large = vt.ViT(vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=(16, 20)))
    prefix, rows = small.position.table[:1], small.position.table[1:]
    resized = torch.cat([prefix, resize_grid(rows, small.config.grid, large.config.grid)])
    assert resized.shape == large.position.table.shape
    assert resize_grid(rows, (3, 2), (4, 5)).is_contiguous()  # as safetensors requires
    resized.sum().backward()
    assert (small.position.table.grad[1:] != 0).all()


# Patch kernels.


def resize_patches(x, new):
    return F.interpolate(x, size=new, mode="bilinear", align_corners=False)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("old", "new"), PATCHES)
def test_kernels_equal_timm(old, new, method, antialias):
    kernel = torch.randn(5, 2, *old)
    theirs = resample_patch_embed(kernel, new, interpolation=method, antialias=antialias)
    close(resize_kernel(kernel, new, method=method, antialias=antialias), theirs, atol=2e-5)


@pytest.mark.parametrize(("old", "new"), [((4, 4), (8, 8)), ((4, 6), (7, 13)), ((14, 14), (16, 16))])
def test_larger_patches_give_the_same_tokens(old, new):
    x, kernel = torch.randn(8, 3, *old), torch.randn(5, 3, *old)
    tokens = torch.einsum("bcpq,dcpq->bd", x, kernel)
    resized = torch.einsum("bcpq,dcpq->bd", resize_patches(x, new), resize_kernel(kernel, new))
    close(resized, tokens, atol=1e-3)
    stretched = torch.einsum("bcpq,dcpq->bd", resize_patches(x, new), resize_patches(kernel, new))
    assert (stretched - tokens).abs().max() > 1  # unlike a kernel that is resized like an image


@pytest.mark.parametrize(("old", "new"), PATCHES)
def test_the_kernel_is_the_least_squares_solution(old, new):
    kernel = torch.randn(5, 2, *old, dtype=torch.float64)
    pixels = torch.eye(math.prod(old), dtype=torch.float64).view(-1, 1, *old)
    B = resize_patches(pixels, new).flatten(1).T  # (P' Q', P Q)
    nearest = torch.linalg.lstsq(B.T, kernel.flatten(2).flatten(0, 1).T, driver="gelsd").solution.T
    close(resize_kernel(kernel, new), nearest.view(5, 2, *new), atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_same_patch_size_returns_the_same_tensor(dtype):
    kernel = torch.randn(5, 2, 4, 6, dtype=dtype)
    before = kernel.clone()
    same = resize_kernel(kernel, (4, 6))
    assert same is kernel
    assert torch.equal(same, before)


def test_a_half_precision_kernel_is_rounded_once_at_the_end():
    kernel = torch.randn(5, 2, 4, 6).bfloat16()
    ours = resize_kernel(kernel, (6, 7))
    assert torch.equal(ours, resize_kernel(kernel.float(), (6, 7)).bfloat16())


# Errors.

ROWS = torch.zeros(12, 6)
GRID_ERRORS = [
    (
        (torch.zeros(13, 6), (3, 4), (6, 8)),
        dict(),
        r"shape \(12, D\), a row for each patch of the old 3x4 grid, not \(13, 6\); .* rows\[1:\]",
    ),
    ((torch.zeros(11, 6), (3, 4), (3, 4)), dict(), r"not \(11, 6\); pass the grid"),
    ((torch.zeros(1, 12, 6), (3, 4), (6, 8)), dict(), r"not \(1, 12, 6\); drop the batch axis: rows\[0\]"),
    ((torch.zeros(12), (3, 4), (6, 8)), dict(), r"not \(12,\); pass the grid"),
    ((np.zeros((12, 6)), (3, 4), (6, 8)), dict(), r"floating-point tensor, not ndarray; convert with"),
    ((ROWS.long(), (3, 4), (6, 8)), dict(), r"floating-point tensor, not torch.int64"),
    ((ROWS, (3, 4), (6, 0)), dict(), r"The new grid must be \(height, width\), .* not \(6, 0\)"),
    ((ROWS, (12,), (6, 8)), dict(), r"The old grid must be .* not \(12,\)"),
    ((ROWS, (3, 4), (6, 7.5)), dict(), r"not \(6, 7.5\)"),
    ((ROWS, (3, 4), (6, 8)), dict(method="cubic"), r"method 'cubic'. Did you mean 'bicubic'\? Choose from"),
    ((ROWS, (3, 4), (6, 8)), dict(method="nearest"), r"method 'nearest'. Choose from: bicubic, bilinear"),
    ((ROWS, (3, 4), (6, 8)), dict(corners=True), r"corners=True .* antialias=True.*set antialias=False"),
    (
        (ROWS, (3, 4), (6, 8)),
        dict(corners=True, antialias=False, offset=0.1),
        r"corners=True .* offset=0.1; set only one",
    ),
    ((ROWS, (3, 4), (6, 8)), dict(offset=1.0), r"offset must be .* not 1.0; use 0.1 for DINOv2"),
    ((ROWS, (3, 4), (6, 8)), dict(offset=-0.1), r"not -0.1"),
    ((ROWS, (3, 4), (6, 8)), dict(offset=math.nan), r"not nan"),
    ((torch.zeros(49, 6), (49, 1), (1, 1)), dict(offset=1e-20), r"offset=1e-20 is too small"),
]
KERNEL_ERRORS = [
    (
        (torch.zeros(5, 32), (4, 4)),
        r"shape \(D, C, P, Q\), not \(5, 32\); .*weight.unflatten\(1, \(C, P, Q\)\)",
    ),
    ((torch.zeros(5, 2, 4, 4), (4, -4)), r"The new patch size must be \(height, width\), .* not \(4, -4\)"),
    ((torch.zeros(5, 2, 4, 4).int(), (8, 8)), r"A patch kernel must be .*, not torch.int32"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), GRID_ERRORS)
def test_grid_errors(arguments, options, message):
    with pytest.raises(InputError, match=message):
        resize_grid(*arguments, **options)


@pytest.mark.parametrize(("arguments", "message"), KERNEL_ERRORS)
def test_kernel_errors(arguments, message):
    with pytest.raises(InputError, match=message):
        resize_kernel(*arguments)
