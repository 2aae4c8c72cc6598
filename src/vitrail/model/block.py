"""One encoder block: Eq. 2 and Eq. 3, a line each."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model.attention import Attention
from vitrail.model.mlp import MLP
from vitrail.model.tap import Tap


class Block(nn.Module):
    """Tokens exchange (attention), then each thinks for itself (MLP); both add to what is there."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)
        self.out = Tap()

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.drop(self.attention(self.norm1(z)))  # Eq. 2: z' = MSA(LN(z)) + z
        z = z + self.drop(self.mlp(self.norm2(z)))  # Eq. 3: z = MLP(LN(z')) + z'
        return self.out(z)
