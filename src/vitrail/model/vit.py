"""The Vision Transformer of Dosovitskiy et al. (2020), "An image is worth 16x16 words".

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos          (1)   ViT.first_tokens
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}         l = 1 ... L    (2)   Block.forward, block.py
    z_l  = MLP(LN(z'_l)) + z'_l               l = 1 ... L    (3)   Block.forward, block.py
    y    = LN(z_L^0)                                         (4)   ViT.finish, head.py

An image of C x H x W pixels becomes N = h w patches of P x P pixels; with the class token before
them these are T = N + 1 tokens of width D. Where to find the parts: x_p E in tokens.py, E_pos in
position.py, MSA in attention.py, LN and MLP in layers.py, y and the logits in head.py, initialization in
init.py. This file is the same for every config; each part is chosen by a config field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.base.errors import InputError
from vitrail.base.fields import short_repr
from vitrail.model.block import build_block
from vitrail.model.check_input import check_input, check_mask
from vitrail.model.config import ViTConfig
from vitrail.model.head import build_head, build_pool
from vitrail.model.init import initialize
from vitrail.model.layers import build_norm
from vitrail.model.model_memory import check_parameters
from vitrail.model.packing import check_any_size, encode_packed
from vitrail.model.position import build_position
from vitrail.model.tap import Tap, TappedModule
from vitrail.model.tokens import PatchDropout, build_tokens


@dataclass(frozen=True, eq=False)
class Encoded:
    """The encoder's output for a batch of images, after the last norm."""

    tokens: Tensor
    """All tokens: (B, T, D)."""
    pooled: Tensor
    """One vector per image, y of Eq. 4: (B, D)."""
    prefix_count: int
    """n, the number of tokens before the patches."""
    grid: tuple[int, ...]
    """(h, w), the patch grid; of other inputs, the grid along their own axes."""
    layers: Mapping[int, Encoded] = field(default_factory=dict)
    """The output as if each requested block were the last."""

    @property
    def prefix(self) -> Tensor:
        """The tokens before the patches: (B, n, D)."""
        return self.tokens[:, : self.prefix_count]

    @property
    def patches(self) -> Tensor:
        """The patch tokens on their grid: (B, h, w, D)."""
        patches, count = self.tokens[:, self.prefix_count :], math.prod(self.grid)
        if patches.shape[1] != count:
            raise InputError(
                f"{patches.shape[1]} of {count} patches are left after patch dropout, and they form no grid; "
                "use .tokens, or call model.eval() first."
            )
        return patches.unflatten(1, self.grid)


