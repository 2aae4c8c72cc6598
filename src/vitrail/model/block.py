"""The encoder block, Eq. 2 and Eq. 3, one line each, and its variants."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.model.layers import DropPath, LayerScale, build_mlp, build_norm
from vitrail.model.packing import Segments
from vitrail.model.position import Rotate, build_bias, identity
from vitrail.model.tap import Tap, TappedModule


class Block(TappedModule):
    """The pre-norm block of the paper: a residual attention branch, then a residual MLP branch.

    Args:
        drop_path: the probability of skipping a branch in training (stochastic depth).
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

    def forward(self, z: Tensor, mask: Tensor | Segments | None = None, rotate: Rotate = identity) -> Tensor:
        z = z + self.attention_branch(self.norm1(z), mask, rotate)  # Eq. 2: z' = MSA(LN(z)) + z
        z = z + self.mlp_branch(self.norm2(z), mask)  # Eq. 3: z = MLP(LN(z')) + z'
        return self.out(z)

    def attention_branch(self, z: Tensor, mask: Tensor | Segments | None, rotate: Rotate) -> Tensor:
        """MSA, then dropout, LayerScale and DropPath if the config has them."""
        return self._skip(self.scale1(self.drop(self.attention(z, mask=mask, rotate=rotate))), mask)

    def mlp_branch(self, z: Tensor, mask: Tensor | Segments | None = None) -> Tensor:
        """The MLP, then the same."""
        return self._skip(self.scale2(self.drop(self.mlp(z))), mask)

    def _skip(self, branch: Tensor, mask: Tensor | Segments | None) -> Tensor:
        """DropPath, for each image of a pack by itself."""
        return self.path(branch, mask if isinstance(mask, Segments) else None)


class PostNormBlock(Block):
    """Vaswani et al. 2017: the norm follows the sum."""

    def forward(self, z: Tensor, mask: Tensor | Segments | None = None, rotate: Rotate = identity) -> Tensor:
        z = self.norm1(z + self.attention_branch(z, mask, rotate))
        return self.out(self.norm2(z + self.mlp_branch(z, mask)))


class ResPostNormBlock(Block):
    """Liu et al. 2021 (Swin V2): the norm is on the branch, before the sum."""

    def forward(self, z: Tensor, mask: Tensor | Segments | None = None, rotate: Rotate = identity) -> Tensor:
        z = z + self.norm1(self.attention_branch(z, mask, rotate))
        return self.out(z + self.norm2(self.mlp_branch(z, mask)))


class ParallelBlock(Block):
    """Both branches take the same tokens (Wang and Komatsuzaki 2021; ViT-22B)."""

    def forward(self, z: Tensor, mask: Tensor | Segments | None = None, rotate: Rotate = identity) -> Tensor:
        return self.out(
            z + self.attention_branch(self.norm1(z), mask, rotate) + self.mlp_branch(self.norm2(z), mask)
        )


class NoResidualBlock(Block):
    """Without residual connections, as an ablation."""

    def forward(self, z: Tensor, mask: Tensor | Segments | None = None, rotate: Rotate = identity) -> Tensor:
        z = self.attention_branch(self.norm1(z), mask, rotate)
        return self.out(self.mlp_branch(self.norm2(z), mask))


def build_block(config: ViTConfig, index: int) -> Block:
    """Block `index`, counted from 0; the DropPath probability grows linearly with depth, from 0."""
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
