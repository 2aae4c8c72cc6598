"""One encoder block: Eq. 2 and Eq. 3, a line each; and the blocks that put the norms elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model.attention import Attention, unchanged
from vitrail.model.mlp import build_mlp
from vitrail.model.norm import DropPath, LayerScale, build_norm
from vitrail.model.position import build_bias
from vitrail.model.tap import Tap


class Block(nn.Module):
    """Tokens exchange (attention), then each thinks for itself (MLP); both add to what is there.

    Args:
        drop_path: how often, in training, a branch is left out.
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = build_norm(config)
        self.attention = Attention(config, bias=build_bias(config))
        self.norm2 = build_norm(config)
        self.mlp = build_mlp(config)
        self.drop = nn.Dropout(config.dropout)
        scaled = config.layer_scale is not None
        self.scale1 = LayerScale(config) if scaled else nn.Identity()
        self.scale2 = LayerScale(config) if scaled else nn.Identity()
        self.path = DropPath(drop_path)
        self.out = Tap()

    def forward(self, z: Tensor, mask: Tensor | None = None, turn: Turn = unchanged) -> Tensor:
        z = z + self.attended(self.norm1(z), mask, turn)  # Eq. 2: z' = MSA(LN(z)) + z
        z = z + self.thought(self.norm2(z))  # Eq. 3: z = MLP(LN(z')) + z'
        return self.out(z)

    def attended(self, z: Tensor, mask: Tensor | None, turn: Turn) -> Tensor:
        """The first branch: MSA, then dropout, LayerScale and DropPath where there are any."""
        return self.path(self.scale1(self.drop(self.attention(z, mask=mask, turn=turn))))

    def thought(self, z: Tensor) -> Tensor:
        """The second branch: the MLP, then the same."""
        return self.path(self.scale2(self.drop(self.mlp(z))))


class PostNormBlock(Block):
    """Vaswani et al. 2017: the norm after the sum."""

    def forward(self, z: Tensor, mask: Tensor | None = None, turn: Turn = unchanged) -> Tensor:
        z = self.norm1(z + self.attended(z, mask, turn))
        return self.out(self.norm2(z + self.thought(z)))


class ResPostNormBlock(Block):
    """Note 004's post-layernorm (Liu et al. 2021, Swin V2): the norm on the branch, before the sum."""

    def forward(self, z: Tensor, mask: Tensor | None = None, turn: Turn = unchanged) -> Tensor:
        z = z + self.norm1(self.attended(z, mask, turn))
        return self.out(z + self.norm2(self.thought(z)))


class ParallelBlock(Block):
    """Both branches from the same tokens (Wang and Komatsuzaki 2021; ViT-22B)."""

    def forward(self, z: Tensor, mask: Tensor | None = None, turn: Turn = unchanged) -> Tensor:
        return self.out(z + self.attended(self.norm1(z), mask, turn) + self.thought(self.norm2(z)))


class NoResidualBlock(Block):
    """The branches without what was there, to see what the sum is good for."""

    def forward(self, z: Tensor, mask: Tensor | None = None, turn: Turn = unchanged) -> Tensor:
        z = self.attended(self.norm1(z), mask, turn)
        return self.out(self.thought(self.norm2(z)))


Turn = Callable[[Tensor], Tensor]


def build_block(config: ViTConfig, index: int) -> Block:
    """Block number `index`, from 0; DropPath grows evenly from none to its full rate."""
    drop_path = config.drop_path * index / max(1, config.depth - 1)
    match config.block:
        case "pre-norm":
            return Block(config, drop_path)
        case "post-norm":
            return PostNormBlock(config, drop_path)
        case "res-post-norm":
            return ResPostNormBlock(config, drop_path)
        case "parallel":
            return ParallelBlock(config, drop_path)
        case "no-residual":
            return NoResidualBlock(config, drop_path)