class ViT(TappedModule):
    """A Vision Transformer: images (B, C, H, W) to logits (B, K).

    With another `input` in its config it takes videos (B, C, frames, H, W), waveforms (B, samples) or
    token ids (B, length); only the tokenizer differs.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise InputError(
                f"ViT takes a ViTConfig, not {short_repr(config)}; to build one by name, use "
                'vitrail.create("B/16"), and to load a checkpoint, ViT.from_pretrained(path).'
            )
        if torch.empty(0).device.type == "cpu":  # on "meta" nothing is allocated
            check_parameters(config)
        self.config, self.any_size, self.checkpointed_blocks = config, False, 0
        self.tokens = build_tokens(config)  # x_p -> x_p E
        prefix = nn.Parameter(torch.empty(config.prefix, config.width))
        self.prefix = prefix if config.prefix else None  # x_class, distillation token, registers
        self.position = build_position(config)  # E_pos
        self.drop = nn.Dropout(config.dropout)
        self.drop_patches = PatchDropout(config)
        self.norm_pre = build_norm(config) if config.norm_pre else nn.Identity()
        self.blocks = nn.ModuleList(build_block(config, index) for index in range(config.depth))
        self.norm = _build_last_norm(config)
        self.pool = build_pool(config)
        self.head = build_head(config)
        self.embed, self.encoded, self.pooled, self.logits = Tap(), Tap(), Tap(), Tap()
        initialize(self, config)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **overrides: Any) -> ViT:
        """Load a pretrained model: `ViT.from_pretrained("hf:google/vit-base-patch16-224", classes=10)`.

        The same as `vitrail.load(name_or_path, **overrides).model`. `vitrail.load` returns the
        preprocessing and the labels as well.

        Args:
            name_or_path: a file or folder of any supported family, or "hf:owner/name" on the Hugging Face
                hub.
            overrides: keywords of `vitrail.load`, such as classes, size, channels, device and dtype.
        """
        from vitrail import load  # the one import upwards: weights/ imports model/, not the reverse

        return load(name_or_path, **overrides).model

    def forward(self, images: Tensor | list[Tensor], mask: Tensor | None = None) -> Tensor:
        """Logits (B, K); without a head the pooled vector (B, D). `mask` is that of `encode`.

        A list of images (C, H, W) may hold different sizes, see `encode_packed`.
        """
        return self.logits(self.head(self.pool_images(images, mask)))

    def pool_images(self, images: Tensor | list[Tensor], mask: Tensor | None = None) -> Tensor:
        """The pooled vectors (B, D) of a batch; after `accept_any_size`, a list of any sizes."""
        if self.any_size and isinstance(images, list):
            return encode_packed(self, images)
        return self.encode(images, mask=mask).pooled  # type: ignore[arg-type]  # refuses a list by name

    def encode(
        self, images: Tensor, layers: Sequence[int] | None = None, mask: Tensor | None = None
    ) -> Encoded:
        """Tokens after the last norm, as `.patches`, `.prefix` and `.pooled`.

        Args:
            images: (B, C, H, W).
            mask: which tokens each token may attend to, in every block: boolean, (T, T), or (B, T, T) for
                each image. Prefix tokens come first. By default every token attends to all.
            layers: blocks whose output to return as well, counted from 0; `.layers[i]` is what the encoder
                would return if block i were its last, so `model.head(enc.layers[i].pooled)` is the logit
                lens.
        """
        grid = check_input(images, self.config, self.tokens.proj.weight.dtype, any_size=self.any_size)
        requested = self._check_layers(layers)
        z = self.first_tokens(images, grid)  # Eq. 1
        mask = check_mask(mask, z)
        rotate, intermediate = self.position.rotation(grid), {}
        for index in range(self.config.depth):
            z = z if index == 0 else self.position.before_block(z, grid)
            z = self.block(index)(z, mask, rotate=rotate)  # Eq. 2 and 3
            if index in requested:
                intermediate[index] = self.finish(z, grid)
        return replace(self.finish(z, grid), layers=intermediate)

    def first_tokens(self, images: Tensor, grid: tuple[int, ...]) -> Tensor:
        """z_0 of Eq. 1: the tokens of the images with their positions, (B, T, D)."""
        z = self.tokens(images)  # x_p E: (B, N, D)
        if self.prefix is not None:
            x_class = self.prefix.expand(z.shape[0], -1, -1)  # (B, n, D)
            z = torch.cat([x_class, z], dim=1)  # [x_class; x_p E]: (B, T, D)
        z = self.position(z, grid)  # + E_pos
        z = self.norm_pre(self.drop_patches(self.drop(z)))
        return self.embed(z)  # z_0

    def block(self, index: int) -> Callable[..., Tensor]:
        """A block; checkpointed, only its input is stored, and the backward pass runs it again."""
        block: nn.Module = self.blocks[index]
        if index < self.checkpointed_blocks and torch.is_grad_enabled():
            return partial(checkpoint, block, use_reentrant=False)
        return block

    def encode_packed(self, images: Sequence[Tensor]) -> Tensor:
        """The pooled vectors (B, D) of images (C, H, W) of different sizes, in one forward pass.

        `self.head` maps them to logits. An image's vector does not depend on the others.
        `accept_any_size` must have been called.
        """
        return encode_packed(self, images)

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm, prefix first: (B, T, D), as in timm. `encode` returns more."""
        return self.encode(images).tokens

    def finish(self, z: Tensor, grid: tuple[int, ...] | None = None) -> Encoded:
        """The final norm and pooling."""
        if self.config.pool_norm == "after":
            tokens = self.encoded(z)
            y = self.pooled(self.norm(self.pool(tokens)))
        else:
            tokens = self.encoded(self.norm(z))  # (B, T, D)
            y = self.pooled(self.pool(tokens))  # Eq. 4: (B, D)
        return Encoded(tokens, y, self.config.prefix, grid or self.config.grid)

    def accept_any_size(self, **options: Any) -> Self:
        """Accept images whose height and width are any multiples of the patch size; returns the model.

        Learned positions are resampled to the grid of each batch, as `surgery.resize` does once for a new
        size. `config.size` and the parameters do not change.

        Args:
            options: how positions are resampled: method, antialias, corners and offset of
                `resample.resize_grid`.
        """
        self.position.resize_options, self.any_size = check_any_size(self, **options), True
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        """Store only the input of each block and recompute the rest in the backward pass; returns the model.

        Training then takes less memory and the time of one more forward pass; its numbers do not change.
        """
        self.checkpointed_blocks = self.config.depth if enable else 0
        return self

    def _check_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        indices = tuple(layers) if isinstance(layers, Iterable) else () if layers is None else (layers,)
        for index in indices:
            if not isinstance(index, int) or index not in range(self.config.depth):
                raise InputError(
                    f"layers must be block indices from 0 to {self.config.depth - 1}, not {index!r}."
                )
        return indices


def _build_last_norm(config: ViTConfig) -> nn.Module:
    """LN of Eq. 4, over tokens or over the pooled vector."""
    match config.pool_norm:
        case "before":
            return build_norm(config)
        case "after":
            return build_norm(config, config.pooled_width)
        case "none":
            return nn.Identity()
