"""The last block for a head that reads the class token only: of the other tokens, only k and v are needed.

The model itself computes all tokens, as the paper has it. Training and faster inference, which need logits
alone, apply this from outside: it gives the same logits and gradients to rounding, and of a block's products
it takes 2/12 instead of all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.model.block import Block
from vitrail.model.pool import ClassPool
from vitrail.model.position import Rotate, identity
from vitrail.model.segments import Segments
from vitrail.model.vit import ViT


class LastBlock(Block):
    """The pre-norm block for its first tokens only, which attend to all."""

    read: int
    """How many tokens are computed."""
    in_evaluation: bool
    """Whether also in evaluation mode; otherwise all tokens are computed there."""

    def forward(self, z: Tensor, mask: Tensor | Segments | None = None, rotate: Rotate = identity) -> Tensor:
        if (
            isinstance(mask, Segments)
            or self.attention.explicit  # weights are recorded, of all tokens
            or not (self.training or self.in_evaluation)
        ):
            return super().forward(z, mask, rotate)
        y, count = self.norm1(z), self.read

        def rotate_context(tokens: Tensor) -> Tensor:
            return tokens if tokens.shape[2] == count else rotate(tokens)  # no prefix token is rotated

        rows = None if mask is None else mask[..., :count, :]
        heads = self.attention(y[:, :count], y, mask=rows, rotate=rotate_context)
        z = z[:, :count] + self._skip(self.scale1(self.drop(heads)), None)  # Eq. 2
        return self.out(z + self.mlp_branch(self.norm2(z)))  # Eq. 3


def tokens_read(model: ViT) -> int | None:
    """How many tokens of its last block a model's head reads; None if it may read all of them."""
    block: Any = model.blocks[-1]
    config = model.config
    if not isinstance(model.pool, ClassPool) or type(block) is not Block or block.attention.bias is not None:
        return None
    return model.pool.count if config.prefix >= model.pool.count and config.tokens > config.prefix else None


def shorten_last_block(model: ViT, *, in_evaluation: bool = False) -> bool:
    """Let the last block compute what the head reads, if that is less; whether it is.

    Args:
        in_evaluation: also in evaluation mode. `encode` then returns no other tokens, so this is for a copy
            of a model of which only logits and pooled vectors are used.
    """
    if (count := tokens_read(model)) is None:
        return False
    block: Any = model.blocks[-1]
    block.__class__ = LastBlock
    block.read, block.in_evaluation = count, in_evaluation
    return True
