"""The text tower of CLIP and SigLIP: token ids to one vector, in the space of the image embeddings.

    z_0 = E[t_1 ... t_T] + E_pos[1 ... T]                  TextTower.encode
    z_l = Block(z_{l-1})         l = 1 ... L               block.py, Eq. 2 and 3; causal in CLIP
    y   = LN(z_L)[e] W + b                                 TextTower.forward; e is the end token, or the last

The blocks are those of the ViT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.base.fields import Config, boolean, choice, documented, integer, number
from vitrail.model.block import build_block
from vitrail.model.check_input import check_token_ids
from vitrail.model.config import ViTConfig
from vitrail.model.layers import build_norm
from vitrail.model.position import Grid, LearnedPosition
from vitrail.model.tap import Tap, TappedModule


@documented
@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """A text tower, from token ids to one vector."""

    vocabulary: int = integer("V, the number of different token ids")
    width: int = integer("D, the length of every token vector")
    depth: int = integer("L, the number of blocks")
    heads: int = integer("k, the number of attention heads in each block")
    length: int = integer("The context length: the largest number of tokens in a text")
    mlp_width: int | None = integer("F, the hidden width of the MLP; 4D by default", default=None)
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "silu"] = choice(
        "The activation of the MLP; gelu is the exact one", default="gelu"
    )
    eps: float = number(
        "Added to the variance in every norm", "above 0 and at most 1", lambda e: 0 < e <= 1, 1e-5
    )
    causal: bool = boolean("Whether a token attends only to itself and to those before it", default=True)
    pool: Literal["end", "last"] = choice(
        "Which token's vector is the text's: the end token (CLIP), or the last position (SigLIP)",
        default="end",
    )
    end: int | None = integer(
        "The id of the end token; by default the largest id in a text, which it is in CLIP's vocabulary",
        least=0,
        default=None,
    )
    projection: int | None = integer(
        "The length of the resulting vector; D, unprojected, by default", default=None
    )
    projection_bias: bool = boolean("Whether the projection has a bias (SigLIP's has)", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.as_vit_config  # runs the checks of a ViT of this size

    @property
    def as_vit_config(self) -> ViTConfig:
        """The config of a ViT for texts with the same blocks."""
        shared = ("width", "depth", "heads", "mlp_width", "activation", "eps", "vocabulary")
        return ViTConfig(
            **{name: getattr(self, name) for name in shared},
            input="text",
            patch=1,
            size=self.length,
            class_token=False,
            pool="mean",
            classes=self.projection or 0,
        )


class SequencePosition(LearnedPosition):
    """Learned positions for sequences of any length up to `length`: the first T rows."""

    def forward(self, z: Tensor, grid: Grid = ()) -> Tensor:
        return z + self.table[: z.shape[1]]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """The lower triangular mask (T, T): True where a token may attend, to itself and before."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class TextTower(TappedModule):
    """Token ids (B, T) to vectors (B, projection), which are not yet normalized."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        like, out = config.as_vit_config, config.projection
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.position = SequencePosition(like)
        self.blocks = nn.ModuleList(build_block(like, index) for index in range(config.depth))
        self.norm = build_norm(like)
        self.head = nn.Linear(config.width, out, bias=config.projection_bias) if out else nn.Identity()
        self.embed, self.encoded, self.pooled = Tap(), Tap(), Tap()
        for name, parameter in self.named_parameters():  # as CLIP
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.01 if name == "position.table" else 0.02)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """One vector per text.

        Args:
            tokens: (B, T) integers below V, T at most `length`. A tower that is not causal sees the padding
                too: pad as in training, SigLIP's always to `length`.
        """
        z = self.encode(tokens)  # (B, T, D)
        rows = torch.arange(z.shape[0], device=z.device)
        return self.head(self.pooled(z[rows, self.end_positions(tokens)]))

    def encode(self, tokens: Tensor) -> Tensor:
        """All tokens after the last norm: (B, T, D)."""
        check_token_ids(tokens, self.config.vocabulary)
        length, limit = tokens.shape[1], self.config.length
        if length > limit:
            raise InputError(
                f"A text of {length} tokens is longer than the tower's length of {limit}; cut it, as the "
                "tokenizer does."
            )
        z = self.embed(self.position(self.tokens(tokens)))  # (B, T, D)
        mask = causal_mask(length, z.device) if self.config.causal else None
        for block in self.blocks:
            z = block(z, mask)
        return self.encoded(self.norm(z))

    def end_positions(self, tokens: Tensor) -> Tensor:
        """The position of each text's vector: (B,)."""
        if self.config.pool == "last":
            return torch.full_like(tokens[:, 0], tokens.shape[1] - 1, dtype=torch.int64)
        if self.config.end is None:
            return tokens.argmax(dim=1)
        return (tokens == self.config.end).int().argmax(dim=1)  # the first one
