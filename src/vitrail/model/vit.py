"""The Vision Transformer of Dosovitskiy et al. (2020), "An image is worth 16x16 words".

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos          (1)   ViT.encode
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}         l = 1 ... L    (2)   Block.forward, block.py
    z_l  = MLP(LN(z'_l)) + z'_l               l = 1 ... L    (3)   Block.forward, block.py
    y    = LN(z_L^0)                                         (4)   ViT.finish

A picture of C x H x W pixels becomes N = h w patches of P x P pixels; with the class token before
them these are T = N + 1 tokens of width D. Where to find the parts: x_p E in tokens.py, E_pos in
position.py, MSA in attention.py, MLP in mlp.py, first values in init.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.model.block import Block
from vitrail.model.init import initialise
from vitrail.model.position import LearnedPosition
from vitrail.model.tap import Tap
from vitrail.model.tokens import PatchTokens


@dataclass(frozen=True)
class Encoded:
    """What the encoder made of a batch of pictures, after the last norm."""

    tokens: Tensor
    """All tokens: (B, T, D)."""
    pooled: Tensor
    """One vector for each picture, y of Eq. 4: (B, D)."""
    grid: tuple[int, int]
    """(h, w), the patch grid."""
    layers: Mapping[int, Encoded] = field(default_factory=dict)
    """The same view after each block that was asked for."""

    @property
    def prefix(self) -> Tensor:
        """The tokens before the patches: (B, n, D)."""
        h, w = self.grid
        return self.tokens[:, : self.tokens.shape[1] - h * w]

    @property
    def patches(self) -> Tensor:
        """The patch tokens where they lie in the picture: (B, h, w, D)."""
        h, w = self.grid
        return self.tokens[:, self.tokens.shape[1] - h * w :].unflatten(1, (h, w))


class ViT(nn.Module):
    """A Vision Transformer: pictures (B, C, H, W) to logits (B, K)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = PatchTokens(config)  # x_p -> x_p E
        self.prefix = nn.Parameter(torch.empty(config.prefix, config.width))  # x_class
        self.position = LearnedPosition(config)  # E_pos
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.head = nn.Linear(config.width, config.classes) if config.classes else nn.Identity()
        self.embed, self.encoded, self.pooled, self.logits = Tap(), Tap(), Tap(), Tap()
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); without a head the pooled vector (B, D)."""
        return self.logits(self.head(self.encode(images).pooled))

    def encode(self, images: Tensor, layers: Sequence[int] = ()) -> Encoded:
        """Tokens after the last norm, as `.patches`, `.prefix` and `.pooled`.

        Args:
            images: (B, C, H, W).
            layers: blocks to look at on the way, from 0; `.layers[i]` is then what the encoder
                would return if block i were its last, so `model.head(enc.layers[i].pooled)` is
                the logit lens.
        """
        self._check_images(images)
        self._check_layers(layers)
        z = self.tokens(images)  # x_p E: (B, N, D)
        x_class = self.prefix.expand(z.shape[0], -1, -1)  # (B, 1, D)
        z = torch.cat([x_class, z], dim=1)  # (B, T, D)
        z = self.embed(self.drop(self.position(z)))  # Eq. 1
        seen = {}
        for index, block in enumerate(self.blocks):
            z = block(z)  # Eq. 2 and 3
            if index in layers:
                seen[index] = self.finish(z)
        return replace(self.finish(z), layers=seen)

    def finish(self, z: Tensor) -> Encoded:
        """The last norm, and the class token for the whole picture."""
        tokens = self.encoded(self.norm(z))  # (B, T, D)
        y = self.pooled(tokens[:, 0])  # Eq. 4: (B, D)
        return Encoded(tokens, y, self.config.grid)

    def _check_images(self, images: Tensor) -> None:
        (H, W), C = self.config.pixels, self.config.channels
        if not isinstance(images, Tensor):
            raise InputError(
                "Pictures must come as a torch tensor.",
                type(images).__name__,
                "Convert them with torch.as_tensor.",
            )
        if images.ndim != 4 or images.shape[1:] != (C, H, W):
            raise InputError(
                f"Pictures must have the shape (batch, {C}, {H}, {W}) that the model was built for.",
                str(tuple(images.shape)),
                _shape_advice(images, C, H, W),
            )
        dtype, expected = images.dtype, self.tokens.proj.weight.dtype
        if dtype != expected and not torch.is_autocast_enabled(images.device.type):
            raise InputError(
                f"Pictures must have the model's dtype, {expected}.",
                str(dtype),
                f"Convert them with images.to({expected})"
                + (
                    "."
                    if dtype.is_floating_point
                    else ", and scale them as the model expects (often to -1 ... 1)."
                ),
            )

    def _check_layers(self, layers: Sequence[int]) -> None:
        for index in layers:
            if index not in range(self.config.depth):
                raise InputError(
                    f"layers must be block numbers from 0 to {self.config.depth - 1}.",
                    repr(index),
                    "Blocks count from 0.",
                )


def _shape_advice(images: Tensor, C: int, H: int, W: int) -> str:
    """What to do about a wrong shape, for the slips that are common."""
    if images.ndim == 3 and images.shape == (C, H, W):
        return "Add a batch axis: images[None]."
    if images.ndim == 4 and images.shape[1:] == (H, W, C):
        return "Put the channels first: images.permute(0, 3, 1, 2)."
    if images.ndim == 4 and images.shape[1] != C:
        return f"Build the model with channels={images.shape[1]}, or convert the pictures."
    if images.ndim == 4:
        return f"Resize the pictures, or build the model with size={tuple(images.shape[2:])}."
    return "Stack the pictures into one batch."
