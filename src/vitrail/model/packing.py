"""Images of different sizes in one forward pass (NaViT, Dehghani et al. 2023; NaFlex, Tschannen et al. 2025).

The tokens of all images form one sequence. Everything that acts on a token by itself runs on all of them at
once; attention stays within each image (segments.py), and positions are those of each image's own grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model.check_input import check_input
from vitrail.model.modes import run_block
from vitrail.model.segments import Segments

if TYPE_CHECKING:
    from vitrail.model.vit import ViT

    Grid = tuple[int, ...]


def encode_packed(model: ViT, images: Sequence[Tensor]) -> Tensor:
    """The pooled vectors (B, D) of images (C, H, W) of any sizes, in their order."""
    grids = _check(model, images)
    order = sorted(range(len(images)), key=lambda index: grids[index])  # equal grids side by side
    runs = [list(run) for _, run in groupby(order, key=lambda index: grids[index])]
    parts = [model.first_tokens(torch.stack([images[i] for i in run]), grids[run[0]]) for run in runs]
    counts = [(len(run), part.shape[1], grids[run[0]]) for run, part in zip(runs, parts, strict=True)]
    segments = Segments([length for count, length, _ in counts for _ in range(count)])
    rotate = model.position.packed_rotation([grids[index] for index in order])
    z = torch.cat([part.flatten(0, 1) for part in parts])[None]  # (1, T of all images, D)
    for index, block in enumerate(model.blocks):
        if index and model.config.position_at == "every":
            z = torch.cat(
                [model.position.before_block(part, grid).flatten(0, 1) for part, grid in _split(z, counts)]
            )[None]
        z = run_block(block, z, segments, rotate, checkpointing=index < model.checkpointed_blocks)
    pooled = torch.cat([model.finish(part, grid).pooled for part, grid in _split(z, counts)])
    return pooled[torch.tensor(order, device=pooled.device).argsort()]


def _split(z: Tensor, counts: list[tuple[int, int, Grid]]) -> list[tuple[Tensor, Grid]]:
    """The images of each size again: (b, T, D), with their grid."""
    sizes = [count * length for count, length, _ in counts]
    pieces = zip(z[0].split(sizes), counts, strict=True)
    return [(piece.unflatten(0, (count, length)), grid) for piece, (count, length, grid) in pieces]


def _check(model: ViT, images: Sequence[Tensor]) -> list[Grid]:
    """The patch grid of each image, of a model that takes any size."""
    if model.training and model.config.patch_dropout:
        raise InputError(
            "Patches cannot be dropped from images of different sizes; use patch_dropout=0, or call "
            "model.eval() first."
        )
    if not model.any_size:
        raise InputError("Call model.accept_any_size() first: it says how positions are resized.")
    if not len(images):
        raise InputError("A pack must hold at least one image; pass a list of tensors (C, H, W).")
    dtype, wrong = model.tokens.proj.weight.dtype, [image for image in images if image.ndim != 3]
    if wrong:
        raise InputError(
            f"A pack is a list of images (C, H, W), not {tuple(wrong[0].shape)}; unbind the batch."
        )
    return [check_input(image[None], model.config, dtype, any_size=True) for image in images]
