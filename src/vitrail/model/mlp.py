"""The MLP of Eq. 3: two dense layers with a GELU between, on each token by itself."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model.tap import Tap


class MLP(nn.Module):
    """GELU(z W_1 + b_1) W_2 + b_2, with the exact GELU x Phi(x)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        assert config.mlp_width is not None  # ViTConfig has filled it in
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.activation = nn.GELU()
        self.hidden = Tap()
        self.drop = nn.Dropout(config.dropout)
        self.fc2 = nn.Linear(config.mlp_width, config.width)
        self.out = Tap()

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.hidden(self.activation(self.fc1(z)))  # (B, T, F)
        return self.out(self.fc2(self.drop(hidden)))  # (B, T, D)
