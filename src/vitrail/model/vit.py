"""The Vision Transformer of Dosovitskiy et al. (2020), "An image is worth 16x16 words".

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos          (1)   ViT.encode
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}         l = 1 ... L    (2)   Block.forward, block.py
    z_l  = MLP(LN(z'_l)) + z'_l               l = 1 ... L    (3)   Block.forward, block.py
    y    = LN(z_L^0)                                         (4)   ViT.finish, pool.py

A picture of C x H x W pixels becomes N = h w patches of P x P pixels; with the class token before
them these are T = N + 1 tokens of width D. Where to find the parts: x_p E in tokens.py, E_pos in
position.py, MSA in attention.py, MLP in mlp.py, LN in norm.py, y in pool.py, logits in head.py, first
values in init.py. What is written here holds for every config; the parts differ, built by a `match`
on one field each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.memory import check_parameters
from vitrail.model.block import build_block
from vitrail.model.head import build_head
from vitrail.model.init import initialise
from vitrail.model.inputs import check_input
from vitrail.model.norm import build_norm
from vitrail.model.pool import build_pool
from vitrail.model.position import build_position
from vitrail.model.tap import Tap
from vitrail.model.tokens import PatchDropout, build_tokens


@dataclass(frozen=True, eq=False)
class Encoded:
    """What the encoder made of a batch of pictures, after the last norm."""

    tokens: Tensor
    """All tokens: (B, T, D)."""
    pooled: Tensor
    """One vector for each picture, y of Eq. 4: (B, D)."""
    prefix_count: int
    """n, how many tokens stand before the patches."""
    grid: tuple[int, ...]
    """(h, w), the patch grid; of other inputs, the grid along their own axes."""
    layers: Mapping[int, Encoded] = field(default_factory=dict)
    """The same view after each block that was asked for."""

    @property
    def prefix(self) -> Tensor:
        """The tokens before the patches: (B, n, D)."""
        return self.tokens[:, : self.prefix_count]

    @property
    def patches(self) -> Tensor:
        """The patch tokens where they lie in the picture: (B, h, w, D)."""
        patches, count = self.tokens[:, self.prefix_count :], math.prod(self.grid)
        if patches.shape[1] != count:
            raise InputError(
                "Patches can be laid out as a grid only while all of them are there.",
                f"{patches.shape[1]} of {count}, after patch dropout",
                "Use .tokens, or call model.eval() first.",
            )
        return patches.unflatten(1, self.grid)


class ViT(nn.Module):
    """A Vision Transformer: pictures (B, C, H, W) to logits (B, K).

    With another `input` in its config it takes videos (B, C, frames, H, W), sounds (B, samples) or
    rows of token numbers (B, length); only the token maker differs.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise InputError(
                "ViT is built from a ViTConfig.", repr(config), 'By name it is vitrail.create("B/16").'
            )
        if torch.empty(0).device.type == "cpu":  # on "meta" it takes none
            check_parameters(config)
        self.config = config
        self.tokens = build_tokens(config)  # x_p -> x_p E
        prefix = nn.Parameter(torch.empty(config.prefix, config.width))
        self.prefix = prefix if config.prefix else None  # x_class and its kin
        self.position = build_position(config)  # E_pos
        self.drop = nn.Dropout(config.dropout)
        self.drop_patches = PatchDropout(config)
        self.norm_pre = build_norm(config) if config.norm_pre else nn.Identity()
        self.blocks = nn.ModuleList(build_block(config, index) for index in range(config.depth))
        self.norm = build_last_norm(config)
        self.pool = build_pool(config)
        self.head = build_head(config)
        self.embed, self.encoded, self.pooled, self.logits = Tap(), Tap(), Tap(), Tap()
        initialise(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); without a head the pooled vector (B, D)."""
        return self.logits(self.head(self.encode(images).pooled))

    def encode(self, images: Tensor, layers: Sequence[int] | None = None) -> Encoded:
        """Tokens after the last norm, as `.patches`, `.prefix` and `.pooled`.

        Args:
            images: (B, C, H, W).
            layers: blocks to look at on the way, from 0; `.layers[i]` is then what the encoder
                would return if block i were its last, so `model.head(enc.layers[i].pooled)` is
                the logit lens.
        """
        check_input(images, self.config, self.tokens.proj.weight.dtype)
        wanted = self._check_layers(layers)
        z = self.tokens(images)  # x_p E: (B, N, D)
        if self.prefix is not None:
            prefix = self.prefix.expand(z.shape[0], -1, -1)  # x_class: (B, n, D)
            z = torch.cat([prefix, z], dim=1)  # (B, T, D)
        z = self.embed(self.norm_pre(self.drop_patches(self.drop(self.position(z)))))  # Eq. 1
        seen = {}
        for index, block in enumerate(self.blocks):
            z = z if index == 0 else self.position.again(z)
            z = block(z, turn=self.position.turn)  # Eq. 2 and 3
            if index in wanted:
                seen[index] = self.finish(z)
        return replace(self.finish(z), layers=seen)

    def finish(self, z: Tensor) -> Encoded:
        """The last norm, and one vector for the whole picture."""
        if self.config.pool_norm == "after":
            tokens = self.encoded(z)
            y = self.pooled(self.norm(self.pool(tokens)))
        else:
            tokens = self.encoded(self.norm(z))  # (B, T, D)
            y = self.pooled(self.pool(tokens))  # Eq. 4: (B, D)
        return Encoded(tokens, y, self.config.prefix, self.config.grid)

    def _check_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        wanted = tuple(layers) if isinstance(layers, Iterable) else () if layers is None else (layers,)
        for index in wanted:
            if not isinstance(index, int) or index not in range(self.config.depth):
                raise InputError(
                    f"layers must be block numbers from 0 to {self.config.depth - 1}.",
                    repr(index),
                    "Blocks count from 0.",
                )
        return wanted


def build_last_norm(config: ViTConfig) -> nn.Module:
    """LN of Eq. 4, over tokens or over the pooled vector."""
    match config.pool_norm:
        case "before":
            return build_norm(config)
        case "after":
            return build_norm(config, config.pooled_width)
        case "none":
            return nn.Identity()
