"""Images of different sizes in one forward pass (NaViT, Dehghani et al. 2023; NaFlex, Tschannen et al. 2025).

The tokens of all images form one sequence. Everything that acts on a token by itself runs on all of them at
once; attention stays within each image, and positions are those of each image's own grid.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model.check_input import check_input
from vitrail.model.resample import ResizeOptions

if TYPE_CHECKING:
    from vitrail.model.vit import ViT

    Grid = tuple[int, ...]

_HALF = (torch.float16, torch.bfloat16)  # what the flash kernel takes


class Segments:
    """The lengths of the sequences in a pack. As the mask of an attention, it is block-diagonal.

    No token of one image ever meets a token of another, so neighbors cannot change an answer, and no
    computation is spent on padding.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._offsets: dict[torch.device, Tensor] = {}

    def offsets(self, device: torch.device) -> Tensor:
        """Where each sequence starts, and where the last one ends: (n + 1,) int32.

        Copied to the device once for all blocks: every copy would wait for it.
        """
        if device not in self._offsets:
            starts = [0, *accumulate(self.lengths)]
            self._offsets[device] = torch.tensor(starts, dtype=torch.int32).to(device)
        return self._offsets[device]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
        """softmax(scale q k^T) v within each sequence; q, k, v and the result are (1, k, T, d)."""
        if q.is_cuda and q.dtype in _HALF and not dropout and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
            return self.attend_flash(q, k, v, scale=scale)
        if q.is_cuda:
            return self.attend_nested(q, k, v, scale=scale, dropout=dropout)
        return self.attend_by_length(q, k, v, scale=scale, dropout=dropout)

    def attend_by_length(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0
    ) -> Tensor:
        """Neighboring sequences of the same length as one batch: the least work on a CPU."""
        outputs, at = [], 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            parts = (x[0, :, at : at + count * length].unflatten(1, (count, length)) for x in (q, k, v))
            one, two, three = (part.transpose(0, 1) for part in parts)  # each (count, k, length, d)
            heads = F.scaled_dot_product_attention(one, two, three, scale=scale, dropout_p=dropout)
            outputs.append(heads.transpose(0, 1).flatten(1, 2))  # (k, count length, d)
            at += count * length
        return torch.cat(outputs, dim=1)[None]

    def attend_flash(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """All sequences in one flash kernel, which takes them as they are: packed, with their offsets."""
        from torch.nn.attention.varlen import varlen_attn

        usual = q.shape[-1] ** -0.5  # the kernel's own factor
        q = q if math.isclose(scale, usual) else q * (scale / usual)
        parts = [x[0].transpose(0, 1) for x in (q, k, v)]  # each (T, k, d)
        offsets, most = self.offsets(q.device), max(self.lengths)
        one, two, three = parts
        heads: Any = varlen_attn(one, two, three, offsets, offsets, most, most)
        return heads.transpose(0, 1)[None]

    def attend_nested(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
        """All sequences in one kernel for sequences of different lengths, by nested tensors."""
        offsets = self.offsets(q.device).long()
        limits: Any = {"min_seqlen": min(self.lengths), "max_seqlen": max(self.lengths)}
        nested = [
            torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1).contiguous(), offsets, **limits)
            for x in (q, k, v)  # each (images, tokens of each, k, d)
        ]
        one, two, three = (x.transpose(1, 2) for x in nested)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
            heads = F.scaled_dot_product_attention(one, two, three, scale=scale, dropout_p=dropout)
        return heads.transpose(1, 2).values().transpose(0, 1)[None]

    def spread(self, values: Tensor) -> Tensor:
        """One value for each sequence, (n, 1, 1), as one for each of its tokens, (1, T, 1)."""
        lengths = torch.tensor(self.lengths, device=values.device)
        return values.repeat_interleave(lengths, output_size=sum(self.lengths)).view(1, -1, 1)

    def dense(self, device: torch.device) -> Tensor:
        """The boolean mask (T, T) of the segments, for attention computed step by step."""
        lengths = torch.tensor(self.lengths, device=device)
        owner = torch.arange(len(self.lengths), device=device).repeat_interleave(lengths)
        return owner[:, None] == owner


def check_any_size(model: ViT, **options: Any) -> ResizeOptions:
    """Refuse a model that takes one size only, and options that exclude each other; returns the options."""
    c = model.config
    for applies, reason in (
        (c.input != "image", f"Only models of images accept any size, and this one has input={c.input!r}"),
        (bool(model.position.fixed_grid), f"{model.position.fixed_grid} (position={c.position!r})"),
        (
            c.embedding == "resnet",
            "The padding of the ResNet stem depends on the image size (embedding='resnet')",
        ),
        (c.pool == "flatten", "The head has weights for each patch (pool='flatten')"),
    ):
        if applies:
            raise InputError(
                f"{reason}, so this model takes one size only; vitrail.surgery.resize changes that size."
            )
    return ResizeOptions(**options).check()


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
    for index in range(len(model.blocks)):
        if index and model.config.position_at == "every":
            z = torch.cat(
                [model.position.before_block(part, grid).flatten(0, 1) for part, grid in _split(z, counts)]
            )[None]
        z = model.block(index)(z, segments, rotate=rotate)
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
